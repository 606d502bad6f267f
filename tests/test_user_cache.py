"""The user's cache folder: which one it is, and entries that are missing, damaged or unwritable."""

import stat

import pytest

from samewise import user_cache


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_dir_is_the_variable_else_xdg_else_home(monkeypatch, tmp_path):
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert user_cache.cache_dir() == tmp_path / "a"
    monkeypatch.delenv("SAMEWISE_CACHE")
    assert user_cache.cache_dir() == tmp_path / "b" / "samewise"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache.cache_dir() == tmp_path / "c" / ".cache" / "samewise"


def test_a_value_is_found_under_the_same_kind_and_key_only():
    user_cache.put("kind", {"a": 1, "b": "x"}, {"sizes": [1, 2]})
    assert user_cache.get("kind", {"b": "x", "a": 1}) == {"sizes": [1, 2]}
    assert user_cache.get("kind", {"a": 2, "b": "x"}) is None
    assert user_cache.get("other", {"a": 1, "b": "x"}) is None


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[]", b'{"key": {"a": 2}, "value": 3}'])
def test_a_damaged_entry_counts_as_absent_and_is_replaced(cache, damage):
    user_cache.put("kind", {"a": 1}, "first")
    (entry,) = (cache / "facts" / "kind").iterdir()
    entry.write_bytes(damage)
    assert user_cache.get("kind", {"a": 1}) is None
    user_cache.put("kind", {"a": 1}, "second")
    assert user_cache.get("kind", {"a": 1}) == "second"


def test_an_unwritable_cache_is_not_an_error(cache, caplog):
    cache.write_text("a file where the folder should be")
    user_cache.put("kind", {"a": 1}, "value")
    assert user_cache.get("kind", {"a": 1}) is None
    assert "cannot write" in caplog.text


def test_a_failed_write_leaves_the_old_content_and_no_temporary_file(tmp_path):
    path = tmp_path / "file"
    user_cache.write_atomically(path, b"old")
    with pytest.raises(TypeError):
        user_cache.write_atomically(path, "not bytes")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# ---- a folder that is shared with other users


def test_folders_are_made_private_and_own_ones_are_closed_to_others(cache):
    user_cache.put("kind", {"a": 1}, "value")
    for folder in (cache, cache / "facts", cache / "facts" / "kind"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (cache / "facts").chmod(0o777)
    assert user_cache.get("kind", {"a": 1}) == "value"
    assert stat.S_IMODE((cache / "facts").stat().st_mode) == 0o700


def test_a_folder_that_is_only_readable_for_others_stays_as_it_is(cache):
    (cache / "facts").mkdir(parents=True)
    (cache / "facts").chmod(0o755)
    user_cache.put("kind", {"a": 1}, "value")
    assert stat.S_IMODE((cache / "facts").stat().st_mode) == 0o755


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_an_entry_that_others_may_write_counts_as_absent(cache, mode):
    user_cache.put("kind", {"a": 1}, "value")
    (entry,) = (cache / "facts" / "kind").iterdir()
    entry.chmod(mode)
    assert user_cache.get("kind", {"a": 1}) is None
    user_cache.put("kind", {"a": 1}, "value")
    assert user_cache.get("kind", {"a": 1}) == "value"


def test_an_entry_behind_a_symbolic_link_counts_as_absent(cache, tmp_path):
    user_cache.put("kind", {"a": 1}, "value")
    (entry,) = (cache / "facts" / "kind").iterdir()
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert user_cache.get("kind", {"a": 1}) is None


def test_another_users_folder_is_not_used(cache, monkeypatch):
    """This process's user counts as another one, so that the test needs no second user."""
    (cache / "facts").mkdir(parents=True)
    monkeypatch.setattr(user_cache, "_is_owned", lambda _: False)
    assert user_cache.folder("facts") == cache / f"facts-{user_cache._user()}"
    assert user_cache.folder("models") == cache / "models"  # not there yet
    with pytest.raises(PermissionError, match="other users may write"):
        user_cache.make_private(cache / "facts")


def test_a_folder_behind_this_users_own_link_is_used(cache, tmp_path):
    (tmp_path / "large disk").mkdir()
    cache.mkdir()
    (cache / "models").symlink_to(tmp_path / "large disk")
    assert user_cache.folder("models") == cache / "models"
