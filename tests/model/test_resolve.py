"""Names of models resolved to folders, or refused with the remedy."""

import json
import os

import pytest

from samewise.errors import UnknownModel, UnsupportedModel
from samewise.model.resolve import EMBEDDED_CONVERSION, read_ahead, resolve
from samewise.model.source import Source, weight_files

pytestmark = pytest.mark.usefixtures("cache")


def test_folder_is_used_in_place(model_folder):
    source = resolve(str(model_folder))
    assert source == Source(str(model_folder), "folder", model_folder)


def test_sharded_folder_must_be_complete(model_folder):
    (model_folder / "model.safetensors").unlink()
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": {"b": shards[1], "a": shards[0], "c": shards[1]}}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (model_folder / shards[0]).write_bytes(b"1")
    with pytest.raises(UnknownModel, match=rf"incomplete.*{shards[1]}"):
        resolve(str(model_folder))
    (model_folder / shards[1]).write_bytes(b"2")
    assert [path.name for path in weight_files(resolve(str(model_folder)).path)] == shards
    (model_folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="damaged"):
        resolve(str(model_folder))


def test_adapter_folder_is_refused(model_folder):
    (model_folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"adapter.*merge"):
        resolve(str(model_folder))


def test_pickled_weights_are_refused_with_the_remedy(model_folder):
    (model_folder / "model.safetensors").rename(model_folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="save_pretrained"):
        resolve(str(model_folder))


def test_folder_without_config_is_refused(model_folder):
    (model_folder / "config.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        resolve(str(model_folder))


def test_folder_without_weights_is_refused_with_its_content(model_folder):
    (model_folder / "model.safetensors").unlink()
    with pytest.raises(UnknownModel, match=r"it holds config\.json, tokenizer\.json"):
        resolve(str(model_folder))
    (model_folder / "a.gguf").touch()
    with pytest.raises(UnknownModel, match=r"name one of them, such as .*a\.gguf"):
        resolve(str(model_folder))


@pytest.mark.parametrize(
    "name", ["./absent", "/no/such/folder", "no/such/folder", "absent.gguf", "", "~/absent"]
)
def test_unknown_model_is_refused_with_what_was_tried(name):
    with pytest.raises(UnknownModel, match=r"not built in.*smollm2") as caught:
        resolve(name)
    assert caught.value.param == "model"


def test_file_that_is_not_gguf_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UnknownModel, match=r"not a \.gguf"):
        resolve(str(tmp_path / "notes.txt"))


# ---- the hub, from its local cache only

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--org--tiny"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"weights")
    return snapshot


def test_hub_id_is_resolved_from_the_hub_cache(hub):
    assert resolve("org/tiny") == Source("org/tiny", "hub", hub, revision=COMMIT)
    assert resolve("org/tiny", revision=COMMIT).path == hub


def test_unknown_hub_id_or_revision_is_refused_with_what_was_tried(hub):
    with pytest.raises(UnknownModel, match=r"org/absent.*not built in.*HF_HUB_OFFLINE"):
        resolve("org/absent")
    with pytest.raises(UnknownModel, match="org/tiny"):
        resolve("org/tiny", revision="no-such-branch")


def test_hub_adapter_is_refused(hub):
    (hub / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="adapter"):
        resolve("org/tiny")


def test_weights_that_lie_on_this_machine_are_read_ahead(tmp_path, monkeypatch):
    advised = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *rest: advised.append(rest), raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", "will need", raising=False)
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path))
    folder = tmp_path / "models" / f"smollm2-{EMBEDDED_CONVERSION}"
    read_ahead("smollm2")  # not there yet
    read_ahead("organisation/model")
    read_ahead("")
    assert not advised
    folder.mkdir(parents=True)
    for name in ("a.safetensors", "b.safetensors", "config.json"):
        (folder / name).write_bytes(b"x")
    read_ahead("smollm2")
    read_ahead(str(folder))
    assert advised == [(0, 0, "will need")] * 4
