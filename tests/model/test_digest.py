"""Digests of a model's files: which files count, and when a cached digest is used."""

import hashlib
import json
import mmap
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from samewise.errors import GuaranteeLost
from samewise.model import digest
from samewise.model.digest import config_digests, model_files, refuse_changed, stamps_of, weights_digest
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


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_files_that_transformers_reads_from_the_folder_count(model_folder):
    before = list(config_digests(resolve(str(model_folder))))
    read = ["additional_chat_templates/tool_use.jinja", "source.spm", "tekken.json", "vocab.bpe"]
    write(model_folder, *read, "additional_chat_templates/notes.txt", "other/tool_use.jinja", "notes.json")
    assert set(config_digests(resolve(str(model_folder)))) - set(before) == set(read)


def test_code_counts_only_where_it_is_trusted_and_at_any_depth(model_folder):
    source = resolve(str(model_folder))
    before, files = config_digests(source), model_files(source)
    write(model_folder, "modeling.py", "layers/attention/kernel.py", "layers/readme.md")
    assert config_digests(source) == before
    assert model_files(source) == files
    trusted = config_digests(source, trusted=True)
    assert set(trusted) - set(before) == {"modeling.py", "layers/attention/kernel.py"}
    assert set(model_files(source, trusted=True)) - set(files) == {
        model_folder / "modeling.py",
        model_folder / "layers" / "attention" / "kernel.py",
    }


@pytest.fixture
def settled_at_once(monkeypatch):
    """Digests are cached of files that were just written, also where a test's files are kept in memory."""
    monkeypatch.setattr(digest, "SETTLED_NS", -(10**9))
    monkeypatch.setattr(digest, "in_memory", lambda path: False)


@pytest.mark.parametrize("number", [digest.TMPFS, digest.RAMFS])
def test_digest_of_a_file_kept_in_memory_is_not_cached(model_folder, cache, monkeypatch, number):
    """Written through a mapping it keeps its mtime and ctime."""
    monkeypatch.setattr(digest, "SETTLED_NS", -(10**9))
    monkeypatch.setattr(digest, "file_system", lambda path: number)
    weights_digest(resolve(str(model_folder)))
    assert not (cache / "facts").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="numbers of Linux")
def test_a_file_system_has_linuxs_number(tmp_path):
    assert digest.file_system(Path("/proc/self/stat")) == 0x9FA0
    assert digest.file_system(tmp_path / "absent") is None
    assert not digest.in_memory(Path("/proc/self/stat"))


def test_digest_of_a_file_just_written_is_not_cached(model_folder, cache):
    weights_digest(resolve(str(model_folder)))
    os.utime(model_folder / "model.safetensors", ns=(1, 1))  # an old mtime, but a new ctime
    weights_digest(resolve(str(model_folder)))
    assert not (cache / "facts").exists()  # it may change within one clock tick


def wait_for_the_next_tick(folder):
    """Wait until files that are written from now on have other times than those written before."""
    probe = folder / "tick"
    probe.touch()
    before = probe.stat().st_mtime_ns
    while probe.stat().st_mtime_ns == before:
        time.sleep(0.001)
        probe.touch()
    probe.unlink()


@pytest.mark.usefixtures("settled_at_once")
def test_cached_digest_is_used_until_the_file_changes(model_folder, cache):
    source = resolve(str(model_folder))
    first = weights_digest(source)
    (entry,) = (cache / "facts" / "digest").iterdir()
    entry.write_text(json.dumps({**json.loads(entry.read_text()), "value": "f" * 64}))
    assert weights_digest(source) != first  # the cached value was changed above
    wait_for_the_next_tick(cache)
    os.utime(model_folder / "model.safetensors", ns=(2, 2))
    assert weights_digest(source) == first


@pytest.mark.usefixtures("settled_at_once")
def test_weights_overwritten_in_place_with_their_mtime_restored_have_another_digest(model_folder, cache):
    source, file = resolve(str(model_folder)), model_folder / "model.safetensors"
    first = weights_digest(source)
    before = file.stat()
    wait_for_the_next_tick(cache)
    with file.open("r+b") as opened:
        opened.write(b"WEIGHTS")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_ino, after.st_mtime_ns) == (
        before.st_size,
        before.st_ino,
        before.st_mtime_ns,
    )
    assert weights_digest(source) != first


def test_a_file_that_changes_while_it_is_loaded_is_named(model_folder):
    source = resolve(str(model_folder))
    stamps = stamps_of(model_files(source))
    refuse_changed(stamps)
    os.utime(model_folder / "tokenizer.json")
    with pytest.raises(GuaranteeLost, match=r"tokenizer\.json was changed while it was loaded"):
        refuse_changed(stamps)
    stamps = stamps_of(model_files(source))
    (model_folder / "model.safetensors").unlink()
    with pytest.raises(GuaranteeLost, match=r"model\.safetensors was changed"):
        refuse_changed(stamps)


def test_weights_digest_is_a_sha256(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert len(weights_digest(resolve(str(tmp_path)))) == 64


SHARED = Path("/dev/shm")


@pytest.mark.skipif(not (SHARED.is_dir() and digest.in_memory(SHARED)), reason="/dev/shm is not in memory")
def test_a_file_in_memory_written_through_a_mapping_has_another_digest(monkeypatch):
    monkeypatch.setattr(digest, "SETTLED_NS", -(10**9))
    with tempfile.NamedTemporaryFile(dir=SHARED) as file:
        file.write(b"weights")
        file.flush()
        with mmap.mmap(file.fileno(), 7) as mapped:
            mapped[0] = ord("w")  # the page is there, so the next write changes no time
            path = Path(file.name)
            first, before = digest.file_digest(path), digest.FileStamp.of(path)
            mapped[0] = ord("W")
            assert digest.FileStamp.of(path) == before
            assert digest.file_digest(path) != first
