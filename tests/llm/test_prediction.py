"""What became of a prediction: a function of prediction and answer alone."""

import random

import pytest
from llm_cases import PROMPT, encode, generate, greedy

from samewise import LLM, SamplingParams
from samewise.errors import BadParameter
from samewise.llm.prediction import Prediction, PredictionFollower, prediction_usage
from samewise.testing import tiny_engine


@pytest.mark.parametrize(
    ("prediction", "answer", "accepted", "rejected"),
    [
        ("", "abc", 0, 0),
        ("abc", "", 0, 3),
        ("abc", "abc", 3, 0),
        ("abcdef", "abc", 3, 3),
        ("abc", "abcdef", 3, 0),
        ("xyz", "abc", 0, 3),
        ("abcXdefg", "abcYdefg", 5, 1),  # `de` brings it back: f and g are guessed
        ("abcdefgh", "abgh", 2, 4),  # g and h appear, but were not guessed
        ("abcdefgh", "cdefgh", 4, 2),
        ("abcdabef", "abef", 3, 3),  # `be` is found further on; of `cda` nothing appears
        ("abcd", "abcdXabcd", 6, 0),  # back to an earlier place where there is no later one
    ],
)
def test_accepted_tokens_are_those_that_following_the_prediction_guesses(
    prediction: str, answer: str, accepted: int, rejected: int
) -> None:
    assert prediction_usage(prediction.encode(), answer.encode()) == (accepted, rejected)


def test_a_later_place_is_preferred_to_an_earlier_one() -> None:
    prediction = b"ab1_cd_ab2_ef_ab3"
    assert prediction_usage(prediction, b"ab1_cd!ab2").accepted == 6 + 1


def test_counts_do_not_depend_on_how_the_answer_is_cut() -> None:
    rng = random.Random(0)
    for _ in range(200):
        prediction = [rng.randrange(4) for _ in range(rng.randrange(30))]
        answer = [rng.randrange(4) for _ in range(rng.randrange(30))]
        follower, at = PredictionFollower(Prediction(prediction)), 0
        while at < len(answer):
            num = rng.randrange(1, 6)
            follower.add(answer[at : at + num])
            at += num
        counts = follower.accepted, follower.rejected
        assert counts == prediction_usage(prediction, answer)
        assert counts[0] <= len(answer)
        assert 0 <= counts[1] <= len(prediction)


def test_outputs_and_chunks_count_the_prediction(llm: LLM) -> None:
    plain = generate(llm, PROMPT, greedy(ignore_eos=True, max_tokens=12))[0].outputs[0]
    assert (plain.accepted_prediction_tokens, plain.rejected_prediction_tokens) == (0, 0)
    guess = [*plain.token_ids[:6], 5, 6, *plain.token_ids[6:], 7]
    params = greedy(ignore_eos=True, max_tokens=12, prediction=guess)
    output = generate(llm, PROMPT, params)[0].outputs[0]
    assert output.token_ids == plain.token_ids
    expected = prediction_usage(guess, plain.token_ids)
    assert expected.accepted >= 6
    assert (output.accepted_prediction_tokens, output.rejected_prediction_tokens) == expected
    chunks = list(llm.stream(PROMPT, params))
    assert sum(chunk.accepted_prediction_tokens for chunk in chunks) == expected.accepted
    assert sum(chunk.rejected_prediction_tokens for chunk in chunks) == expected.rejected


def test_a_text_is_read_without_special_tokens_and_cut_to_the_context(llm: LLM) -> None:
    intake = llm._loop.intake
    checked = intake.check(PROMPT, greedy(prediction="ab"))
    assert checked.prediction.tokens == tuple(encode("ab"))
    assert checked.request(1, 0, salt=b"", leader=None).prediction == checked.prediction.tokens
    longest = llm.engine.scheduler.limits.longest
    assert len(intake.check(PROMPT, greedy(prediction="ab" * 10**6)).prediction) == longest
    assert len(intake.check(PROMPT, greedy(prediction=[1] * 10**5)).prediction) == longest
    for empty in (None, "", []):
        assert intake.check(PROMPT, greedy(prediction=empty)).prediction.tokens == ()


def test_a_text_is_cut_at_the_first_token_that_the_model_does_not_have() -> None:
    """The tokenizer's last token is 258, as where padding or image tokens were added to it."""
    llm = LLM.over(tiny_engine(max_model_len=64, overrides={"vocab_size": 258, "pad_token_id": 0}))
    checked = llm._loop.intake.check(PROMPT, greedy(prediction="ab<pad>cd"))
    assert checked.prediction.tokens == tuple(encode("ab"))
    assert llm._loop.intake.check(PROMPT, greedy(prediction="<pad>ab")).prediction.tokens == ()


def test_a_long_prediction_is_indexed_before_the_engine_gets_it(llm: LLM) -> None:
    """`Answer.add_choice` runs in the engine's thread: it must not take time in proportion to the text."""
    checked = llm._loop.intake.check(PROMPT, greedy(prediction="ab" * 200))
    followers = [PredictionFollower(checked.prediction) for _ in range(2)]
    assert followers[0]._prediction is followers[1]._prediction is checked.prediction


def test_what_is_no_prediction_is_refused(llm: LLM) -> None:
    for wrong in (5, b"a", {"content": "a"}, ["a"], [-1], [1.5]):
        with pytest.raises(BadParameter, match="give text or") as caught:
            SamplingParams(prediction=wrong)  # type: ignore[arg-type]
        assert caught.value.param == "prediction"
    with pytest.raises(BadParameter, match="ask for n=1") as caught:
        SamplingParams(prediction="a", n=2)
    assert caught.value.param == "n"
    for wrong, message in (([10**6], "prediction holds 1000000"), ("\ud800", "valid Unicode")):
        with pytest.raises(BadParameter, match=message) as caught:
            generate(llm, PROMPT, greedy(prediction=wrong))
        assert caught.value.param == "prediction"


def test_receipts_do_not_depend_on_the_prediction(llm: LLM) -> None:
    plain = greedy(ignore_eos=True)
    predicted = plain.clone(prediction="something else")
    receipts = [
        llm.receipts(generate(llm, PROMPT, params)[0], params)[0].dumps() for params in (plain, predicted)
    ]
    assert receipts[0] == receipts[1]
    assert "prediction" not in receipts[0]
