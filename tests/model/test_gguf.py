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
from samewise.model.resolve import resolve

pytestmark = pytest.mark.usefixtures("cache")


def test_gguf_file_is_converted_once(gguf_file, cache):
    source = resolve(str(gguf_file))
    assert (source.kind, source.gguf, source.path.parent) == ("gguf", gguf_file, cache / "models")
    assert sorted(p.name for p in source.path.iterdir()) == [
        "chat_template.jinja",
        "config.json",
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
