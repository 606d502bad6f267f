"""Law 1, proposer independence: nothing a proposer says is ever emitted."""

from dataclasses import replace

import pytest
from law_helpers import (
    CASES,
    PROPOSERS,
    BuggyProposer,
    Case,
    KnownAnswers,
    jitter,
    other_requests,
    random_prompt,
    run_cases,
    run_reference,
)

from samewise.draft.tuning import Tuning
from samewise.testing import Jitter, Scripted
from samewise.types import Proposal, Sampling

ALL_PROPOSERS = [make for name, make in PROPOSERS.items() if name not in ("none", "ngram+model", "ngram+skip")]
DRAFTED = [case for case in CASES if case.max_tokens >= 9]


def drafted(references):
    return [outputs for case, outputs in zip(CASES, references, strict=True) if case in DRAFTED]


# ---- doubles


def test_proposers_change_nothing(variant):
    engine = variant.engine()
    assert run_cases(engine, CASES) == variant.references
    counts = engine.scheduler.counters
    if variant.proposer == "jitter":  # or the law would be empty
        assert 0 < counts.accepted < counts.guessed
    if variant.proposer == "adversary":
        assert counts.rolled_back > 0
    if variant.proposer == "forked":
        assert counts.drafters["forked"].branches > 0
    if variant.proposer.startswith("skip"):
        assert run_cases(engine, CASES) == variant.references  # the search wants some text before it begins
        report = engine.stats()["skip"]
        assert report["search"]["rounds"] > 1
        assert counts.drafters["skip"].guessed > 0


@pytest.mark.parametrize("scale", [0.0, 5.0])
def test_however_wrong_a_draft_is(basic, basic_references, scale):
    engine = basic.engine(lambda parts: Jitter(parts, scale=scale, num=6, seed=4))
    assert run_cases(engine, CASES) == basic_references


def test_drafting_alone_is_drafting_in_company(basic, basic_references):
    for case, expected in zip(CASES[::5], basic_references[::5], strict=True):
        assert run_cases(basic.engine(jitter), [case]) == [expected], case.name


# ---- an oracle, and oracles that are wrong in one place


def test_an_oracle_is_accepted_whole_and_pays_a_bonus_token(setup, references):
    engine = setup.engine(KnownAnswers.of(DRAFTED, drafted(references)).oracle)
    assert run_cases(engine, DRAFTED) == drafted(references)
    counts = engine.scheduler.counters
    assert counts.guessed == counts.accepted > 0
    assert counts.rolled_back == 0


@pytest.mark.parametrize("case", ["greedy-1", "top-k-16", "greedy-33", "sampled-17"])
def test_a_whole_draft_takes_one_frame(basic, basic_references, case):
    i = [c.name for c in CASES].index(case)
    engine = basic.engine(KnownAnswers.of(CASES, basic_references).oracle)
    assert run_cases(engine, [CASES[i]]) == [basic_references[i]]
    counts = engine.scheduler.counters
    # Of twelve tokens the last is the replay's own. The first comes with the prompt, unless the prompt's
    # last chunk is a single token: then guesses ride beside it.
    reading, last = divmod(len(CASES[i].prompt) - 1, engine.scheduler.limits.frame_rows)
    guessed = 11 if last == 0 else 10
    frames = reading + 1 if last == 0 else reading + 2
    assert (counts.guessed, counts.accepted, counts.frames) == (guessed, guessed, frames)


@pytest.mark.parametrize("place", [0, 1, 3, 6, 7], ids=["first", "second", "middle", "before-last", "last"])
def test_one_wrong_guess_ends_the_draft_there(basic, basic_references, place):
    script = KnownAnswers.of(DRAFTED, drafted(basic_references))
    # Alone, so that a draft is never cut short for want of rows.
    for case, expected in list(zip(DRAFTED, drafted(basic_references), strict=True))[::3]:
        if len(expected.tokens) < 10:
            continue
        engine = basic.engine(script.wrong_once(place, 8))
        assert run_cases(engine, [case]) == [expected], case.name
        counts = engine.scheduler.counters
        assert (counts.guessed, counts.accepted, counts.rolled_back) == (8, place, 8 - place), case.name


@pytest.mark.parametrize("place", [0, 7])
def test_one_wrong_guess_in_company(setup, references, place):
    script = KnownAnswers.of(DRAFTED, drafted(references))
    long_enough = [i for i, outputs in enumerate(drafted(references)) if len(outputs.tokens) > 9]
    engine = setup.engine(script.wrong_once(place, 8))
    cases = [DRAFTED[i] for i in long_enough]
    assert run_cases(engine, cases) == [drafted(references)[i] for i in long_enough]


