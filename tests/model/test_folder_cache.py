"""Folders in the cache: complete or absent, made once, and by one process at a time."""

import errno
import multiprocessing
import os
import signal
import threading
import time

import pytest
from model_files import leftovers

from samewise import user_cache
from samewise.errors import MachineError, UnsupportedModel
from samewise.model.folder_cache import make_once, require_space


@pytest.fixture
def target(cache):
    return cache / "models" / "thing-1"


def test_folder_appears_complete_and_is_made_once(target):
    calls = []

    def fill(folder):
        assert not target.exists()
        calls.append(folder)
        (folder / "file").write_text("x")

    for _ in range(3):
        make_once(target, fill)
    assert len(calls) == 1
    assert leftovers(target) == ["thing-1"]


@pytest.mark.parametrize("damage", ["cut", "gone", "list"])
def test_a_damaged_folder_is_made_again(target, damage, capsys):
    def fill(folder):
        (folder / "file").write_text("content")

    make_once(target, fill)
    file = target / ("digests.json" if damage == "list" else "file")
    file.unlink() if damage == "gone" else os.truncate(file, 3)
    make_once(target, fill)
    assert (target / "file").read_text() == "content"
    assert leftovers(target) == ["thing-1"]
    assert "damaged" in capsys.readouterr().err


def test_a_folder_of_an_earlier_version_without_digests_is_used(target):
    target.mkdir(parents=True)
    make_once(target, lambda _: pytest.fail("made again"))
    (target / "model.safetensors").write_bytes(b"cut")
    make_once(target, lambda folder: (folder / "file").write_text("new"))
    assert (target / "file").read_text() == "new"


@pytest.fixture
def planted(target):
    """A model in the shared cache, without digests, as another user would put it there."""
    target.mkdir(parents=True)
    (target / "file").write_text("planted")
    return target


def test_another_users_folder_is_made_again(planted, monkeypatch, capsys):
    """The planted folder counts as another user's, so that the test needs no second user."""
    inode = planted.stat().st_ino
    monkeypatch.setattr(user_cache, "_is_owned", lambda status: status.st_ino != inode)
    make_once(planted, lambda folder: (folder / "file").write_text("own"))
    assert (planted / "file").read_text() == "own"
    assert "another user's" in capsys.readouterr().err


def test_nothing_is_taken_from_another_users_folder_of_folders(planted, monkeypatch):
    inode = planted.parent.stat().st_ino
    monkeypatch.setattr(user_cache, "_is_owned", lambda status: status.st_ino != inode)
    with pytest.raises(MachineError, match=r"other users may write to .*SAMEWISE_CACHE"):
        make_once(planted, lambda folder: None)
    assert (planted / "file").read_text() == "planted"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives files to another user")
def test_a_model_that_another_user_planted_is_not_loaded(cache, planted):
    for place in (cache / "models", cache / "models-0", cache / "models-0" / "thing-1"):
        place.mkdir(exist_ok=True)
        os.chown(place, 12345, 12345)
    assert user_cache.folder("models") == cache / "models-0"
    with pytest.raises(MachineError, match="other users may write"):
        make_once(user_cache.folder("models") / "thing-1", lambda folder: None)


def test_failure_leaves_nothing_and_can_be_retried(target):
    def fail(folder):
        (folder / "half").write_text("x")
        raise UnsupportedModel("no")

    with pytest.raises(UnsupportedModel):
        make_once(target, fail)
    assert leftovers(target) == []
    make_once(target, lambda folder: None)
    assert target.is_dir()


def test_full_disk_error_names_the_bytes_the_folder_and_the_remedy(target):
    def fill(folder):
        (folder / "half").write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(MachineError, match=r"GB free at .*SAMEWISE_CACHE"):
        make_once(target, fill)
    assert leftovers(target) == []
    with pytest.raises(MachineError, match=r"1000000\.0 GB needed, .* GB free"):
        make_once(target, lambda folder: require_space(folder, 10**15, "convert it"))
    assert leftovers(target) == []


def test_unwritable_cache_error_names_the_variable(cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(MachineError, match="SAMEWISE_CACHE"):
        make_once(cache / "models" / "thing-1", lambda folder: None)


def test_concurrent_calls_make_the_folder_once(target):
    calls = []

    def fill(folder):
        calls.append(folder)
        time.sleep(0.2)

    threads = [threading.Thread(target=make_once, args=(target, fill)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def _make_slowly(target, started):
    def fill(folder):
        (folder / "half").write_text("x")
        started.set()
        time.sleep(60)

    make_once(target, fill)


def test_killed_process_holds_no_lock_and_its_files_are_removed(target):
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=_make_slowly, args=(target, started))
    process.start()
    assert started.wait(30)
    assert not target.exists()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    make_once(target, lambda folder: (folder / "file").touch())
    assert leftovers(target) == ["thing-1"]
    assert sorted(p.name for p in target.iterdir()) == ["digests.json", "file"]
