"""Laws 1 to 3 with grammars: a mask is a function of the tokens before a row, and of nothing else."""

import json
import random
import re
from dataclasses import replace

import pytest
from lawbook import PROPOSERS, Case, Script, Setup, company, jitter, play, reference, text, warm

from samewise.testing import byte_tokenizer, preempting, shuffled
from samewise.text.grammar import Grammars
from samewise.types import Grammar, Sampling

LLAMA = Setup("llama", "cpu", "float32", 16)
EOS = 257
ENDS = frozenset({EOS})
VOCAB = 320

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6, "pattern": "^[a-z]*$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "cow", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
SCHEMA = Grammar.json_schema(PERSON)
DIGITS = Grammar.regex("[0-9]{2,5}(,[0-9]{2,5}){0,3}")
NESTED = Grammar.lark('start: expr\nexpr: "(" expr ")" | "[" expr "]" | /[a-z]{1,4}/')


def greedy(grammar, **settings):
    return Sampling(stop_ids=ENDS, grammar=grammar, **settings)


def sampled(seed, grammar, **settings):
    return warm(seed, stop_ids=ENDS, grammar=grammar, **settings)


CASES = (
    Case("schema-greedy", text(17), greedy(SCHEMA), most=150),
    Case("schema-warm", text(33), sampled(3, SCHEMA), most=150),
    Case("schema-warm-5", text(5), sampled(5, SCHEMA, top_k=40, top_p=0.9), most=150),
    Case("object", text(9), sampled(4, Grammar.json_object()), most=30),
    Case("regex-greedy", text(16), greedy(DIGITS), most=30),
    Case("regex-warm", text(1), sampled(6, DIGITS, presence_penalty=1.0), most=30),
    Case("lark-warm", text(40), sampled(7, NESTED), most=40),
    Case("lark-cut", text(3), sampled(8, NESTED), most=2),
    Case("tops", text(12), sampled(9, DIGITS, top_logprobs=3), most=12),
    Case("free", text(20), warm(10)),
)


@pytest.fixture(scope="module")
def truth():
    return reference(LLAMA, CASES)


@pytest.fixture(scope="module")
def grammars():
    return Grammars(byte_tokenizer(), VOCAB, [EOS])


def said(heard):
    return byte_tokenizer().decode([token for token in heard.tokens if token != EOS])


def in_frames(engine, grammars):
    """An `after` that fails if a frame holds a guess its grammar forbids."""
    seen = []

    def look(engine, _):
        for span in engine._flight.spans if engine._flight is not None else ():
            grammar, guesses = span.sampling.grammar, span.inputs[span.given :]
            if grammar is not None and guesses:
                output = span.tokens[span.prompt_len :]
                walk = grammars.guide(grammar, span.sampling.stop_ids)
                assert [walk.take(token) for token in output] == [None] * len(output)
                assert walk.fits([], guesses) == len(guesses)
                seen.append(len(guesses))

    look.seen = seen
    return look


def test_every_answer_is_what_its_grammar_says(truth):
    texts = {case.name: said(heard) for case, heard in zip(CASES, truth, strict=True)}
    for name in ("schema-greedy", "schema-warm", "schema-warm-5"):
        person = json.loads(texts[name])
        assert list(person) == ["name", "age", "kind"]
        assert re.fullmatch("[a-z]{0,6}", person["name"])
        assert 0 <= person["age"] <= 120
        assert person["kind"] in ("cat", "cow", "dog")
    assert texts["object"].startswith("{")
    for name in ("regex-greedy", "regex-warm"):
        assert re.fullmatch("[0-9]{2,5}(,[0-9]{2,5}){0,3}", texts[name])
        assert truth[[case.name for case in CASES].index(name)].finish == "stop"
    assert {heard.finish for heard in truth} == {"stop", "length"}


def test_log_probabilities_are_the_models_own(truth):
    """They are those of the same text, said without being told to."""
    for case, heard in zip(CASES[:6], truth[:6], strict=True):
        whole = Case("scored", (*case.prompt, *heard.tokens), most=0, score_from=len(case.prompt))
        (scored,) = reference(LLAMA, [whole])
        assert scored.scores == heard.logprobs, case.name


# ---- who guesses


