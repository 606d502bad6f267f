"""GGUF files converted to folders that transformers loads."""

import json

import numpy as np
import pytest
import torch
from model_files import HEADS, HIDDEN, leftovers, write_gguf
from safetensors import SafetensorError
from safetensors.torch import load_file

from samewise.errors import MachineError, UnsupportedModel
from samewise.model import gguf as gguf_module
from samewise.model.gguf_file import write_outline
from samewise.model.gguf_weights import LIMITS, unpack
from samewise.model.resolve import resolve

pytestmark = pytest.mark.usefixtures("cache")


def test_gguf_file_is_converted_once(gguf_file, cache):
    source = resolve(str(gguf_file))
    assert (source.kind, source.gguf, source.path.parent) == ("gguf", gguf_file, cache / "models")
    assert sorted(p.name for p in source.path.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "digests.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    modified = source.path.stat().st_mtime_ns
    assert resolve(str(gguf_file)) == source
    assert source.path.stat().st_mtime_ns == modified


def test_converted_weights_equal_the_dequantized_file(gguf_file):
    import gguf

    tensors = load_file(resolve(str(gguf_file)).path / "model.safetensors")
    file = {t.name: t for t in gguf.GGUFReader(gguf_file).tensors}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    for name, theirs in (
        ("mlp.down_proj", "ffn_down"),
        ("mlp.up_proj", "ffn_up"),
        ("self_attn.v_proj", "attn_v"),
    ):
        packed = file[f"blk.1.{theirs}.weight"]
        expected = gguf.dequantize(packed.data, packed.tensor_type)
        assert np.array_equal(tensors[f"model.layers.1.{name}.weight"].numpy(), expected)


def test_transformers_loads_a_converted_folder(gguf_file):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve(str(gguf_file)).path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.generation_config.bos_token_id, model.generation_config.pad_token_id) == (1, 2)
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer("ab  7<|end|>").input_ids
    assert tokenizer.decode(ids) == "ab  7<|end|>"
    assert tokenizer.eos_token_id == 2
    assert model.generation_config.eos_token_id == [2, tokenizer.convert_tokens_to_ids("<|eot|>")]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_full_disk_while_converting_is_reported_and_leaves_nothing(gguf_file, cache, monkeypatch):
    def convert(path, reader, folder):
        (folder / "half").write_text("x")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(gguf_module, "convert", convert)
    with pytest.raises(MachineError, match=r"GB needed, .* GB free at"):
        resolve(str(gguf_file))
    assert leftovers(cache / "models" / "any") == []


def test_untied_head_is_converted(tmp_path):
    tensors = load_file(resolve(str(write_gguf(tmp_path / "a.gguf", tied=False))).path / "model.safetensors")
    assert "lm_head.weight" in tensors


def test_file_with_extra_or_missing_tensors_is_refused(tmp_path, cache):
    path = write_gguf(tmp_path / "a.gguf", extra={"rope_freqs.weight": (HIDDEN // HEADS // 2,)})
    with pytest.raises(UnsupportedModel, match=r"1 of its tensors .* have no place"):
        resolve(str(path))
    path = write_gguf(tmp_path / "b.gguf", skip={"blk.1.attn_v.weight"})
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.self_attn\.v_proj"):
        resolve(str(path))
    assert leftovers(cache / "models" / "any") == []


def test_unreadable_gguf_file_is_refused(tmp_path, cache):
    (tmp_path / "a.gguf").write_bytes(b"not a model at all, only text")
    with pytest.raises(UnsupportedModel, match="not a readable GGUF"):
        resolve(str(tmp_path / "a.gguf"))
    assert leftovers(cache / "models" / "any") == []


def test_file_cut_short_is_refused(gguf_file, tmp_path):
    whole = gguf_file.read_bytes()
    for length in (6, 100, len(whole) - 1):
        (tmp_path / "a.gguf").write_bytes(whole[:length])
        with pytest.raises(UnsupportedModel, match="not a readable GGUF"):
            gguf_module.read(tmp_path / "a.gguf")


def test_header_agrees_with_the_package_gguf(gguf_file):
    import gguf

    theirs, ours = gguf.GGUFReader(gguf_file), gguf_module.read(gguf_file)
    assert list(ours.fields) == [name for name in theirs.fields if not name.startswith("GGUF.")]
    for name, value in ours.fields.items():
        assert value == theirs.get_field(name).contents()
    for mine, tensor in zip(ours.tensors, theirs.tensors, strict=True):
        assert (mine.name, mine.shape) == (tensor.name, tuple(reversed(tensor.shape.tolist())))
        assert mine.data.tobytes() == tensor.data.tobytes()


def test_outline_holds_the_fields_and_one_zero_per_tensor(gguf_file, tmp_path):
    file = gguf_module.read(gguf_file)
    write_outline(tmp_path / "a.gguf", file, skip={"tokenizer.ggml.tokens"}, numbers={"llama.extra": 7})
    outline = gguf_module.read(tmp_path / "a.gguf")
    kept = {name: value for name, value in file.fields.items() if name != "tokenizer.ggml.tokens"}
    assert outline.fields == kept | {"llama.extra": 7}
    assert [(t.name, t.shape) for t in outline.tensors] == [(t.name, (1,)) for t in file.tensors]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_unpacked_weights_do_not_depend_on_the_chunks(kind, tmp_path):
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((3, LIMITS.chunk // 2 + 32), dtype=np.float32)
    packed = gguf.quants.quantize(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("a", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=False)
    writer.close()
    (tensor,) = gguf_module.read(tmp_path / "a.gguf").tensors
    assert np.array_equal(unpack(tensor), gguf.dequantize(packed, kind))


def test_qwen_vocabulary_composes_characters_and_is_not_taken_for_an_old_mistral(tmp_path):
    path = resolve(str(write_gguf(tmp_path / "a.gguf", pre="qwen2"))).path
    fields = json.loads((path / "tokenizer.json").read_text())
    assert fields["normalizer"] == {"type": "NFC"}
    assert [cut["type"] for cut in fields["pre_tokenizer"]["pretokenizers"]] == ["Split", "ByteLevel"]
    assert json.loads((path / "config.json").read_text())["transformers_version"] == "5.0.0"
