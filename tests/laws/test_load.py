"""Law 2, load independence: company, order, arrival, limits, preemption and aborts change nothing."""

import random
from dataclasses import replace

import pytest
from lawbook import CASES, Case, company, jitter, play, reference, text, warm

from samewise.draft.build import MAKERS
from samewise.engine import Engine
from samewise.errors import CallerError
from samewise.testing import preempting, shuffled
from samewise.types import Sampling


def in_order(cases, heard):
    """What was heard, in the order of CASES."""
    by_name = {case.name: one for case, one in zip(cases, heard, strict=True)}
    return [by_name[case.name] for case in CASES]


# ---- company, order, arrival


def test_alone_is_together(trial):
    assert play(trial.engine(), CASES) == trial.truth


def test_reversed(trial):
    cases = CASES[::-1]
    assert in_order(cases, play(trial.engine(), cases)) == trial.truth


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order(plain, plain_truth, seed):
    cases = shuffled(CASES, seed)
    assert in_order(cases, play(plain.engine(jitter), cases)) == plain_truth


def test_staggered_arrivals(trial):
    rng = random.Random(trial.proposer)
    arrivals = [rng.randrange(25) for _ in CASES]
    assert play(trial.engine(), CASES, arrivals=arrivals) == trial.truth


@pytest.mark.parametrize("most", [1, 2, 5])
def test_any_number_of_seats(plain, plain_truth, most):
    engine = plain.engine(jitter, max_num_seqs=most)
    assert play(engine, CASES, after=lambda e, _: _at_most(e, most)) == plain_truth


def _at_most(engine, most):
    assert engine.scheduler.num_running <= most


def test_the_same_request_many_times_at_once(setup, truth):
    i = 3
    cases = [CASES[i]] * 7
    assert play(setup.engine(jitter), cases, arrivals=[0, 0, 0, 1, 4, 4, 30]) == [truth[i]] * 7


def test_salt_separates_caches_and_changes_no_bit(plain, plain_truth):
    engine = plain.engine()
    salted = [Case(c.name, c.prompt, c.sampling, c.most, salt=b"tenant") for c in CASES[:5]]
    assert play(engine, [*CASES[:5], *salted]) == plain_truth[:5] * 2
    (warmed,) = play(engine, [Case("other", CASES[4].prompt, salt=b"another tenant")])
    assert warmed.num_cached == 0


def test_history_changes_nothing(plain, plain_truth):
    """The hundredth request of an engine gives the bits of the first."""
    engine = plain.engine(jitter, max_num_seqs=6)
    for _ in range(3):
        play(engine, company(8, most=10))
        assert play(engine, CASES[:4]) == plain_truth[:4]


# ---- preemption


def test_random_preemption(trial):
    engine = trial.engine()
    assert play(engine, CASES, step=lambda e: preempting(e, 3, 0.15)) == trial.truth
    assert engine.scheduler.counters.preempted > 0


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_preempted_before_every_step(plain, plain_truth, caching):
    """Everybody loses everything, all the time; a prompt that fits one frame still gets its token."""
    fit = [i for i, c in enumerate(CASES) if len(c.prompt) + c.most < plain.frame_rows * 2]
    engine = plain.engine(enable_prefix_caching=caching)
    few = [i for i in fit if len(CASES[i].prompt) == 1]
    heard = play(engine, [CASES[i] for i in few], step=lambda e: preempting(e, 1, 1.0))
    assert heard == [plain_truth[i] for i in few]
    assert engine.scheduler.counters.preempted >= 11 * len(few)


def test_a_cache_so_small_that_it_preempts_by_itself(trial):
    # The longest case takes seven pages: nine are barely more than it needs alone.
    engine = trial.engine(num_pages=10)
    assert play(engine, CASES) == trial.truth
    assert engine.scheduler.counters.preempted > 0


def test_so_small_and_nothing_is_remembered(plain, plain_truth):
    engine = plain.engine(jitter, num_pages=10, enable_prefix_caching=False)
    assert play(engine, CASES) == plain_truth
    assert engine.scheduler.counters.preempted > 0


