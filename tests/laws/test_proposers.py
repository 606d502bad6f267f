"""Law 1, proposer independence: nothing a proposer says is ever emitted."""

from dataclasses import replace

import pytest
from lawbook import (
    CASES,
    PROPOSERS,
    Case,
    Rude,
    Script,
    company,
    jitter,
    play,
    reference,
    text,
    warm,
)

from samewise.testing import Jitter, Scripted
from samewise.types import Proposal, Sampling

EVERYBODY = [make for name, make in PROPOSERS.items() if name not in ("none", "ngram+model", "ngram+skip")]
DRAFTED = [case for case in CASES if case.most >= 9]


def drafted(truth):
    return [heard for case, heard in zip(CASES, truth, strict=True) if case in DRAFTED]


# ---- doubles


def test_proposers_change_nothing(trial):
    engine = trial.engine()
    assert play(engine, CASES) == trial.truth
    counts = engine.scheduler.counters
    if trial.proposer == "jitter":  # or the law would be empty
        assert 0 < counts.accepted < counts.guessed
    if trial.proposer == "adversary":
        assert counts.rolled_back > 0
    if trial.proposer == "forked":
        assert counts.drafters["forked"].branches > 0
    if trial.proposer.startswith("skip"):
        assert play(engine, CASES) == trial.truth  # the search wants some text before it begins
        report = engine.stats()["skip"]
        assert report["search"]["rounds"] > 1
        assert counts.drafters["skip"].guessed > 0


@pytest.mark.parametrize("scale", [0.0, 5.0])
def test_however_wrong_a_draft_is(plain, plain_truth, scale):
    engine = plain.engine(lambda parts: Jitter(parts, scale=scale, num=6, seed=4))
    assert play(engine, CASES) == plain_truth


def test_drafting_alone_is_drafting_in_company(plain, plain_truth):
    for case, expected in zip(CASES[::5], plain_truth[::5], strict=True):
        assert play(plain.engine(jitter), [case]) == [expected], case.name


# ---- an oracle, and oracles that are wrong in one place


def test_an_oracle_is_accepted_whole_and_pays_a_bonus_token(setup, truth):
    engine = setup.engine(Script.of(DRAFTED, drafted(truth)).oracle)
    assert play(engine, DRAFTED) == drafted(truth)
    counts = engine.scheduler.counters
    assert counts.guessed == counts.accepted > 0
    assert counts.rolled_back == 0


@pytest.mark.parametrize("case", ["greedy-1", "top-k-16", "greedy-33", "warm-17"])
def test_a_whole_draft_takes_one_frame(plain, plain_truth, case):
    i = [c.name for c in CASES].index(case)
    engine = plain.engine(Script.of(CASES, plain_truth).oracle)
    assert play(engine, [CASES[i]]) == [plain_truth[i]]
    counts = engine.scheduler.counters
    # Of twelve tokens the last is the replay's own. The first comes with the prompt, unless the prompt's
    # last chunk is a single token: then guesses ride beside it.
    reading, last = divmod(len(CASES[i].prompt) - 1, engine.scheduler.limits.frame_rows)
    guessed = 11 if last == 0 else 10
    frames = reading + 1 if last == 0 else reading + 2
    assert (counts.guessed, counts.accepted, counts.frames) == (guessed, guessed, frames)


@pytest.mark.parametrize("place", [0, 1, 3, 6, 7], ids=["first", "second", "middle", "before-last", "last"])
def test_one_wrong_guess_ends_the_draft_there(plain, plain_truth, place):
    script = Script.of(DRAFTED, drafted(plain_truth))
    # Alone, so that a draft is never cut short for want of rows.
    for case, expected in list(zip(DRAFTED, drafted(plain_truth), strict=True))[::3]:
        if len(expected.tokens) < 10:
            continue
        engine = plain.engine(script.wrong_once(place, 8))
        assert play(engine, [case]) == [expected], case.name
        counts = engine.scheduler.counters
        assert (counts.guessed, counts.accepted, counts.rolled_back) == (8, place, 8 - place), case.name


@pytest.mark.parametrize("place", [0, 7])
def test_one_wrong_guess_in_company(setup, truth, place):
    script = Script.of(DRAFTED, drafted(truth))
    long_enough = [i for i, heard in enumerate(drafted(truth)) if len(heard.tokens) > 9]
    engine = setup.engine(script.wrong_once(place, 8))
    cases = [DRAFTED[i] for i in long_enough]
    assert play(engine, cases) == [drafted(truth)[i] for i in long_enough]


# ---- ends inside a draft


def ends_inside(setup, truth, changed, i):
    """A case that ends sooner than it did, against an oracle that knows how it would have gone on."""
    (expected,) = reference(setup, [changed])
    script = Script({CASES[i].prompt: truth[i].tokens})
    for make in (script.oracle, *EVERYBODY):
        engine = setup.engine(make)
        assert play(engine, [changed]) == [expected]
    return expected


def overrun(script):
    """The oracle without manners: it guesses on, beyond what there is room for."""
    return lambda _: Rude(lambda asks: [Proposal(ask.seq_id, tuple(script.guesses(ask))) for ask in asks])


