"""Laws 1 to 3 with grammars: the mask of a row depends on the tokens before it and on nothing else."""

import json
import random
import re
from dataclasses import replace

import pytest
from law_helpers import (
    Case,
    KnownAnswers,
    Setup,
    other_requests,
    random_prompt,
    run_cases,
    run_reference,
    run_references,
    sampled,
)
from law_proposers import PROPOSERS, jitter

from samewise.testing import byte_tokenizer, preempting, shuffled
from samewise.text.grammar import Grammars
from samewise.types import Grammar, Sampling

pytest.importorskip("llguidance")

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


def greedy_within(grammar, **settings):
    return Sampling(stop_ids=ENDS, grammar=grammar, **settings)


def sampled_within(grammar, seed, **settings):
    return sampled(seed, stop_ids=ENDS, grammar=grammar, **settings)


CASES = (
    Case("schema-greedy", random_prompt(17), greedy_within(SCHEMA), max_tokens=150),
    Case("schema-sampled", random_prompt(33), sampled_within(SCHEMA, 3), max_tokens=150),
    Case("schema-filtered", random_prompt(5), sampled_within(SCHEMA, 5, top_k=40, top_p=0.9), max_tokens=150),
    Case("object", random_prompt(9), sampled_within(Grammar.json_object(), 4), max_tokens=30),
    Case("regex-greedy", random_prompt(16), greedy_within(DIGITS), max_tokens=30),
    Case("regex-sampled", random_prompt(1), sampled_within(DIGITS, 6, presence_penalty=1.0), max_tokens=30),
    Case("lark-sampled", random_prompt(40), sampled_within(NESTED, 7), max_tokens=40),
    Case("lark-cut", random_prompt(3), sampled_within(NESTED, 8), max_tokens=2),
    Case("top-logprobs", random_prompt(12), sampled_within(DIGITS, 9, top_logprobs=3), max_tokens=12),
    Case("free", random_prompt(20), sampled(10)),
)


@pytest.fixture(scope="module")
def references(one_thread):
    return run_references(LLAMA, CASES)


@pytest.fixture(scope="module")
def grammars():
    return Grammars(byte_tokenizer(), VOCAB, [EOS])


def text_of(output):
    return byte_tokenizer().decode([token for token in output.tokens if token != EOS])


class FrameCheck:
    """After every step: no draft token in the frame in flight is one its grammar forbids."""

    def __init__(self, grammars):
        self._grammars = grammars
        self.num_drafted = 0

    def __call__(self, engine, _):
        for span in engine._flight.spans if engine._flight is not None else ():
            grammar, draft = span.sampling.grammar, span.inputs[span.given :]
            if grammar is not None and draft:
                output = span.tokens[span.prompt_len :]
                guide = self._grammars.guide(grammar, span.sampling.stop_ids)
                assert [guide.take(token) for token in output] == [None] * len(output)
                paths = [()]  # the guesses up to each node of a tree, or of a chain
                for node, token in enumerate(draft):
                    parent = span.parents[node] if span.parents else node - 1
                    paths.append((*paths[parent + 1], token))
                    assert guide.fits([], paths[-1]) == len(paths[-1])
                self.num_drafted += len(draft)


def test_every_output_follows_its_grammar(references):
    texts = {case.name: text_of(output) for case, output in zip(CASES, references, strict=True)}
    for name in ("schema-greedy", "schema-sampled", "schema-filtered"):
        person = json.loads(texts[name])
        assert list(person) == ["name", "age", "kind"]
        assert re.fullmatch("[a-z]{0,6}", person["name"])
        assert 0 <= person["age"] <= 120
        assert person["kind"] in ("cat", "cow", "dog")
    assert texts["object"].startswith("{")
    for name in ("regex-greedy", "regex-sampled"):
        assert re.fullmatch("[0-9]{2,5}(,[0-9]{2,5}){0,3}", texts[name])
        assert references[[case.name for case in CASES].index(name)].finish == "stop"
    assert {output.finish for output in references} == {"stop", "length"}


def test_log_probabilities_are_those_before_masking(references):
    """They equal the scores of the same text without a grammar."""
    for case, output in zip(CASES[:6], references[:6], strict=True):
        prompt = (*case.prompt, *output.tokens)
        scored = run_reference(LLAMA, Case("scored", prompt, max_tokens=0, score_from=len(case.prompt)))
        assert scored.scores == output.logprobs, case.name


# -- proposers ----------------------------------------------------------------------------------------


CORE_PROPOSERS = ("none", "jitter", "decode", "skip", "bushy", "auto")


@pytest.mark.parametrize(
    "proposer",
    [
        pytest.param(name, marks=[] if name in CORE_PROPOSERS else [pytest.mark.slow])
        for name in PROPOSERS
        if name != "decode-int4"
    ],
)
def test_output_is_the_same_under_every_proposer(references, grammars, proposer):
    check = FrameCheck(grammars)
    assert run_cases(LLAMA.engine(PROPOSERS[proposer]), CASES, after=check) == references
    if proposer in ("jitter", "decode", "model", "auto"):
        assert check.num_drafted > 0  # otherwise the law would hold trivially


def test_a_perfect_draft_is_fully_accepted(references):
    engine = LLAMA.engine(KnownAnswers.of(CASES, references).oracle)
    assert run_cases(engine, CASES) == references
    counters = engine.scheduler.counters
    assert counters.accepted == counters.guessed > 100