def test_scores_survive_preemption(setup):
    """Prompt log-probabilities come once each and in order, however often the prompt is read again."""
    cases = [Case(f"scored-{n}", text(n, 20), warm(n), 4, prompt_logprobs=1) for n in (1, 17, 40, 70)]
    truth = reference(setup, cases)
    assert [len(h.scores) for h in truth] == [len(c.prompt) - 1 for c in cases]
    engine = setup.engine(jitter, num_pages=14)
    assert play(engine, cases, step=lambda e: preempting(e, 5, 0.25)) == truth


# ---- aborts


def test_random_aborts_of_others(trial):
    engine, rng = trial.engine(), random.Random(2)
    others: list[int] = []

    def meddle(engine, clock):
        if clock < 30:
            others.append(company(1, seed=clock)[0].add(engine))
        if others and rng.random() < 0.5:
            engine.abort(others.pop(rng.randrange(len(others))))

    assert play(engine, CASES, after=meddle) == trial.truth
    assert engine.scheduler.counters.aborted > 0


def test_aborting_everybody_else_in_the_middle_of_a_frame(plain, plain_truth):
    engine = plain.engine(jitter)
    others = [case.add(engine) for case in company(6)]

    def meddle(engine, clock):
        if clock == 2:
            for request in others:
                assert engine.abort(request) is not None
                assert engine.abort(request) is None

    assert play(engine, CASES, after=meddle) == plain_truth


# ---- verified beside unverified


def test_verified_requests_keep_their_bits_beside_unverified_ones(trial):
    others = company(6, verify=False, most=24) + company(3, seed=5, most=24)
    engine = trial.engine()
    heard = play(engine, [*others[:4], *CASES, *others[4:]])
    assert heard[4 : 4 + len(CASES)] == trial.truth
    # Where a frame has rows for everybody, all ride along; else some took the fast path.
    roomy = engine.scheduler.limits.frame_rows >= 128
    assert roomy or engine.scheduler.counters.unverified_tokens > 0


def test_mixed_traffic_under_pressure(setup, truth):
    others = company(6, verify=False, most=30)
    engine = setup.engine(jitter, num_pages=14)
    heard = play(engine, [*CASES, *others], step=lambda e: preempting(e, 7, 0.1))
    assert heard[: len(CASES)] == truth
    assert all(len(h.tokens) == 30 for h in heard[len(CASES) :])
    assert engine.scheduler.counters.preempted > 0


def test_the_same_prompt_verified_and_unverified_at_once(plain, plain_truth):
    """What the unverified twin wrote must never be read by the verified one."""
    twins = [Case(c.name, c.prompt, c.sampling, c.most, verify=False) for c in CASES]
    engine = plain.engine(jitter)
    heard = play(engine, [*twins, *CASES], arrivals=[0] * len(twins) + [6] * len(CASES))
    assert heard[len(twins) :] == plain_truth


# ---- two engines


def test_two_engines_over_one_model_agree_or_the_second_is_refused(plain, plain_truth):
    """An engine that takes another's seats must not leave it running on the wrong pages."""
    first = plain.engine()
    play(first, CASES[:5])  # so that there is something to be remembered
    try:
        second = Engine(first.loaded, first.config)
    except CallerError:
        return
    assert play(first, CASES[:5]) == plain_truth[:5]
    assert play(second, CASES[::-1]) == plain_truth[::-1]
    assert play(first, CASES[:5]) == plain_truth[:5]


@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_guesses_in_flight_when_asking_stops(plain, rows, seed):
    """Sequences that repeat themselves wait with their drafts behind a burst of prompts; frames chain."""
    rng = random.Random(seed)
    setup = replace(plain, frame_rows=rows, sizes=None)
    loops = [Case(f"loop-{i}", text(3, i), Sampling(allowed_token_ids=(5, 7)), most=40) for i in range(4)]
    plains = [Case(f"plain-{i}", text(2 + i, i), warm(i), most=30) for i in range(6)]
    burst = [Case(f"burst-{i}", text(rng.choice((rows, 2 * rows, 33)), i), most=4) for i in range(6)]
    cases = [*loops, *plains, *burst]
    arrivals = [0] * 10 + [rng.randint(4, 30) for _ in burst]
    engine = setup.engine(MAKERS["auto"], ahead=True, max_num_seqs=20)
    assert play(engine, cases, arrivals=arrivals) == reference(setup, cases)