# ---- ends inside a draft


def ends_inside(setup, references, changed, i):
    """A case that ends sooner than it did, against an oracle that knows how it would have gone on."""
    (expected,) = run_reference(setup, [changed])
    script = KnownAnswers({CASES[i].prompt: references[i].tokens})
    for make in (script.oracle, *ALL_PROPOSERS):
        engine = setup.engine(make)
        assert run_cases(engine, [changed]) == [expected]
    return expected


def overrun(script):
    """The oracle without manners: it guesses on, beyond what there is room for."""
    return lambda _: BuggyProposer(lambda asks: [Proposal(ask.seq_id, tuple(script.guesses(ask))) for ask in asks])


@pytest.mark.parametrize("at", [0, 5, 11])
@pytest.mark.parametrize("i", [2, 3], ids=["greedy", "sampled"])
def test_end_of_text_inside_a_draft(basic, basic_references, at, i):
    stop = basic_references[i].tokens[at]
    first = basic_references[i].tokens.index(stop)
    case = replace(CASES[i], sampling=replace(CASES[i].sampling, stop_ids=frozenset({stop, 300})))
    outputs = ends_inside(basic, basic_references, case, i)
    assert outputs.tokens == basic_references[i].tokens[: first + 1]
    assert (outputs.finish, outputs.stop_id) == ("stop", stop)


@pytest.mark.parametrize("most", [1, 2, 7])
@pytest.mark.parametrize("i", [0, 3], ids=["greedy", "sampled"])
def test_max_tokens_inside_a_draft(basic, basic_references, most, i):
    outputs = ends_inside(basic, basic_references, replace(CASES[i], max_tokens=most), i)
    assert outputs.tokens == basic_references[i].tokens[:most]
    assert outputs.logprobs == basic_references[i].logprobs[:most]
    assert outputs.finish == "length"


@pytest.mark.parametrize("proposer", [*PROPOSERS, "oracle"])
@pytest.mark.parametrize("limit", [34, 40, 48])
def test_a_draft_meets_the_context_limit(basic, proposer, limit):
    case = Case("long", random_prompt(33, 5), sampled(1), max_tokens=100)
    (far,) = run_reference(basic, [case])
    make = KnownAnswers({case.prompt: far.tokens}).oracle if proposer == "oracle" else PROPOSERS[proposer]
    engine = basic.engine(make, max_model_len=limit)
    (outputs,) = run_cases(engine, [case])
    assert outputs.tokens == far.tokens[: limit - 33]
    assert outputs.logprobs == far.logprobs[: limit - 33]
    assert outputs.finish == "length"


def test_an_end_inside_a_draft_leaves_clean_pages_behind(basic, basic_references):
    """What the cut-off rows of the draft wrote must not be found by the next turn."""
    i = 1  # greedy-16 says twenty tokens
    stop = basic_references[i].tokens[16]
    case = replace(CASES[i], sampling=Sampling(stop_ids=frozenset({stop})))
    engine = basic.engine(KnownAnswers({CASES[i].prompt: basic_references[i].tokens}).oracle)
    (outputs,) = run_cases(engine, [case])
    assert outputs.finish == "stop"
    again = Case("again", (*CASES[i].prompt, *outputs.tokens, 1, 2, 3), sampled(2))
    assert run_cases(engine, [again]) == run_reference(basic, [again])


# ---- what earlier tokens decide: nothing is advanced that would need undoing


PROCESSED = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.5},
    "repetition": {"repetition_penalty": 2.5},
    "negative": {"presence_penalty": -1.0, "frequency_penalty": -0.7},
    "all-penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "bias": {"logit_bias": ((7, 6.0), (8, 5.0), (9, 5.5))},
    "allowed": {"allowed_token_ids": (1, 2, 3, 5, 8, 13, 21)},
}


