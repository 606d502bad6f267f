"""Damaged, incomplete and special files in a model's folder: refused in one line, before anything runs."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from samewise.config import EngineConfig
from samewise.errors import UnsupportedModel
from samewise.execute.load import load
from samewise.model.resolve import resolve
from samewise.model.source import weight_files


@pytest.fixture
def copy(folder, tmp_path):
    """A model's folder that a test may damage."""
    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy"


def load_folder(path):
    return load(EngineConfig.of(model=str(path), device="cpu"))


def truncate(path):
    os.truncate(path, path.stat().st_size * 6 // 10)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_weights_that_are_cut_short_are_refused_with_the_file(copy, keep):
    weights = copy / "model.safetensors"
    os.truncate(weights, keep if keep >= 0 else weights.stat().st_size - 1)
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors .*download it again"):
        load_folder(copy)


def test_weights_that_are_too_long_are_refused(copy):
    with (copy / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(UnsupportedModel, match=r"bytes and should have"):
        load_folder(copy)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
@pytest.mark.parametrize(
    "damage", [truncate, lambda path: path.write_bytes(b"\xff\x00")], ids=["cut", "binary"]
)
def test_damaged_configuration_is_refused_with_the_folder(copy, name, damage):
    damage(copy / name)
    with pytest.raises(UnsupportedModel, match=r"cannot be read .*download the model again") as caught:
        load_folder(copy)
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_tensor_is_named_and_not_filled_with_random_numbers(copy):
    tensors = load_file(copy / "model.safetensors")
    tensors.pop("model.layers.0.mlp.down_proj.weight")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"lacks: model\.layers\.0\.mlp\.down_proj\.weight"):
        load_folder(copy)


def test_a_tensor_of_another_shape_is_named(copy):
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(tensors | {name: torch.zeros(3, 3)}, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"another shape .*down_proj\.weight"):
        load_folder(copy)


# ---- links and special files


def test_links_to_plain_files_are_followed(copy, tmp_path):
    """The hub's cache consists of such links."""
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(copy.iterdir())):
        blob = tmp_path / "blobs" / str(number)
        file.rename(blob)
        file.symlink_to(blob)
    assert load_folder(copy).facts["weights"]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"]
)
@pytest.mark.parametrize(
    "replace",
    [
        lambda path: path.symlink_to("nowhere"),
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.mkdir(),
        os.mkfifo,
    ],
    ids=["dangling", "loop", "device", "folder", "pipe"],
)
def test_a_link_to_nothing_a_device_or_a_pipe_is_refused(copy, name, replace):
    """Reading a device or a pipe would never end."""
    (copy / name).unlink()
    replace(copy / name)
    with pytest.raises(UnsupportedModel, match="plain file"):
        resolve(str(copy))


@pytest.mark.parametrize("shard", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "..", 3])
def test_an_index_cannot_name_files_outside_its_folder(copy, shard):
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(UnsupportedModel, match="not a file of its folder"):
        weight_files(copy)
