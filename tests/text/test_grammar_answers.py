"""Generation under a grammar: the sampler with a mask, and the answers of an engine."""

import json
import random

import pytest
import torch

from samewise import LLM, SamplingParams
from samewise.engine import Engine
from samewise.errors import BadParameter
from samewise.execute.sampling import Sampler
from samewise.execute.sampling_rows import SamplingRow
from samewise.testing import byte_tokenizer, run, tiny_engine
from samewise.text.grammar import version
from samewise.types import Grammar, Sampling

EOS = 257
TOKENIZER = byte_tokenizer()
SCHEMA = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": ["x", "xy"]}}},
        "required": ["a"],
    }
)


def ids(text):
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(eos=True, proposer="none")


@pytest.fixture(scope="module")
def llm(engine):
    return LLM.over(engine)


def generate(llm, grammar, **params):
    settings = {"temperature": 0.8, "seed": 5, "max_tokens": 40, "grammar": grammar} | params
    return llm.generate("go", SamplingParams(**settings), use_tqdm=False)[0].outputs[0]


# ---- refusal


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.json_schema({"type": "foo"}), "Invalid type: foo"),
        (Grammar.json_schema({"not": {"type": "string"}}), "not"),
        (Grammar.json_schema({"type": "string", "minLength": 3, "maxLength": 1}), "minLength"),
        (Grammar.json_schema({"type": "string", "format": "weird"}), "weird"),
        (Grammar.json_schema({"type": "object", "x-guidance": {"lenient": True}}), "x-guidance"),
        (Grammar.json_schema({"$ref": "http://elsewhere/schema.json"}), "elsewhere"),
        (Grammar.regex("[a"), "unclosed"),
        (Grammar.regex("()"), "only the empty text"),
        (Grammar.lark("start: nowhere"), "nowhere"),
        (Grammar.lark("start: <|no_such_token|>"), "no_such_token"),
    ],
)
def test_grammar_that_cannot_be_compiled_is_refused_with_the_request(llm, grammar, message):
    with pytest.raises(BadParameter, match=message):
        generate(llm, grammar)
    assert llm.engine.idle


def test_contract_names_the_grammar_library(engine):
    assert dict(engine.contract.facts)["grammar"] == version()
    assert version().startswith("llguidance ")


