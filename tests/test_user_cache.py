"""The user's cache folder: which one it is, and entries that are missing, damaged or unwritable."""

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