@pytest.mark.parametrize(
    ("kind", "temperature"), [*((kind, 0.8) for kind in PROCESSED), ("all-penalties", 0.0), ("bias", 0.0)]
)
def test_processing_with_drafts(basic, kind, temperature):
    # Few allowed tokens, so that tokens come again and penalties bite.
    few = {"allowed_token_ids": tuple(range(24))} | PROCESSED[kind]
    cases = [
        Case(f"{kind}-{n}", random_prompt(n, 9), Sampling(temperature=temperature, seed=n, **few), max_tokens=15)
        for n in (1, 17)
    ]
    expected = run_reference(basic, cases)
    script = KnownAnswers.of(cases, expected)
    oracle, wrong = basic.engine(script.oracle), basic.engine(script.wrong_once(5, 10))
    assert run_cases(oracle, cases) == expected
    assert oracle.scheduler.counters.accepted > 0
    assert run_cases(wrong, cases) == expected
    for make in ALL_PROPOSERS:
        assert run_cases(basic.engine(make), cases) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_min_tokens_with_drafts(basic, temperature):
    base = Case("base", random_prompt(17, 4), Sampling(temperature=temperature, seed=3))
    (free,) = run_reference(basic, [base])
    stops = frozenset(free.tokens[:3])
    for least in (1, 4):
        case = replace(base, sampling=replace(base.sampling, stop_ids=stops, min_tokens=least))
        (expected,) = run_reference(basic, [case])
        assert len(expected.tokens) > least
        assert not stops & set(expected.tokens[:least])
        script = KnownAnswers({case.prompt: expected.tokens + free.tokens})
        for make in (script.oracle, KnownAnswers({case.prompt: free.tokens}).oracle, *ALL_PROPOSERS):
            assert run_cases(basic.engine(make), [case]) == [expected]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_bad_words_with_drafts(basic, temperature, size):
    """The head of the word is drafted in the same span as its tail, or was committed before it."""
    base = Case("base", random_prompt(16, 6), Sampling(temperature=temperature, seed=5))
    (free,) = run_reference(basic, [base])
    word = tuple(free.tokens[4 : 4 + size])
    case = replace(base, sampling=replace(base.sampling, bad_words=(word, (300, 301))))
    (expected,) = run_reference(basic, [case])
    said = expected.tokens
    assert all(tuple(said[k : k + size]) != word for k in range(len(said)))
    for known in (free.tokens, expected.tokens):
        for make in (KnownAnswers({case.prompt: known}).oracle, jitter):
            assert run_cases(basic.engine(make), [case]) == [expected]


@pytest.mark.parametrize("num", [0, 1, 5, -1])
def test_top_logprobs_with_drafts(basic, num):
    cases = [
        Case("tops-1", random_prompt(1, 8), Sampling(top_logprobs=num)),
        Case("tops-17", random_prompt(17, 8), sampled(4, top_logprobs=num)),
    ]
    expected = run_reference(basic, cases)
    assert all(len(h.tops) == len(h.tokens) for h in expected)
    assert all(len(top) == (320 if num < 0 else num) for h in expected for top in h.tops)
    script = KnownAnswers.of(cases, expected)
    for make in (script.oracle, script.wrong_once(3, 8), jitter):
        assert run_cases(basic.engine(make), cases) == expected


@pytest.mark.parametrize("num", [0, 3])
def test_prompt_logprobs_beside_drafts(setup, num):
    cases = [Case(f"scored-{n}", random_prompt(n, 10), sampled(n), prompt_logprobs=num) for n in (1, 16, 17, 50)]
    expected = run_reference(setup, cases)
    assert [len(h.scores) for h in expected] == [len(c.prompt) - 1 for c in cases]
    for make in (KnownAnswers.of(cases, expected).oracle, jitter):
        assert run_cases(setup.engine(make), cases) == expected


# ---- the real ones


@pytest.mark.parametrize("proposer", [name for name in PROPOSERS if name != "none"])
def test_aborts_during_drafts(basic, basic_references, proposer):
    """Others leave while their drafts are half done, replayed, or in flight."""
    engine = basic.engine(PROPOSERS[proposer])
    leaving = [case.add(engine) for case in other_requests(6)]

    def leave(engine, clock):
        if clock % 2 and leaving:
            engine.abort(leaving.pop())

    assert run_cases(engine, CASES, after=leave) == basic_references


@pytest.mark.parametrize("proposer", list(PROPOSERS))
@pytest.mark.parametrize("verified", [1, 7])
def test_mixed_traffic(basic, basic_references, proposer, verified):
    """Requests that opted out ride frames and share fast passes; the others do not notice."""
    engine = basic.engine(PROPOSERS[proposer])
    others = [replace(case, verify=i < verified) for i, case in enumerate(other_requests(8, max_tokens=12))]
    outputs = run_cases(engine, [*others, *CASES], arrivals=[0] * len(others) + [2] * len(CASES))
    assert outputs[len(others) :] == basic_references