# ---- sampler


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from Triton's interpreter
@pytest.mark.parametrize("vocab", [20, 33, 320])
def test_masked_row_gets_the_best_allowed_token(vocab):
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1)) * 3
    logits[2, :] = -torch.inf
    rng = random.Random(vocab)
    by_row, by_block = (Sampler(vocab, torch.device("cpu"), by_row=value) for value in (True, False))
    for temperature in (0.0, 0.7):
        for row in range(4):
            allowed = sorted(rng.sample(range(vocab), 3))
            mask = sum(1 << token for token in allowed).to_bytes(-(-vocab // 8), "little")
            sampling = Sampling(temperature=temperature, grammar=Grammar.regex("a"), top_p=0.9)
            sampled = SamplingRow(row, sampling, (), (), 5, mask)
            picked, other = (sampler.sample(logits, [sampled]) for sampler in (by_row, by_block))
            assert picked.tokens.tolist() == other.tokens.tolist()
            assert int(picked.tokens[row]) in allowed
            if temperature == 0.0:
                assert int(picked.tokens[row]) == max(allowed, key=lambda token: float(logits[row, token]))
            others = [r for r in range(4) if r != row]
            assert picked.tokens[others].tolist() == logits[others].argmax(-1).tolist()
            # Masks narrower or wider than the logits.
            for odd in (mask.rstrip(b"\0"), mask + b"\xff"):
                again = by_row.sample(logits, [sampled._replace(mask=odd)])
                assert torch.equal(again.tokens, picked.tokens)


def test_grammar_takes_precedence_over_bad_words_and_min_tokens():
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    grammar = Grammar.regex("a")
    for by_row in (True, False):
        sampler = Sampler(4, torch.device("cpu"), by_row=by_row)
        limits = {"bad_words": ((0,), (1,)), "stop_ids": frozenset({2}), "min_tokens": 3}
        for mask, expected in ((0b1111, 3), (0b0111, 2), (0b0011, 0), (0b0100, 2)):
            sampled = SamplingRow(0, Sampling(grammar=grammar, **limits), (), (), 5, bytes([mask]))
            assert sampler.sample(logits, [sampled]).tokens.tolist() == [expected]


# ---- answers


def test_answer_ends_where_its_grammar_ends(llm):
    output = generate(llm, Grammar.regex("(yes|no)!"))
    assert output.text in ("yes!", "no!")
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert len(output.token_ids) == len(output.text), "the forced end-of-text is not generated"


def test_answer_may_end_where_its_grammar_accepts(llm):
    outputs = [generate(llm, Grammar.regex("[a-z]{1,39}"), seed=seed) for seed in range(6)]
    assert all(one.finish_reason == "stop" and one.text.isalpha() for one in outputs)
    assert any(one.token_ids[-1] == EOS for one in outputs)


def test_ignored_end_of_text_is_not_generated(llm):
    output = generate(llm, Grammar.regex("[a-z]+"), ignore_eos=True, max_tokens=30)
    assert (len(output.text), output.finish_reason) == (30, "length")
    assert generate(llm, Grammar.regex("[a-z]{7}"), ignore_eos=True).finish_reason == "stop"


@pytest.mark.parametrize("min_tokens", [0, 4, 12])
def test_min_tokens_applies_up_to_the_end_of_the_grammar(llm, min_tokens):
    output = generate(llm, Grammar.regex("[a-z]{1,8}"), min_tokens=min_tokens, seed=1)
    assert len(output.text) >= min(min_tokens, 8)
    assert output.finish_reason == "stop"


def test_max_tokens_cuts_the_answer(llm):
    output = generate(llm, Grammar.json_object(), max_tokens=3)
    assert (len(output.token_ids), output.finish_reason) == (3, "length")


def test_stop_strings_and_stop_token_ids_end_the_answer(llm):
    output = generate(llm, Grammar.regex("a{5}b{5}c{5}"), stop="bb")
    assert (output.text, output.finish_reason, output.stop_reason) == ("aaaaa", "stop", "bb")
    (b,) = ids("b")
    output = generate(llm, Grammar.regex("a{5}b{5}c{5}"), stop_token_ids=[b])
    assert (output.text, output.finish_reason, output.stop_reason) == ("aaaaa", "stop", b)


def test_penalties_and_bias_apply_within_the_grammar(llm):
    (c,) = ids("c")
    output = generate(llm, Grammar.regex("[abc]{12}"), logit_bias={c: 100}, temperature=0)
    assert output.text == "c" * 12
    output = generate(llm, Grammar.regex("[abc]{12}"), frequency_penalty=2.0, presence_penalty=2.0)
    assert set(output.text) == set("abc")


def test_n_choices_differ_under_a_grammar(llm):
    params = SamplingParams(n=4, temperature=1.5, seed=1, max_tokens=30, grammar=Grammar.regex("[a-z]{20}"))
    texts = [one.text for one in llm.generate("go", params, use_tqdm=False)[0].outputs]
    assert len(set(texts)) == 4
    assert all(len(text) == 20 for text in texts)


@pytest.mark.parametrize("verify", [True, False])
def test_streamed_answer_equals_the_generated_one(llm, verify):
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=60, grammar=SCHEMA, verify=verify)
    (output,) = llm.generate("go", params, use_tqdm=False)
    chunks = list(llm.stream("go", params))
    assert "".join(chunk.text for chunk in chunks) == output.outputs[0].text
    if output.outputs[0].finish_reason == "stop":
        json.loads(output.outputs[0].text)


def test_grammar_works_without_an_end_of_text_token():
    output = run(tiny_engine(proposer="none"), [([1, 2], Sampling(grammar=Grammar.regex("[a-z]{4}")), 20)])
    assert (len(output[0].tokens), output[0].finish) == (4, "stop")
