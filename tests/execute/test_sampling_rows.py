"""Sampling rows of spans and of asks: positions, the tokens penalties count, and grammar masks."""

from array import array

from samewise.execute.sampling_rows import SamplingRow, rows_of_asks, rows_of_spans
from samewise.types import Ask, Sampling, Span

GREEDY = Sampling()
SAMPLED = Sampling(temperature=1.0)
PENALISED = Sampling(presence_penalty=1.0)


class FakeGuide:
    """A grammar guide whose mask names the tokens it was asked about."""

    def masks(self, guesses):
        return [self.mask(guesses[:num]) for num in range(len(guesses) + 1)]

    def mask(self, guesses):
        return bytes(guesses)


def make_span(sampling, *, start=3, inputs=(13, 14, 15), given=1, guide=None):
    tokens = [10, 11, 12, 13]
    return Span(7, start, inputs, given, array("i"), sampling, tokens, 2, guide=guide)


def make_ask(sampling, *, draft=(), guide=None):
    return Ask(7, [10, 11, 12, 13], 2, list(draft), 3, array("i"), sampling, 4, guide=guide)


def test_greedy_spans_and_asks_need_no_rows():
    assert rows_of_spans([make_span(GREEDY)], range(3)) == []
    assert rows_of_asks([make_ask(GREEDY)]) == []


def test_a_span_has_a_row_from_its_last_given_token_on():
    spans = [make_span(GREEDY), make_span(SAMPLED, inputs=(12, 13, 14), start=2, given=2)]
    assert rows_of_spans(spans, range(6)) == [
        SamplingRow(4, SAMPLED, [], [], 4),
        SamplingRow(5, SAMPLED, [], [], 5),
    ]


def test_a_prompt_chunk_needs_no_rows():
    assert rows_of_spans([make_span(PENALISED, given=9, guide=FakeGuide())], range(3)) == []


def test_a_spans_rows_count_committed_tokens_then_the_drafted_ones_before_them():
    rows = rows_of_spans([make_span(PENALISED, guide=FakeGuide())], range(3))
    assert [row.prompt for row in rows] == [[10, 11]] * 3
    assert [row.output for row in rows] == [[12, 13], [12, 13, 14], [12, 13, 14, 15]]
    assert [row.mask for row in rows] == [b"", bytes([14]), bytes([14, 15])]


def test_rows_point_at_the_logits_that_were_kept():
    rows = rows_of_spans([make_span(SAMPLED)], {0: 2, 1: 0, 2: 1})
    assert [row.row for row in rows] == [2, 0, 1]


def test_an_asks_row_counts_the_draft_and_stands_after_it():
    asks = [make_ask(GREEDY), make_ask(PENALISED, draft=(14,), guide=FakeGuide()), make_ask(SAMPLED)]
    assert rows_of_asks(asks) == [
        SamplingRow(1, PENALISED, [10, 11], [12, 13, 14], 5, bytes([14])),
        SamplingRow(2, SAMPLED, [], [], 4),
    ]
    assert [row.position for row in rows_of_asks(asks, ahead=3)] == [8, 7]
