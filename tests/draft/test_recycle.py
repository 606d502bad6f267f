"""Recycled candidates: the last row of each token, in memory that does not grow."""

import numpy as np

from samewise.draft.recycle import WIDTH, RecycleTable, RecycleTables, max_tables


def rows(*firsts):
    """Eight candidates each, the first given."""
    return np.array([[first + i for i in range(WIDTH)] for first in firsts], np.int32)


def test_a_token_has_the_candidates_of_the_last_row_that_followed_it():
    table = RecycleTable(100)
    assert table.candidates(7) == []
    table.remember([7, 9], rows(10, 20))
    table.remember([7], rows(30))
    assert table.candidates(7) == rows(30)[0].tolist()
    assert table.candidates(9) == rows(20)[0].tolist()


def test_of_equal_tokens_in_one_call_the_last_row_stays():
    table = RecycleTable(100)
    table.remember([3, 4, 3], rows(10, 20, 30))
    assert table.candidates(3) == rows(30)[0].tolist()


def test_memory_is_fixed_when_the_table_is_made():
    table = RecycleTable(1000)
    before = table.nbytes
    assert before == 1000 * 32
    for start in range(0, 1000, 100):
        tokens = list(range(start, start + 100))
        table.remember(tokens, rows(*tokens))
    assert table.nbytes == before
    assert all(table.candidates(token) for token in range(1000))


def test_tokens_outside_of_the_vocabulary_are_left_out():
    table = RecycleTable(10)
    table.remember([], rows())
    table.remember([-1, 10, 4], rows(1, 2, 3))
    assert [token for token in range(10) if table.candidates(token)] == [4]
    assert table.candidates(10) == table.candidates(-1) == []


def test_the_latest_salts_have_a_table():
    tables = RecycleTables(10, 2)
    for salt in (b"a", b"b", b"a", b"c"):
        tables.open(salt)
        tables.get(salt).remember([1], rows(1))
    assert tables.get(b"b") is tables.get(None) is None
    assert tables.get(b"a").candidates(1) == tables.get(b"c").candidates(1) == rows(1)[0].tolist()
    assert tables.nbytes == 2 * 10 * 32
    tables.clear()
    assert tables.get(b"a") is None


def test_a_table_in_use_is_kept_and_a_dropped_one_takes_the_place_of_an_idle_one():
    tables = RecycleTables(10, 2)
    used = {salt: tables.open(salt) for salt in (b"a", b"b", b"c")}
    for _ in range(3):
        used |= {salt: tables.use(salt, used[salt]) for salt in (b"a", b"b", b"c")}
        assert tables.get(b"a") is None
    used[b"a"] = tables.use(b"a", used[b"a"])  # b and c were used since its last rows
    used[b"c"] = tables.use(b"c", used[b"c"])
    tables.use(b"a", used[b"a"])  # b was not
    assert tables.get(b"a") is not None
    assert tables.get(b"b") is None


def test_the_number_of_tables_follows_from_their_bytes():
    assert max_tables(152_000, 128 * 2**20) == 27
    assert max_tables(1000, 31_999) == max_tables(1000, 32_000) == 1
    assert max_tables(1000, 64_000) == 2