def test_drafts_of_many_share_frames(basic):
    """Grouped verification: far fewer frames than tokens, and guesses that are all right."""
    cases = [Case(f"{i}", random_prompt(3 + i, i), max_tokens=18) for i in range(4)]
    setup = replace(basic, frame_rows=64, sizes=None)
    expected = run_reference(setup, cases)
    engine = setup.engine(PROPOSERS["decode"], draft_tokens=8)
    assert run_cases(engine, cases) == expected
    counts = engine.scheduler.counters
    tally = counts.drafters["decode"]
    assert tally.accepted / tally.guessed > 0.9
    assert counts.frames <= 6
    assert sum(len(one.tokens) for one in expected) / counts.frames > 10


def test_fewer_bits_guess_worse_and_change_nothing(basic, basic_references):
    if basic.device != "cpu":
        pytest.skip("four-bit guesses are a CPU's")
    engine = basic.engine(PROPOSERS["decode-int4"])
    assert run_cases(engine, CASES) == basic_references
    tally = engine.scheduler.counters.drafters["decode"]
    assert 0 < tally.accepted < tally.guessed


@pytest.mark.parametrize("proposer", ["decode", "model", "auto"])
@pytest.mark.parametrize("draft_tokens", [1, 3, 40])
@pytest.mark.parametrize("deadline", [0, 9])
def test_draft_length_and_deadline_do_not_matter(basic, basic_references, proposer, draft_tokens, deadline):
    settings = {"draft_tokens": draft_tokens, "tuning": Tuning(draft_deadline=deadline)}
    engine = basic.engine(PROPOSERS[proposer], **settings)
    assert run_cases(engine, CASES[::2]) == basic_references[::2]


def test_repeating_text_comes_in_large_steps(basic):
    """Allowed only two tokens, a greedy model soon repeats itself: suffix matches find it."""
    case = Case("loop", random_prompt(9), Sampling(allowed_token_ids=(5,)), max_tokens=60)
    (expected,) = run_reference(basic, [case])
    for proposer in ("ngram", "auto"):
        engine = basic.engine(PROPOSERS[proposer])
        assert run_cases(engine, [case]) == [expected]
        assert engine.scheduler.counters.frames < 30


# ---- proposers with bugs


def too_many(script):
    def bug(asks):
        return [Proposal(ask.seq_id, tuple(script.guesses(ask)) + (5,) * 40) for ask in asks]

    return bug


def twice(script):
    def bug(asks):
        return [Proposal(a.seq_id, tuple(script.guesses(a))[: a.room]) for a in asks for _ in range(2)]

    return bug


def strangers(script):
    def bug(asks):
        return [Proposal(seq_id, (1, 2, 3)) for seq_id in (-1, 10**6, *(ask.seq_id for ask in asks))]

    return bug


def everybody(script):
    """Proposes to sequences it was not asked about: some are still reading, some are gone."""

    def bug(asks):
        return [Proposal(seq_id, (4, 5)) for seq_id in range(len(CASES))]

    return bug


def beyond_the_vocabulary(script):
    def bug(asks):
        return [Proposal(ask.seq_id, (*script.guesses(ask)[:1], 320, -1, 2**40)[: ask.room]) for ask in asks]

    return bug


@pytest.mark.parametrize("bug", [too_many, twice, strangers, everybody, beyond_the_vocabulary])
def test_a_proposer_with_a_bug_changes_nothing(basic, basic_references, bug):
    if basic.device == "cuda" and bug is beyond_the_vocabulary:
        pytest.skip("an assertion on the device would take the process with it; the CPU tells")
    engine = basic.engine(lambda _: BuggyProposer(bug(KnownAnswers.of(CASES, basic_references))), max_model_len=128)
    assert run_cases(engine, CASES) == basic_references


def test_more_guesses_than_the_context_has_room_for(basic):
    case = Case("long", random_prompt(33, 5), sampled(1), max_tokens=100)
    (far,) = run_reference(basic, [case])
    engine = basic.engine(overrun(KnownAnswers({case.prompt: far.tokens})), max_model_len=40)
    (outputs,) = run_cases(engine, [case])
    assert outputs.tokens == far.tokens[:7]
    assert outputs.logprobs == far.logprobs[:7]


def test_an_empty_proposal_is_no_proposal(basic, basic_references):
    engine = basic.engine(lambda _: Scripted(lambda _: ()))
    assert run_cases(engine, CASES[:4]) == basic_references[:4]
    assert engine.scheduler.counters.guessed == 0