@pytest.mark.parametrize("proposer", [name for name in PROPOSERS if name != "cheap"])
def test_proposers_change_nothing(truth, grammars, proposer):
    engine = LLAMA.engine(PROPOSERS[proposer])
    look = in_frames(engine, grammars)
    assert play(engine, CASES, after=look) == truth
    if proposer in ("jitter", "decode", "model", "auto"):
        assert sum(look.seen) > 0, "no guess was ever replayed: the law would be empty"


def test_an_oracle_is_accepted_whole(truth):
    engine = LLAMA.engine(Script.of(CASES, truth).oracle)
    assert play(engine, CASES) == truth
    counts = engine.scheduler.counters
    assert counts.accepted == counts.guessed > 100


@pytest.mark.parametrize("place", [0, 2, 5])
def test_an_oracle_that_is_wrong_once(truth, grammars, place):
    engine = LLAMA.engine(Script.of(CASES, truth).wrong_once(place, 6))
    assert play(engine, CASES[:3], after=in_frames(engine, grammars)) == truth[:3]


def test_guesses_from_the_text_as_it_would_have_been(truth, grammars):
    """An oracle of the unconstrained text: most of it is forbidden, and none of that is replayed."""
    free = [replace(c, sampling=replace(c.sampling, grammar=None), most=40) for c in CASES]
    engine = LLAMA.engine(Script.of(free, reference(LLAMA, free)).oracle)
    assert play(engine, CASES, after=in_frames(engine, grammars)) == truth


def test_chained_frames(truth):
    for proposer in ("none", "auto"):
        assert play(LLAMA.engine(PROPOSERS[proposer], ahead=True), CASES) == truth


# ---- company, cuts and preemption


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_arrival_and_company(truth, seed):
    rng = random.Random(seed)
    others = company(5, most=30)
    cases = shuffled([*CASES, *others], seed)
    heard = play(LLAMA.engine(jitter), cases, arrivals=[rng.randrange(20) for _ in cases])
    by_name = {case.name: one for case, one in zip(cases, heard, strict=True)}
    assert [by_name[case.name] for case in CASES] == truth


@pytest.mark.parametrize("proposer", ["none", "jitter", "decode"])
def test_preemption(truth, proposer):
    engine = LLAMA.engine(PROPOSERS[proposer])
    assert play(engine, CASES, step=lambda e: preempting(e, 3, 0.1)) == truth
    assert engine.scheduler.counters.preempted > 3


def test_few_pages(truth):
    engine = LLAMA.engine(jitter, num_pages=14)
    assert play(engine, CASES) == truth
    assert engine.scheduler.counters.preempted > 0


def test_cut_by_company_and_found_in_the_cache(truth):
    others = company(13, most=40)
    engine = LLAMA.engine(num_pages=600)
    arrivals = [0] * len(others) + [3] * len(CASES)
    assert play(engine, [*others, *CASES], arrivals=arrivals)[len(others) :] == truth
    assert play(engine, CASES) == truth


def test_aborts_beside_it(truth):
    engine = LLAMA.engine(jitter)
    leaving = [replace(case, most=200).add(engine) for case in CASES[:4]]

    def leave(engine, clock):
        if clock % 3 == 0 and leaving:
            engine.abort(leaving.pop())

    assert play(engine, CASES, after=leave) == truth


# ---- those who opted out


@pytest.mark.parametrize("proposer", ["none", "decode", "auto"])
def test_unverified_answers_follow_their_grammar_too(proposer):
    cases = [replace(case, verify=False) for case in CASES]
    others = company(3)
    for heard, case in zip(play(LLAMA.engine(PROPOSERS[proposer]), [*cases, *others]), cases, strict=False):
        if case.name.startswith("schema"):
            assert heard.finish == "stop"
            assert json.loads(said(heard))["kind"] in ("cat", "cow", "dog")


# ---- other machines


@pytest.mark.gpu
def test_on_cuda():
    pytest.importorskip("llguidance")
    for setup in (Setup("llama", "cuda", "float32", 16), Setup("mistral", "cuda", "bfloat16", 128, True)):
        expected = reference(setup, CASES)
        for proposer in ("none", "jitter", "decode", "auto"):
            assert play(setup.engine(PROPOSERS[proposer]), [*CASES, *company(4)])[: len(CASES)] == expected
