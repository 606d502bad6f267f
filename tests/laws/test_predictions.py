"""Law 1 with predictions: whatever the caller expects, the output is the same bits."""

import random

import pytest

from samewise import LLM, SamplingParams
from samewise.draft.build import make_tree_drafter
from samewise.draft.tree import Limit, RowPrices
from samewise.draft.tree_drafter import Committed, Sources, TreeDrafter
from samewise.draft.tuning import SuffixTuning, TreeTuning, Tuning
from samewise.testing import tiny_engine

PROMPTS = ("The quick brown fox jumps over the lazy dog", "abababab", "x")
PARAMS = (
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=40, frequency_penalty=0.2),
)


def bits(llm, params):
    outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    return [(o.outputs[0].token_ids, [v.hex() for v in o.outputs[0].token_logprobs]) for o in outputs]


def predictions_for(tokens):
    """Right, wrong and partly right guesses of an answer, as token ids or text; none, and far too many."""
    rng = random.Random(0)
    noise = [rng.randrange(256) for _ in range(40)]
    changed = [token if i % 7 else token ^ 1 for i, token in enumerate(tokens)]
    return {
        "right": tokens,
        "wrong": noise,
        "changed": changed,
        "inserted": [*tokens[:9], *noise[:5], *tokens[9:]],
        "left out": [*tokens[:5], *tokens[14:]],
        "late": [*noise, *tokens],
        "empty": [],
        "text": "the lazy dog jumps over",
        "huge": (noise + tokens) * 200,
        "one token": tokens[:1],
    }


@pytest.mark.parametrize("proposer", ["none", "ngram", "recycle", "auto"])
def test_output_is_the_same_with_any_prediction(proposer):
    llm = LLM.over(tiny_engine(eos=True, max_model_len=256, proposer=proposer))
    reference = LLM.over(tiny_engine(eos=True, max_model_len=256, proposer="none"))
    for params in PARAMS:
        expected = bits(reference, params)
        for name, prediction in predictions_for(expected[0][0]).items():
            assert bits(llm, params.clone(prediction=prediction)) == expected, name


@pytest.mark.parametrize("make", [make_tree_drafter, TreeDrafter])
def test_tokens_that_the_model_does_not_have_never_reach_a_frame(make):
    """A drafter cuts a prediction there, on every way it comes."""
    drafter, prices = make(100), RowPrices.free(1, 64)
    for predicted in ([5, 6, 100, 7, 8], [5, 6, -1, 7, 8], [5, 6, 2**31 - 1, 7], [99, 100], [100]):
        drafter.begin(0, [1, 2, 3], None, predicted)
        (tree,), _ = drafter.grow([Limit(0, 64, 16)], prices)
        assert all(0 <= token < 100 for token in tree.tokens)
        assert predicted[0] in tree.tokens or predicted[0] >= 100
        assert 7 not in tree.tokens


@pytest.mark.parametrize("proposer", ["ngram", "auto"])
def test_a_predicted_text_may_hold_tokens_that_the_model_does_not_have(proposer):
    """Its tokenizer knows `<pad>`, 258; the model has 258 tokens."""
    answers = []
    for name, predicted in (("none", None), (proposer, "ab<pad>cd<pad>"), (proposer, "<pad>" * 9)):
        sizes = {"vocab_size": 258, "pad_token_id": 0}
        engine = tiny_engine(max_model_len=256, proposer=name, overrides=sizes)
        params = PARAMS[0].clone(prediction=predicted, allowed_token_ids=[97, 98])
        answers.append(bits(LLM.over(engine), params))
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("proposer", ["ngram", "auto"])
@pytest.mark.parametrize("ahead", [False, True])
def test_output_is_the_same_while_texts_are_indexed_in_pieces(proposer, ahead):
    """Twelve tokens a step: answers begin before their prompts and predictions are indexed."""
    expected = bits(LLM.over(tiny_engine(max_model_len=256, proposer="none")), PARAMS[0])
    tuning = Tuning(trees=TreeTuning(suffixes=SuffixTuning(tokens_per_step=12)))
    engine = tiny_engine(max_model_len=256, proposer=proposer, tuning=tuning, ahead=ahead)
    prediction = expected[0][0][:30]
    assert bits(LLM.over(engine), PARAMS[0].clone(prediction=prediction)) == expected
    assert sum(drafter.accepted for drafter in engine.scheduler.counters.drafters.values()) > 0


def test_usage_of_a_prediction_does_not_depend_on_proposer_or_load():
    counts = []
    for proposer, load in (("none", 1), ("ngram", 1), ("auto", 4)):
        llm = LLM.over(tiny_engine(eos=True, max_model_len=256, proposer=proposer))
        params = PARAMS[0].clone(prediction="the lazy dog abababab" * 3)
        outputs = llm.generate([PROMPTS[1]] * load, params, use_tqdm=False)
        counts += [
            (o.outputs[0].accepted_prediction_tokens, o.outputs[0].rejected_prediction_tokens)
            for o in outputs
        ]
    assert len(set(counts)) == 1


@pytest.mark.parametrize("make", [make_tree_drafter, TreeDrafter])
def test_a_prediction_serves_no_other_request(make):
    """Texts are kept for later requests of the same salt; predictions are not."""
    drafter = make(1000, Sources.SUFFIXES)
    prices = RowPrices.free(1, 16)
    prediction, answer = list(range(500, 540)), list(range(600, 640))
    drafter.begin(1, [1, 2, 3], b"", prediction)
    (own,), _ = drafter.grow([Limit(1, 16, 16)], prices)
    assert set(own.tokens) & set(prediction), "it serves its own request"
    drafter.commit([Committed(1, tuple(answer))])
    drafter.begin(2, [1, 2, 3, *prediction[:5]], b"")
    drafter.forget(1)
    drafter.begin(3, [1, 2, 3, *prediction[:5]], b"")
    for seq_id in (2, 3):
        (tree,), _ = drafter.grow([Limit(seq_id, 16, 16)], prices)
        assert not set(tree.tokens) & set(prediction[5:])
    drafter.begin(4, [1, 2, 3, *answer[:5]], b"")
    (tree,), _ = drafter.grow([Limit(4, 16, 16)], prices)
    assert answer[5] in tree.tokens, "the answer itself is kept"