@pytest.mark.parametrize("place", [0, 2, 5])
def test_one_wrong_draft_token_changes_nothing(references, grammars, place):
    engine = LLAMA.engine(KnownAnswers.of(CASES, references).wrong_once(place, 6))
    assert run_cases(engine, CASES[:3], after=FrameCheck(grammars)) == references[:3]


def test_draft_tokens_that_the_grammar_forbids_are_not_verified(references, grammars):
    """The drafts are the text without a grammar, most of which is forbidden."""
    free = [
        replace(case, sampling=replace(case.sampling, grammar=None), max_tokens=40) for case in CASES
    ]  # fmt: skip
    engine = LLAMA.engine(KnownAnswers.of(free, run_references(LLAMA, free)).oracle)
    assert run_cases(engine, CASES, after=FrameCheck(grammars)) == references


@pytest.mark.parametrize("proposer", ["none", "auto"])
def test_frames_launched_ahead_change_nothing(references, proposer):
    assert run_cases(LLAMA.engine(PROPOSERS[proposer], ahead=True), CASES) == references


# -- load, cuts and preemption ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_order_arrival_and_other_requests_change_nothing(references, seed):
    rng = random.Random(seed)
    cases = shuffled([*CASES, *other_requests(5, max_tokens=30)], seed)
    outputs = run_cases(LLAMA.engine(jitter), cases, arrivals=[rng.randrange(20) for _ in cases])
    by_name = {case.name: output for case, output in zip(cases, outputs, strict=True)}
    assert [by_name[case.name] for case in CASES] == references


@pytest.mark.parametrize("proposer", ["none", "jitter", "decode"])
def test_random_preemption_changes_nothing(references, proposer):
    engine = LLAMA.engine(PROPOSERS[proposer])
    assert run_cases(engine, CASES, step=lambda e: preempting(e, 3, 0.1)) == references
    assert engine.scheduler.counters.preempted > 3


def test_too_few_pages_change_nothing(references):
    engine = LLAMA.engine(jitter, num_pages=14)
    assert run_cases(engine, CASES) == references
    assert engine.scheduler.counters.preempted > 0


def test_small_chunks_and_a_warm_prefix_cache_change_nothing(references):
    others = other_requests(13, max_tokens=40)
    engine = LLAMA.engine(num_pages=600)
    arrivals = [0] * len(others) + [3] * len(CASES)
    assert run_cases(engine, [*others, *CASES], arrivals=arrivals)[len(others) :] == references
    assert run_cases(engine, CASES) == references


def test_aborts_of_other_requests_change_nothing(references):
    engine = LLAMA.engine(jitter)
    others = [replace(case, max_tokens=200).add(engine) for case in CASES[:4]]

    def abort_one(engine, step_index):
        if step_index % 3 == 0 and others:
            engine.abort(others.pop())

    assert run_cases(engine, CASES, after=abort_one) == references


@pytest.mark.parametrize("proposer", ["none", "decode", "auto"])
def test_unverified_output_follows_its_grammar_too(one_thread, proposer):
    cases = [replace(case, verify=False) for case in CASES]
    outputs = run_cases(LLAMA.engine(PROPOSERS[proposer]), [*cases, *other_requests(3)])
    for output, case in zip(outputs, cases, strict=False):
        if case.name.startswith("schema"):
            assert output.finish == "stop"
            assert json.loads(text_of(output))["kind"] in ("cat", "cow", "dog")


# -- where llguidance gives up ------------------------------------------------------------------------


LONG = Grammar.regex("(a{0,1000}){0,1000}")  # llguidance gives up on it after some hundred letters


@pytest.fixture(scope="module")
def given_up(one_thread):
    cases = [
        Case(f"long-{i}", random_prompt(9, i), sampled_within(LONG, i, min_tokens=290), 290) for i in range(3)
    ]
    outputs = run_references(LLAMA, cases)
    assert {output.finish for output in outputs} == {"abort"}
    assert {len(output.tokens) for output in outputs} <= set(range(65, 290))
    return cases, outputs


@pytest.mark.parametrize("proposer", ["none", "jitter", "oracle"])
def test_where_an_answer_ends_does_not_depend_on_the_load_or_on_guesses(given_up, proposer):
    cases, expected = given_up
    known = KnownAnswers({case.prompt: 300 * expected[0].tokens[:1] for case in cases})
    engine = LLAMA.engine(known.oracle if proposer == "oracle" else PROPOSERS[proposer])
    assert run_cases(engine, cases[:1]) == expected[:1]
    assert run_cases(engine, cases, arrivals=[0, 40, 75]) == expected
    assert run_cases(engine, cases[::-1]) == expected[::-1]


def test_where_an_answer_ends_does_not_depend_on_preemption(given_up):
    cases, expected = given_up
    engine = LLAMA.engine(PROPOSERS["ngram"])
    assert run_cases(engine, cases, step=lambda e: preempting(e, 3, 0.05)) == expected
    assert engine.scheduler.counters.preempted > 3


# -- CUDA ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "setup",
    [Setup("llama", "cuda", "float32", 16), Setup("mistral", "cuda", "bfloat16", 128, True)],
    ids=str,
)
def test_output_is_the_same_under_proposers_on_cuda(setup):
    expected = run_references(setup, CASES)
    for proposer in ("none", "jitter", "decode", "auto"):
        engine = setup.engine(PROPOSERS[proposer])
        assert run_cases(engine, [*CASES, *other_requests(4)])[: len(CASES)] == expected
