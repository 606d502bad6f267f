"""Digests of a model's files: which files count, and when a cached digest is used."""

import hashlib
import json
import os

import pytest
import torch
from safetensors.torch import save_file

from samewise.model.digest import config_digests, weights_digest
from samewise.model.resolve import resolve

pytestmark = pytest.mark.usefixtures("cache")


def test_weights_digest_changes_with_the_weights_only(model_folder):
    source = resolve(str(model_folder))
    first = weights_digest(source)
    assert weights_digest(source) == first
    (model_folder / "tokenizer.json").write_text("[]")
    assert weights_digest(source) == first
    (model_folder / "model.safetensors").write_bytes(b"WEIGHTS")
    assert weights_digest(source) != first


def test_config_digests_cover_every_file_that_shapes_text(model_folder):
    for name in (
        "chat_template.jinja",
        "generation_config.json",
        "vocab.json",
        "merges.txt",
        "README.md",
        "a.bin",
    ):
        (model_folder / name).write_text(name)
    digests = config_digests(resolve(str(model_folder)))
    assert list(digests) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "tokenizer.json",
        "vocab.json",
    ]
    assert digests["merges.txt"] == hashlib.sha256(b"merges.txt").hexdigest()


def test_digest_is_cached_only_once_the_file_is_two_seconds_old(model_folder, cache):
    source = resolve(str(model_folder))
    weights_digest(source)
    assert not (cache / "facts").exists()  # just written: it may change within one clock tick
    os.utime(model_folder / "model.safetensors", ns=(1, 1))
    first = weights_digest(source)
    (entry,) = (cache / "facts" / "digest").iterdir()
    entry.write_text(json.dumps({**json.loads(entry.read_text()), "value": "f" * 64}))
    assert weights_digest(source) != first  # the cached value was changed above
    os.utime(model_folder / "model.safetensors", ns=(2, 2))
    assert weights_digest(source) == first


def test_weights_digest_is_a_sha256(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert len(weights_digest(resolve(str(tmp_path)))) == 64