@pytest.mark.parametrize("at", [0, 5, 11])
@pytest.mark.parametrize("i", [2, 3], ids=["greedy", "warm"])
def test_end_of_text_inside_a_draft(plain, plain_truth, at, i):
    stop = plain_truth[i].tokens[at]
    first = plain_truth[i].tokens.index(stop)
    case = replace(CASES[i], sampling=replace(CASES[i].sampling, stop_ids=frozenset({stop, 300})))
    heard = ends_inside(plain, plain_truth, case, i)
    assert heard.tokens == plain_truth[i].tokens[: first + 1]
    assert (heard.finish, heard.stop_id) == ("stop", stop)


@pytest.mark.parametrize("most", [1, 2, 7])
@pytest.mark.parametrize("i", [0, 3], ids=["greedy", "warm"])
def test_max_tokens_inside_a_draft(plain, plain_truth, most, i):
    heard = ends_inside(plain, plain_truth, replace(CASES[i], most=most), i)
    assert heard.tokens == plain_truth[i].tokens[:most]
    assert heard.logprobs == plain_truth[i].logprobs[:most]
    assert heard.finish == "length"


@pytest.mark.parametrize("proposer", [*PROPOSERS, "oracle"])
@pytest.mark.parametrize("limit", [34, 40, 48])
def test_a_draft_meets_the_context_limit(plain, proposer, limit):
    case = Case("long", text(33, 5), warm(1), most=100)
    (far,) = reference(plain, [case])
    make = Script({case.prompt: far.tokens}).oracle if proposer == "oracle" else PROPOSERS[proposer]
    engine = plain.engine(make, max_model_len=limit)
    (heard,) = play(engine, [case])
    assert heard.tokens == far.tokens[: limit - 33]
    assert heard.logprobs == far.logprobs[: limit - 33]
    assert heard.finish == "length"


def test_an_end_inside_a_draft_leaves_clean_pages_behind(plain, plain_truth):
    """What the cut-off rows of the draft wrote must not be found by the next turn."""
    i = 1  # greedy-16 says twenty tokens
    stop = plain_truth[i].tokens[16]
    case = replace(CASES[i], sampling=Sampling(stop_ids=frozenset({stop})))
    engine = plain.engine(Script({CASES[i].prompt: plain_truth[i].tokens}).oracle)
    (heard,) = play(engine, [case])
    assert heard.finish == "stop"
    again = Case("again", (*CASES[i].prompt, *heard.tokens, 1, 2, 3), warm(2))
    assert play(engine, [again]) == reference(plain, [again])


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
def test_processing_with_drafts(plain, kind, temperature):
    # Few allowed tokens, so that tokens come again and penalties bite.
    few = {"allowed_token_ids": tuple(range(24))} | PROCESSED[kind]
    cases = [
        Case(f"{kind}-{n}", text(n, 9), Sampling(temperature=temperature, seed=n, **few), most=15)
        for n in (1, 17)
    ]
    expected = reference(plain, cases)
    script = Script.of(cases, expected)
    oracle, wrong = plain.engine(script.oracle), plain.engine(script.wrong_once(5, 10))
    assert play(oracle, cases) == expected
    assert oracle.scheduler.counters.accepted > 0
    assert play(wrong, cases) == expected
    for make in EVERYBODY:
        assert play(plain.engine(make), cases) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_min_tokens_with_drafts(plain, temperature):
    base = Case("base", text(17, 4), Sampling(temperature=temperature, seed=3))
    (free,) = reference(plain, [base])
    stops = frozenset(free.tokens[:3])
    for least in (1, 4):
        case = replace(base, sampling=replace(base.sampling, stop_ids=stops, min_tokens=least))
        (expected,) = reference(plain, [case])
        assert len(expected.tokens) > least
        assert not stops & set(expected.tokens[:least])
        script = Script({case.prompt: expected.tokens + free.tokens})
        for make in (script.oracle, Script({case.prompt: free.tokens}).oracle, *EVERYBODY):
            assert play(plain.engine(make), [case]) == [expected]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_bad_words_with_drafts(plain, temperature, size):
    """The head of the word is drafted in the same span as its tail, or was committed before it."""
    base = Case("base", text(16, 6), Sampling(temperature=temperature, seed=5))
    (free,) = reference(plain, [base])
    word = tuple(free.tokens[4 : 4 + size])
    case = replace(base, sampling=replace(base.sampling, bad_words=(word, (300, 301))))
    (expected,) = reference(plain, [case])
    said = expected.tokens
    assert all(tuple(said[k : k + size]) != word for k in range(len(said)))
    for known in (free.tokens, expected.tokens):
        for make in (Script({case.prompt: known}).oracle, jitter):
            assert play(plain.engine(make), [case]) == [expected]


