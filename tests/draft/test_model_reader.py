"""Reading for a draft model: what its next passes read, and which pages it holds."""

from array import array

from samewise.draft.model_reader import Reader
from samewise.kernels.attention.base import PAGE
from samewise.types import Ask, Sampling


def ask(seq_id, tokens, draft=(), room=4):
    return Ask(seq_id, list(tokens), 1, list(draft), len(tokens) - 1, array("i"), Sampling(), room)


def read(reader, plan):
    """Run a plan: note every pass as read; the (sequence, start, inputs) of all spans, in order."""
    spans = [span for spans in [*plan.early, plan.last] for span in spans]
    reader.note_read(spans)
    return [(span.seq_id, span.start, span.inputs) for span in spans]


def test_a_short_prompt_is_read_to_its_end_in_one_pass():
    reader = Reader(64, 512)
    plan = reader.plan([ask(0, [5, 6, 7])], 64, 64)
    assert (plan.early, [a.seq_id for a in plan.ended]) == ([], [0])
    assert read(reader, plan) == [(0, 0, (5, 6, 7))]


def test_what_was_committed_since_is_read_for_all_sequences_at_once():
    reader = Reader(64, 512)
    read(reader, reader.plan([ask(0, [5, 6]), ask(1, [8])], 64, 64))
    reader.note_drafted(ask(0, [5, 6]), [7, 9])
    # Of sequence 0 the draft's first token was accepted and its second one was not.
    plan = reader.plan([ask(0, [5, 6, 7, 4]), ask(1, [8, 3, 2])], 64, 64)
    assert read(reader, plan) == [(0, 3, (4,)), (1, 1, (3, 2))]


def test_the_last_token_is_always_read_again():
    reader = Reader(64, 512)
    read(reader, reader.plan([ask(0, [5, 6])], 64, 64))
    assert read(reader, reader.plan([ask(0, [5, 6])], 64, 64)) == [(0, 1, (6,))]


def test_a_draft_counts_as_text():
    reader = Reader(64, 512)
    assert read(reader, reader.plan([ask(0, [5, 6], draft=[7])], 64, 64)) == [(0, 0, (5, 6, 7))]
    assert read(reader, reader.plan([ask(0, [5, 6], draft=[8, 9])], 64, 64)) == [(0, 2, (8, 9))]


def test_long_prompts_are_read_in_pieces_and_short_ones_first():
    reader = Reader(64, 512)
    asks = [ask(0, range(100)), ask(1, [7, 8])]
    plan = reader.plan(asks, 34, 16)
    assert [a.seq_id for a in plan.ended] == [1]
    assert read(reader, plan) == [(0, 0, tuple(range(16))), (0, 16, tuple(range(16, 32))), (1, 0, (7, 8))]
    plan = reader.plan(asks[:1], 100, 16)
    spans = read(reader, plan)
    assert [a.seq_id for a in plan.ended] == [0]
    assert [start for _, start, _ in spans] == [32, 48, 64, 80, 84]  # the last pass has all the rows it may


def test_the_last_pass_has_a_row_of_every_sequence_it_ends():
    reader = Reader(64, 512)
    plan = reader.plan([ask(0, range(20)), ask(1, range(30))], 64, 16)
    assert [(span.seq_id, len(span.inputs)) for span in plan.last] == [(0, 8), (1, 8)]
    assert sum(len(span.inputs) for spans in plan.early for span in spans) == 12 + 22
    assert all(sum(len(span.inputs) for span in spans) <= 16 for spans in plan.early)


def test_prompts_are_read_ahead_up_to_their_last_token():
    reader = Reader(64, 512)
    passes = reader.plan_prompts([ask(0, range(10)), ask(1, range(40)), ask(2, [1])], 20, 16)
    spans = [span for spans in passes for span in spans]
    assert [(s.seq_id, s.start, len(s.inputs)) for s in spans] == [(0, 0, 9), (1, 0, 7), (1, 7, 4)]


def test_a_sequence_without_pages_is_left_out():
    reader = Reader(3, 512)
    plan = reader.plan([ask(0, range(PAGE + 1)), ask(1, range(PAGE + 2))], 64, 64)
    assert [a.seq_id for a in plan.ended] == [0]
    reader.forget(0)
    reader.forget(0)
    plan = reader.plan([ask(1, range(PAGE + 2))], 64, 64)
    assert [a.seq_id for a in plan.ended] == [1]


def test_a_draft_ends_where_pages_or_the_context_end():
    reader = Reader(2, 512)
    reader.plan([ask(0, range(10))], 64, 64)
    assert reader.pages_for_draft(ask(0, range(10)), 4)[1] == 4
    # Tokens 0 to 15 have a page: passes may read up to token 15.
    assert reader.pages_for_draft(ask(0, range(10)), 16)[1] == 7
    reader = Reader(64, 12)
    reader.plan([ask(0, range(10))], 64, 64)
    assert reader.pages_for_draft(ask(0, range(10)), 16)[1] == 3
    assert not reader.plan([ask(1, range(13))], 64, 64).ended


def test_after_recovery_all_pages_are_free():
    reader = Reader(3, 512)
    reader.plan([ask(0, range(2 * PAGE))], 64, 64)
    reader.recover()
    assert reader.plan([ask(1, range(2 * PAGE))], 64, 64).ended
