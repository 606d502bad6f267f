"""judge and trust against a reference that walks a span row by row."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from samewise.types import ROOT, Proposal, Sampling, Span, Truth, Verdict
from samewise.verify.judge import judge, trust

TOKENS = st.integers(0, 3)  # few ids, so that drafts are often right


def make_span(start: int, inputs: tuple[int, ...], given: int) -> Span:
    return Span(7, start, inputs, given, array("i"), Sampling(), list(inputs), len(inputs))


def make_truth(tokens: tuple[int, ...], *, tops: bool = False) -> Truth:
    logprobs = tuple(-0.5 - i for i in range(len(tokens)))
    alternatives = tuple(((token, lp),) for token, lp in zip(tokens, logprobs, strict=True)) if tops else ()
    return Truth(tokens, logprobs, alternatives, scores=(-9.0,), score_tops=((),))


def judge_by_rows(span: Span, truth: Truth) -> Verdict:
    """Walk the rows: a given row commits KV; rows after a wrong drafted token are rejected."""
    tokens: list[int] = []
    kv_len, accepted, matching = span.start, 0, True
    token_after = dict(enumerate(truth.tokens, span.given - 1))  # by row
    for row, token in enumerate(span.inputs):
        if row >= span.given:
            matching = matching and token == token_after[row - 1]
            accepted += matching
        if matching:
            kv_len += 1
            if row in token_after:
                tokens.append(token_after[row])
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
def verified_spans(draw: st.DrawFn) -> tuple[Span, Truth]:
    rows, start = draw(st.integers(1, 9)), draw(st.integers(0, 40))
    given = draw(st.integers(1, rows + 4))
    inputs = tuple(draw(st.lists(TOKENS, min_size=rows, max_size=rows)))
    num = max(0, rows - given + 1)
    truth = make_truth(tuple(draw(st.lists(TOKENS, min_size=num, max_size=num))), tops=draw(st.booleans()))
    return make_span(start, inputs, given), truth


@settings(deadline=None)
@given(verified_spans())
def test_judge_agrees_with_the_reference(verified: tuple[Span, Truth]) -> None:
    assert judge(*verified) == judge_by_rows(*verified)


@st.composite
def verified_trees(draw: st.DrawFn) -> tuple[Span, Truth]:
    """Siblings may be equal; a parent stands before its children."""
    num = draw(st.integers(1, 12))
    tokens = tuple(draw(st.lists(TOKENS, min_size=num + 1, max_size=num + 1)))
    parents = tuple(draw(st.integers(ROOT, node - 1)) for node in range(num))
    truth = make_truth(tuple(draw(st.lists(TOKENS, min_size=num + 1, max_size=num + 1))))
    return make_span(5, tokens, 1)._replace(parents=parents), truth


@settings(deadline=None)
@given(verified_trees())
def test_a_tree_is_walked_from_the_root_to_the_first_child_that_is_right(
    verified: tuple[Span, Truth],
) -> None:
    span, truth = verified
    path: list[int] = []
    tokens = [truth.tokens[0]]
    for node, (guess, parent) in enumerate(zip(span.inputs[1:], span.parents, strict=True)):
        if parent == (path[-1] if path else ROOT) and guess == tokens[-1]:
            path.append(node)
            tokens.append(truth.tokens[node + 1])
    verdict = judge(span, truth)
    assert (verdict.path, verdict.tokens) == (tuple(path), tuple(tokens))


@settings(deadline=None)
@given(verified_spans())
def test_a_span_past_the_prompt_always_commits_a_token(verified: tuple[Span, Truth]) -> None:
    span, truth = verified
    verdict = judge(span, truth)
    assert bool(verdict.tokens) == (len(span.inputs) >= span.given)
    assert len(verdict.tokens) == len(verdict.logprobs)
    assert verdict.kv_len <= span.start + len(span.inputs)
    # Afterwards the known tokens exceed the KV by one: the token whose logits come next.
    if verdict.tokens:
        assert verdict.kv_len == span.start + span.given + len(verdict.tokens) - 1


def test_a_prompt_chunk_commits_kv_and_no_token() -> None:
    verdict = judge(make_span(16, (1, 2, 3), 9), make_truth(()))
    assert (verdict.tokens, verdict.kv_len, verdict.guessed, verdict.accepted) == ((), 19, 0, 0)
    assert verdict.scores == (-9.0,)


def test_a_span_of_one_row_commits_one_token() -> None:
    verdict = judge(make_span(30, (5,), 1), make_truth((8,)))
    assert (verdict.tokens, verdict.kv_len) == ((8,), 31)


def test_the_last_chunk_of_a_prompt_commits_the_first_token() -> None:
    verdict = judge(make_span(16, (1, 2, 3), 3), make_truth((8,)))
    assert (verdict.tokens, verdict.kv_len) == ((8,), 19)


def test_full_acceptance_commits_a_bonus_token() -> None:
    verdict = judge(make_span(10, (5, 6, 7), 1), make_truth((6, 7, 8)))
    assert (verdict.tokens, verdict.kv_len) == ((6, 7, 8), 13)
    assert (verdict.guessed, verdict.accepted) == (2, 2)


def test_a_wrong_first_guess_is_replaced_by_the_target_models_token() -> None:
    verdict = judge(make_span(10, (5, 6, 7), 1), make_truth((9, 7, 8)))
    assert (verdict.tokens, verdict.kv_len, verdict.accepted) == ((9,), 11, 0)


def test_a_wrong_middle_guess_keeps_the_guesses_before_it() -> None:
    verdict = judge(make_span(10, (5, 6, 7, 8), 1), make_truth((6, 9, 8, 1)))
    assert (verdict.tokens, verdict.kv_len, verdict.accepted) == ((6, 9), 12, 1)


def test_a_wrong_last_guess_is_replaced_by_the_target_models_token() -> None:
    verdict = judge(make_span(10, (5, 6, 7), 1), make_truth((6, 9, 8)))
    assert (verdict.tokens, verdict.kv_len, verdict.accepted) == ((6, 9), 12, 1)


def test_a_right_guess_after_a_wrong_one_is_rejected() -> None:
    assert judge(make_span(0, (5, 6, 7), 1), make_truth((9, 7, 7))).tokens == (9,)


def test_trust_commits_every_token_as_unverified() -> None:
    verdict = trust(Proposal(3, (4, 5), (-1.0, -2.0), (((4, -1.0),), ())), kv_len=20)
    assert verdict == Verdict(3, (4, 5), (-1.0, -2.0), (((4, -1.0),), ()), 22, 0, 0, verified=False)