@pytest.mark.parametrize("num", [0, 1, 5, -1])
def test_top_logprobs_with_drafts(plain, num):
    cases = [
        Case("tops-1", text(1, 8), Sampling(top_logprobs=num)),
        Case("tops-17", text(17, 8), warm(4, top_logprobs=num)),
    ]
    expected = reference(plain, cases)
    assert all(len(h.tops) == len(h.tokens) for h in expected)
    assert all(len(top) == (320 if num < 0 else num) for h in expected for top in h.tops)
    script = Script.of(cases, expected)
    for make in (script.oracle, script.wrong_once(3, 8), jitter):
        assert play(plain.engine(make), cases) == expected


@pytest.mark.parametrize("num", [0, 3])
def test_prompt_logprobs_beside_drafts(setup, num):
    cases = [Case(f"scored-{n}", text(n, 10), warm(n), prompt_logprobs=num) for n in (1, 16, 17, 50)]
    expected = reference(setup, cases)
    assert [len(h.scores) for h in expected] == [len(c.prompt) - 1 for c in cases]
    for make in (Script.of(cases, expected).oracle, jitter):
        assert play(setup.engine(make), cases) == expected


# ---- the real ones


@pytest.mark.parametrize("proposer", [name for name in PROPOSERS if name != "none"])
def test_aborts_during_drafts(plain, plain_truth, proposer):
    """Others leave while their drafts are half done, replayed, or in flight."""
    engine = plain.engine(PROPOSERS[proposer])
    leaving = [case.add(engine) for case in company(6)]

    def leave(engine, clock):
        if clock % 2 and leaving:
            engine.abort(leaving.pop())

    assert play(engine, CASES, after=leave) == plain_truth


@pytest.mark.parametrize("proposer", list(PROPOSERS))
@pytest.mark.parametrize("verified", [1, 7])
def test_mixed_traffic(plain, plain_truth, proposer, verified):
    """Requests that opted out ride frames and share fast passes; the others do not notice."""
    engine = plain.engine(PROPOSERS[proposer])
    others = [replace(case, verify=i < verified) for i, case in enumerate(company(8, most=12))]
    heard = play(engine, [*others, *CASES], arrivals=[0] * len(others) + [2] * len(CASES))
    assert heard[len(others) :] == plain_truth


def test_drafts_of_many_share_frames(plain):
    """Grouped verification: far fewer frames than tokens, and guesses that are all right."""
    cases = [Case(f"{i}", text(3 + i, i), most=18) for i in range(4)]
    setup = replace(plain, frame_rows=64, sizes=None)
    expected = reference(setup, cases)
    engine = setup.engine(PROPOSERS["decode"], draft_tokens=8)
    assert play(engine, cases) == expected
    counts = engine.scheduler.counters
    tally = counts.drafters["decode"]
    assert tally.accepted / tally.guessed > 0.9
    assert counts.frames <= 6
    assert sum(len(one.tokens) for one in expected) / counts.frames > 10


def test_fewer_bits_guess_worse_and_change_nothing(plain, plain_truth):
    if plain.device != "cpu":
        pytest.skip("four-bit guesses are a CPU's")
    engine = plain.engine(PROPOSERS["cheap"])
    assert play(engine, CASES) == plain_truth
    tally = engine.scheduler.counters.drafters["decode"]
    assert 0 < tally.accepted < tally.guessed


@pytest.mark.parametrize("proposer", ["decode", "model", "auto"])
@pytest.mark.parametrize("draft_tokens", [1, 3, 40])
@pytest.mark.parametrize("deadline", [0, 9])
def test_draft_length_and_deadline_do_not_matter(plain, plain_truth, proposer, draft_tokens, deadline):
    settings = {"draft_tokens": draft_tokens, "verify_deadline": deadline}
    engine = plain.engine(PROPOSERS[proposer], **settings)
    assert play(engine, CASES[::2]) == plain_truth[::2]


def test_repeating_text_comes_in_large_steps(plain):
    """Allowed only two tokens, a greedy model soon repeats itself: suffix matches find it."""
    case = Case("loop", text(9), Sampling(allowed_token_ids=(5,)), most=60)
    (expected,) = reference(plain, [case])
    for proposer in ("ngram", "auto"):
        engine = plain.engine(PROPOSERS[proposer])
        assert play(engine, [case]) == [expected]
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
def test_a_proposer_with_a_bug_changes_nothing(plain, plain_truth, bug):
    if plain.device == "cuda" and bug is beyond_the_vocabulary:
        pytest.skip("an assertion on the device would take the process with it; the CPU tells")
    engine = plain.engine(lambda _: Rude(bug(Script.of(CASES, plain_truth))), max_model_len=128)
    assert play(engine, CASES) == plain_truth


def test_more_guesses_than_the_context_has_room_for(plain):
    case = Case("long", text(33, 5), warm(1), most=100)
    (far,) = reference(plain, [case])
    engine = plain.engine(overrun(Script({case.prompt: far.tokens})), max_model_len=40)
    (heard,) = play(engine, [case])
    assert heard.tokens == far.tokens[:7]
    assert heard.logprobs == far.logprobs[:7]


def test_an_empty_proposal_is_no_proposal(plain, plain_truth):
    engine = plain.engine(lambda _: Scripted(lambda _: ()))
    assert play(engine, CASES[:4]) == plain_truth[:4]
    assert engine.scheduler.counters.guessed == 0
