"""Laws 1 to 4 with follow-ups: frames that are started by one call change no bit, whatever they hold."""

import random
from dataclasses import replace

import pytest
from law_helpers import CASES, PAGE, Case, other_requests, random_prompt, run_cases, run_references, sampled
from law_proposers import PROPOSERS
from law_trees import SHAPES, followed_trees, random_shape, siblings_everywhere, wrong_chain_first

from samewise.draft.build import make_auto
from samewise.draft.cost_model import FrameCosts
from samewise.errors import InvariantBroken
from samewise.follow_up import SPAN_LEN
from samewise.testing import preempting
from samewise.types import Sampling

LONG = [replace(case, max_tokens=40) for case in CASES if case.prompt_logprobs is None]
TREES = ("ngram", "recycle", "trees")


def num_followed(engine):
    return engine.scheduler.counters.follow_ups


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num", [1, 4])
def test_output_is_the_same_whichever_path_a_follow_up_accepts(setup, shape, num):
    cases = LONG[:: 12 // num][:num]
    expected = run_references(setup, cases)
    engine = setup.engine(followed_trees(cases, expected, num=3, shape=shape), ahead=True)
    assert run_cases(engine, cases) == expected
    assert num_followed(engine) > 3


@pytest.mark.parametrize("proposer", TREES)
@pytest.mark.parametrize("num", [1, 3, 12])
def test_output_is_the_same_at_every_load(setup, proposer, num):
    """Greedy, sampled, filtered and penalised requests; the C++ drafter follows up where it can."""
    cases = LONG[:num]
    engine = setup.engine(PROPOSERS[proposer], ahead=True)
    assert run_cases(engine, cases) == run_references(setup, cases)
    assert num_followed(engine) > 3


def test_auto_follows_up_where_no_drafter_works(basic):
    cases = LONG[:4]

    def make(parts):
        """Neither rows nor asking cost anything."""
        frames = FrameCosts(parts.runner.sizes)
        frames.observe(1, 1.0)
        return make_auto(replace(parts, frame_costs=frames, clock=lambda: 0.0), [])

    engine = basic.engine(make, ahead=True)
    assert run_cases(engine, cases) == run_references(basic, cases)
    assert num_followed(engine) > 3


@pytest.mark.parametrize("length", range(PAGE - 6, PAGE + 3, 2))
def test_a_follow_up_across_a_page_border_changes_nothing(basic, length):
    case = Case("border", random_prompt(length, 9), sampled(4), max_tokens=2 * PAGE)
    expected = run_references(basic, [case])
    engine = basic.engine(followed_trees([case], expected, num=7, shape=wrong_chain_first), ahead=True)
    assert run_cases(engine, [case]) == expected
    assert engine.scheduler.counters.accepted > 2 * 7
    assert num_followed(engine) > 2


@pytest.mark.parametrize("shape", [siblings_everywhere, random_shape])
def test_a_stop_in_a_frame_that_was_to_be_followed_ends_the_text_there(basic, shape):
    cases = [Case(f"whole-{i}", random_prompt(11, i), max_tokens=30) for i in range(3)]
    whole = run_references(basic, cases)
    stop = next(t for i, t in enumerate(whole[0].tokens) if i > 5 and t not in whole[0].tokens[:i])
    stopped = [replace(case, sampling=Sampling(stop_ids=frozenset({stop, 3}))) for case in cases]
    expected = run_references(basic, stopped)
    assert len(expected[0].tokens) < 30
    for make in (followed_trees(cases, whole, num=4, shape=shape), PROPOSERS["trees"]):
        engine = basic.engine(make, ahead=True)
        assert run_cases(engine, stopped) == expected


@pytest.mark.parametrize("proposer", TREES)
def test_follow_ups_at_the_context_limit_change_nothing(basic, proposer):
    cases = [Case(f"limit-{i}", random_prompt(9 + i, 3), sampled(7), max_tokens=500) for i in range(2)]
    limits = {"max_model_len": 3 * PAGE}
    expected = run_cases(basic.engine(**limits), cases)
    engine = basic.engine(PROPOSERS[proposer], ahead=True, **limits)
    assert run_cases(engine, cases) == expected
    assert num_followed(engine) > 3


@pytest.mark.parametrize("num_pages", [6, 9, 12, 20])
@pytest.mark.parametrize("proposer", TREES)
def test_follow_ups_where_pages_run_out_change_nothing(basic, num_pages, proposer):
    cases = [Case(f"tight-{i}", random_prompt(9, i), sampled(i), max_tokens=50) for i in range(3)]
    engine = basic.engine(PROPOSERS[proposer], num_pages=num_pages, ahead=True)
    assert run_cases(engine, cases) == run_references(basic, cases)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("proposer", ["trees", "recycle"])
def test_arrivals_preemption_and_aborts_between_follow_ups_change_nothing(basic, seed, proposer):
    cases = LONG[:6]
    engine = basic.engine(PROPOSERS[proposer], num_pages=60, ahead=True)
    others = [case.add(engine) for case in other_requests(2)]
    rng = random.Random(seed)

    def abort_one(engine, step_index):
        if step_index % 7 == seed and others:
            engine.abort(others.pop())

    arrivals = [rng.randrange(40) for _ in cases]
    output = run_cases(
        engine, cases, step=lambda e: preempting(e, seed, rate=0.02), after=abort_one, arrivals=arrivals
    )
    assert output == run_references(basic, cases)
    assert num_followed(engine) > 3


@pytest.mark.parametrize("proposer", TREES)
def test_prompts_are_read_in_follow_ups(setup, proposer):
    """Each arrives while others generate, is read in pieces and joins them."""
    cases = [Case("first", random_prompt(5), max_tokens=60)]
    cases += [Case(f"p{i}", random_prompt(30 * i, i), sampled(i), max_tokens=25) for i in (1, 2, 3)]
    engine = setup.engine(PROPOSERS[proposer], ahead=True, max_num_seqs=4)
    output = run_cases(engine, cases, arrivals=[0, 3, 9, 11])
    assert output == run_references(setup, cases)
    counters = engine.scheduler.counters
    assert counters.frames - counters.follow_ups < 4


@pytest.mark.parametrize("proposer", TREES)
def test_prompts_are_read_by_priority_in_follow_ups(basic, proposer):
    """While one generates two prompts are read in pieces, the later one first."""
    cases = [Case("first", random_prompt(5), max_tokens=60)]
    cases += [Case(f"p{i}", random_prompt(90, i), sampled(i), 20, priority=-i) for i in (1, 2)]
    engine = basic.engine(PROPOSERS[proposer], ahead=True, max_num_seqs=4)
    begun = []

    def watch(engine, _):
        for seq in engine.scheduler._running.values():
            if seq.request.priority and len(seq.tokens) > seq.prompt_len and seq.request.id not in begun:
                begun.append(seq.request.id)

    output = run_cases(engine, cases, arrivals=[0, 3, 3], after=watch)
    assert output == run_references(basic, [replace(case, priority=0) for case in cases])
    assert begun == [2, 1]
    assert num_followed(engine) > 3


@pytest.mark.parametrize("proposer", TREES)
def test_owners_that_share_the_engine_change_nothing(basic, proposer):
    """A crowd of one owner stands back for the first token of another, and follow-ups go on after it."""
    crowd = [replace(case, owner=b"crowd") for case in LONG[:6]]
    cases = [*crowd, Case("one", random_prompt(70, 5), max_tokens=20, owner=b"one")]
    engine = basic.engine(PROPOSERS[proposer], ahead=True, max_num_seqs=8)
    output = run_cases(engine, cases, arrivals=[0] * len(crowd) + [9])
    assert output == run_references(basic, cases)
    assert num_followed(engine) > 3


def test_unverified_requests_and_requests_without_drafts_keep_the_loop(basic):
    cases = [*LONG[:2], *other_requests(1, verify=False)]
    engine = basic.engine(PROPOSERS["trees"], ahead=True)
    assert run_cases(engine, cases)[:2] == run_references(basic, cases[:2])


@pytest.mark.parametrize("wrong", ["token", "page"])
def test_a_frame_that_does_not_follow_from_the_verdicts_is_an_error(basic, wrong):
    """Another token than the committed one, or another page, is in it: nothing of it becomes public."""
    case = LONG[0]
    expected = run_references(basic, [case])
    engine = basic.engine(PROPOSERS["trees"], ahead=True)
    start, starts = engine.verifier.start, []

    def wrong_start(follow_up):
        starts.append(1)
        if len(starts) == 3:
            if wrong == "token":
                follow_up.numbers[SPAN_LEN * follow_up.num_spans] ^= 1
            else:
                follow_up.pages[0] += 1
        return start(follow_up)

    engine.verifier.start = wrong_start
    tokens = []

    def run():
        while not engine.idle:
            tokens.extend(token for delta in engine.step() for token in delta.tokens)

    case.add(engine)
    with pytest.raises(InvariantBroken, match="not the one that follows"):
        run()
    assert tokens == expected[0].tokens[: len(tokens)]
    assert engine.lost is not None
