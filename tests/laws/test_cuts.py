"""Law 3, cut independence: how a prompt is cut, cached or carried on changes nothing.

`frame_rows` is part of the contract: bits are compared within one.
"""

import random
from dataclasses import replace

import pytest
from lawbook import CASES, PAGE, Case, alone, company, jitter, play, reference, text, warm

from samewise.types import Sampling


@pytest.mark.parametrize("left", [1, 11])
def test_prompts_are_cut_by_the_company_they_keep(setup, truth, left):
    """Sequences that generate take all rows of a frame but `left`, so prompts come in chunks of that."""
    others = company(setup.frame_rows - left, most=8 + 400 // (left + 7))
    engine = setup.engine(num_pages=1200)
    arrivals = [0] * len(others) + [3] * len(CASES)
    heard = play(engine, [*others, *CASES], arrivals=arrivals)
    assert heard[len(others) :] == truth


def test_prompts_are_cut_at_random(trial):
    """Drafts of random length ride along, so the rows that are left change with every frame."""
    rng = random.Random(trial.proposer)
    others = company(8, most=30)
    arrivals = [rng.randrange(4) for _ in others] + [rng.randrange(12) for _ in CASES]
    heard = play(trial.engine(), [*others, *CASES], arrivals=arrivals)
    assert heard[len(others) :] == trial.truth


@pytest.mark.parametrize("rows", [8, 48])
def test_within_any_frame_size(plain, rows):
    sized = replace(plain, frame_rows=rows, sizes=None)
    truth = reference(sized, CASES)
    others = company(rows - 5, most=10)
    engine = sized.engine(jitter)
    heard = play(engine, [*others, *CASES], arrivals=[0] * len(others) + [2] * len(CASES))
    assert heard[len(others) :] == truth


# ---- the prefix cache


def test_cold_warm_and_off(trial):
    engine = trial.engine()
    assert play(engine, CASES) == trial.truth  # cold
    heard = play(engine, CASES)  # warm
    assert heard == trial.truth
    for case, one in zip(CASES, heard, strict=True):
        if case.prompt_logprobs is None:  # those must read every row whose logits they score
            assert one.num_cached == (len(case.prompt) - 1) // PAGE * PAGE, case.name
    off = trial.engine(enable_prefix_caching=False)
    for _ in range(2):
        heard = play(off, CASES[:6])
        assert heard == trial.truth[:6]
        assert all(one.num_cached == 0 for one in heard)


def test_a_prompt_found_whole_still_reads_its_last_token(plain):
    case = Case("whole", text(32, 3), warm(1))
    engine = plain.engine()
    cold, warmed = play(engine, [case])[0], play(engine, [case])[0]
    assert (cold.num_cached, warmed.num_cached) == (0, 16)
    assert cold == warmed


def test_prompts_that_part_within_and_between_pages(setup):
    stem = text(70, 4)
    cases = [
        Case(f"part-{n}", (*stem[:n], 9, *text(20, n)), warm(n)) for n in (1, 15, 16, 17, 31, 32, 48, 69)
    ]
    truth = reference(setup, cases)
    engine = setup.engine(jitter)
    play(engine, [Case("stem", stem)])
    heard = play(engine, cases)
    assert heard == truth
    assert [one.num_cached for one in heard] == [n // PAGE * PAGE for n in (1, 15, 16, 17, 31, 32, 48, 69)]


def test_a_cache_that_forgets(setup):
    """Pages are taken from the cache by others, in parts; what is left of a prefix is still right."""
    cases = [Case(f"turn-{n}", text(60 + n, 6), warm(n), 6) for n in range(3)]
    truth = reference(setup, cases)
    engine = setup.engine(jitter, num_pages=12)
    cached = []
    for _ in range(2):
        for case, expected in zip(cases, truth, strict=True):
            (heard,) = play(engine, [case])
            assert heard == expected
            (again,) = play(engine, [case])
            assert again == expected
            cached.append((heard.num_cached, again.num_cached))
    assert any(second > 0 for _, second in cached)
    assert engine.scheduler.index.num_indexed <= 11


# ---- carrying on


@pytest.mark.parametrize("sampling", [Sampling(), warm(5, top_p=0.8)], ids=["greedy", "warm"])
def test_many_turns_from_cache_and_from_scratch(trial, sampling):
    engine = trial.engine()
    so_far, said_before = text(21, 8), ()
    for turn in range(3):
        case = Case(f"turn-{turn}", so_far, sampling, 19)
        (from_cache,) = play(engine, [case])
        assert [from_cache] == reference(trial.setup, [case])
        # Everything said before is found: prompts and answers alike, but for the last, partial page.
        # The last token said was never read: its KV is not there.
        assert from_cache.num_cached == max(0, len(said_before) - 1) // PAGE * PAGE
        said_before = (*so_far, *from_cache.tokens)
        so_far = (*said_before, *text(7, turn))


def test_a_request_cut_in_two_says_the_same(setup):
    """Ask for twelve tokens, or for five and then seven more: noise is keyed by absolute position."""
    for case in (Case("greedy", text(17, 9)), Case("warm", text(17, 9), warm(3, top_k=50))):
        (whole,) = reference(setup, [case])
        engine = setup.engine(jitter)
        for first in (1, 5, 11):
            (head,) = play(engine, [replace(case, most=first)])
            rest = replace(case, prompt=(*case.prompt, *head.tokens), most=12 - first)
            (tail,) = play(engine, [rest])
            assert head.tokens + tail.tokens == whole.tokens
            assert head.logprobs + tail.logprobs == whole.logprobs


def test_scoring_an_answer_gives_the_bits_of_generating_it(setup, truth):
    """Teacher-forced and in parallel, or token by token: the same log-probabilities."""
    chosen = [(case, heard) for case, heard in zip(CASES, truth, strict=True) if case.prompt_logprobs is None]
    scored = [
        Case(case.name, (*case.prompt, *heard.tokens), most=0, score_from=len(case.prompt))
        for case, heard in chosen
    ]
    for engine in (setup.engine(), setup.engine(jitter, num_pages=12)):
        for _ in range(2):  # cold and warm
            for heard, (_, expected) in zip(play(engine, scored), chosen, strict=True):
                assert heard.scores == expected.logprobs
                assert heard.tokens == []


def test_cut_alone_is_cut_in_company(plain, plain_truth):
    """One engine, case after case, each finding what the ones before have left."""
    engine = plain.engine(jitter, num_pages=40)
    assert alone(engine, CASES) == plain_truth
    assert alone(engine, reversed(CASES)) == list(reversed(plain_truth))
