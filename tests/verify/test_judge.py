"""judge and trust against the sentence they are written from, one row at a time."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from samewise.types import Proposal, Sampling, Span, Truth, Verdict
from samewise.verify.judge import judge, trust

TOKENS = st.integers(0, 3)  # few, so that guesses are often right


def a_span(start: int, inputs: tuple[int, ...], given: int) -> Span:
    return Span(7, start, inputs, given, array("i"), Sampling(), list(inputs), len(inputs))


def a_truth(tokens: tuple[int, ...], *, tops: bool = False) -> Truth:
    logprobs = tuple(-0.5 - i for i in range(len(tokens)))
    alternatives = tuple(((token, lp),) for token, lp in zip(tokens, logprobs, strict=True)) if tops else ()
    return Truth(tokens, logprobs, alternatives, scores=(-9.0,), score_tops=((),))


def naive(span: Span, truth: Truth) -> Verdict:
    """Walk the rows: a given row commits KV; a row after a wrong guess is worth nothing."""
    tokens: list[int] = []
    kv_len, accepted, good = span.start, 0, True
    answers = dict(enumerate(truth.tokens, span.given - 1))
    for row, token in enumerate(span.inputs):
        if row >= span.given:
            good = good and token == answers[row - 1]
            accepted += good
        if good:
            kv_len += 1
            if row in answers:
                tokens.append(answers[row])
    num = len(tokens)
    return Verdict(
        span.seq_id,
        tuple(tokens),
        truth.logprobs[:num],
        truth.tops[:num],
        kv_len,
        max(0, len(span.inputs) - span.given),
        accepted,
        True,
        truth.scores,
        truth.score_tops,
    )


@st.composite
def replays(draw: st.DrawFn) -> tuple[Span, Truth]:
    rows, start = draw(st.integers(1, 9)), draw(st.integers(0, 40))
    given = draw(st.integers(1, rows + 4))
    inputs = tuple(draw(st.lists(TOKENS, min_size=rows, max_size=rows)))
    num = max(0, rows - given + 1)
    truth = a_truth(tuple(draw(st.lists(TOKENS, min_size=num, max_size=num))), tops=draw(st.booleans()))
    return a_span(start, inputs, given), truth


@settings(deadline=None)
@given(replays())
def test_agrees_with_the_naive_walk(replay: tuple[Span, Truth]) -> None:
    assert judge(*replay) == naive(*replay)


@settings(deadline=None)
@given(replays())
def test_a_replay_past_the_prompt_always_commits_a_token(replay: tuple[Span, Truth]) -> None:
    span, truth = replay
    verdict = judge(span, truth)
    assert bool(verdict.tokens) == (len(span.inputs) >= span.given)
    assert len(verdict.tokens) == len(verdict.logprobs)
    assert verdict.kv_len <= span.start + len(span.inputs)
    # What is known afterwards always exceeds its KV by the one token whose logits come next.
    if verdict.tokens:
        assert verdict.kv_len == span.start + span.given + len(verdict.tokens) - 1


def test_a_prompt_chunk_commits_kv_alone() -> None:
    verdict = judge(a_span(16, (1, 2, 3), 9), a_truth(()))
    assert (verdict.tokens, verdict.kv_len, verdict.guessed, verdict.accepted) == ((), 19, 0, 0)
    assert verdict.scores == (-9.0,)


def test_plain_decoding_is_one_row() -> None:
    verdict = judge(a_span(30, (5,), 1), a_truth((8,)))
    assert (verdict.tokens, verdict.kv_len) == ((8,), 31)


def test_the_last_chunk_of_a_prompt_gives_the_first_token() -> None:
    verdict = judge(a_span(16, (1, 2, 3), 3), a_truth((8,)))
    assert (verdict.tokens, verdict.kv_len) == ((8,), 19)


def test_full_acceptance_brings_a_bonus_token() -> None:
    verdict = judge(a_span(10, (5, 6, 7), 1), a_truth((6, 7, 8)))
    assert (verdict.tokens, verdict.kv_len) == ((6, 7, 8), 13)
    assert (verdict.guessed, verdict.accepted) == (2, 2)


def test_a_wrong_first_guess_costs_nothing_but_itself() -> None:
    verdict = judge(a_span(10, (5, 6, 7), 1), a_truth((9, 7, 8)))
    assert (verdict.tokens, verdict.kv_len, verdict.accepted) == ((9,), 11, 0)


def test_a_wrong_middle_guess_keeps_what_came_before() -> None:
    verdict = judge(a_span(10, (5, 6, 7, 8), 1), a_truth((6, 9, 8, 1)))
    assert (verdict.tokens, verdict.kv_len, verdict.accepted) == ((6, 9), 12, 1)


def test_a_wrong_last_guess_is_replaced() -> None:
    verdict = judge(a_span(10, (5, 6, 7), 1), a_truth((6, 9, 8)))
    assert (verdict.tokens, verdict.kv_len, verdict.accepted) == ((6, 9), 12, 1)


def test_a_right_guess_after_a_wrong_one_does_not_count() -> None:
    assert judge(a_span(0, (5, 6, 7), 1), a_truth((9, 7, 7))).tokens == (9,)


def test_trust_takes_everything_and_says_so() -> None:
    verdict = trust(Proposal(3, (4, 5), (-1.0, -2.0), (((4, -1.0),), ())), kv_len=20)
    assert verdict == Verdict(3, (4, 5), (-1.0, -2.0), (((4, -1.0),), ()), 22, 0, 0, verified=False)
