"""Answer: deltas become text, outputs and chunks, without an engine."""

from typing import Any

import pytest
from llm_cases import encode, greedy

from samewise.llm import answer as answer_module
from samewise.llm.answer import Answer, Update
from samewise.llm.intake import CheckedRequest
from samewise.testing import byte_tokenizer
from samewise.text.detokenize import TextStream
from samewise.types import Delta, Finish, Sampling

PROMPT_IDS = encode("hello")
EOS = 257


def make_answer(*, streamed: bool, n: int = 1, **params: Any) -> Answer:
    """An answer with n choices to a request with these parameters; the clock counts its calls."""
    checked = CheckedRequest("hello", PROMPT_IDS, greedy(n=n, **params), 8, Sampling(seed=3))
    calls = iter(range(1000))
    stops, include = checked.params.stops, checked.params.include_stop_str_in_output
    answer = Answer(
        checked,
        "7",
        weights=("sw-test", 0),
        decode_token=lambda token: f"<{token}>",
        new_stream=lambda: TextStream(byte_tokenizer(), PROMPT_IDS, stops=stops, include_stop=include),
        clock=lambda: float(next(calls)),
        streamed=streamed,
    )
    for index in range(n):
        answer.add_choice(index, 10 + index)
    return answer


def text_delta(text: str, finish: Finish | None = None, **fields: Any) -> Delta:
    """A delta of one token per character; token i has the log-probability -i/8."""
    tokens = tuple(encode(text))
    logprobs = tuple(-i / 8 for i in range(len(tokens)))
    return Delta(10, tokens, logprobs, ((),) * len(tokens), finish, **fields)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abXY")])
def test_a_stop_string_in_the_middle_ends_the_choice_and_drops_later_tokens(include: bool, text: str) -> None:
    answer = make_answer(streamed=True, stop="XY", include_stop_str_in_output=include)
    (choice,) = answer.choices
    assert answer.add(choice, text_delta("abXYcd")) == Update(changed=True, stop=True)
    (output,) = answer.output().outputs
    assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", "XY")
    assert output.token_ids == encode("abXY")
    assert output.token_logprobs == [0.0, -0.125, -0.25, -0.375]
    (chunk,) = answer.pending
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == (text, encode("abXY"), "stop")
    assert answer.finished


def test_a_delta_after_the_end_changes_nothing() -> None:
    answer = make_answer(streamed=True, stop="b")
    (choice,) = answer.choices
    answer.add(choice, text_delta("ab"))
    before = answer.output()
    assert answer.add(choice, text_delta("cd")) == Update(changed=False)
    assert answer.output() == before
    assert len(answer.pending) == 1


def test_a_delta_without_tokens_or_text_changes_nothing() -> None:
    answer = make_answer(streamed=True)
    assert answer.add(answer.choices[0], text_delta("", num_cached=16)) == Update(changed=False)
    assert not answer.pending
    assert answer.output().num_cached_tokens == 16


def test_chunks_are_built_only_for_streamed_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = []

    class CountedChunk(answer_module.Chunk):
        def __init__(self, *fields: Any) -> None:
            super().__init__(*fields)
            chunks.append(self)

    monkeypatch.setattr(answer_module, "Chunk", CountedChunk)
    for streamed in (False, True):
        answer = make_answer(streamed=streamed)
        for delta in (text_delta("ab"), text_delta("c", Finish.LENGTH)):
            assert answer.add(answer.choices[0], delta).changed
        assert answer.output().outputs[0].text == "abc"
        assert list(answer.pending) == chunks
        assert len(chunks) == 2 * streamed


def test_the_chunks_of_every_choice_add_up_to_the_output() -> None:
    answer = make_answer(streamed=True, n=2, logprobs=1, stop="never")
    tops = (((65, -0.5),),)
    for text in ("n", "e", "é"):  # "ne" is held back as the start of a stop string, "é" has two bytes
        for choice in answer.choices:
            delta = text_delta(text)
            num = len(delta.tokens)
            answer.add(choice, delta._replace(tops=tops * num, ranks=(3,) * num))
    for choice in answer.choices:
        answer.add(choice, Delta(choice.engine_id, (EOS,), (-1.0,), tops, Finish.STOP, EOS, ranks=(2,)))
    output = answer.output()
    assert output.finished
    for completion in output.outputs:
        chunks = [chunk for chunk in answer.pending if chunk.index == completion.index]
        assert "".join(chunk.text for chunk in chunks) == completion.text == "neé"
        assert [t for chunk in chunks for t in chunk.token_ids] == completion.token_ids
        assert [v for chunk in chunks for v in chunk.token_logprobs] == completion.token_logprobs
        assert [d for chunk in chunks for d in chunk.logprobs or ()] == completion.logprobs
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert {chunk.seed for chunk in chunks} == {completion.seed} == {3}


def test_log_probabilities_list_the_chosen_token_first_and_each_token_once() -> None:
    answer = make_answer(streamed=False, logprobs=2)
    top = ((66, -0.25), (65, -0.5))
    answer.add(answer.choices[0], Delta(10, (65, 67), (-0.5, -2.0), (top, top), None, ranks=(2, 9)))
    first, second = answer.output().outputs[0].logprobs or []
    assert [(token, entry.logprob, entry.rank) for token, entry in first.items()] == [
        (65, -0.5, 2),
        (66, -0.25, 1),
    ]
    assert list(second) == [67, 66, 65]
    assert (second[67].rank, second[67].decoded_token) == (9, "<67>")


def test_tokens_that_the_request_names_have_no_rank_but_for_the_chosen_one() -> None:
    answer = make_answer(streamed=False, logprob_token_ids=[66, 65])
    top = ((66, -0.25), (65, -0.5))
    answer.add(answer.choices[0], Delta(10, (65,), (-0.5,), (top,), None, ranks=(7,)))
    (entry,) = answer.output().outputs[0].logprobs or []
    assert {token: (one.logprob, one.rank) for token, one in entry.items()} == {
        65: (-0.5, 7),
        66: (-0.25, None),
    }


def test_log_probabilities_hold_no_text_where_none_is_wanted() -> None:
    answer = make_answer(streamed=True, logprobs=1, prompt_logprobs=0, detokenize=False)
    num = len(PROMPT_IDS) - 1
    delta = Delta(10, (65,), (-0.5,), (((66, -0.25),),), Finish.LENGTH, ranks=(2,), scores=(-1.0,) * num,
                  score_tops=((),) * num, score_ranks=(1,) * num)  # fmt: skip
    answer.add(answer.choices[0], delta)
    output = answer.output()
    (chunk,) = answer.pending
    positions = [
        *(output.outputs[0].logprobs or []),
        *(chunk.logprobs or []),
        *(output.prompt_logprobs or []),
    ]
    assert len(positions) == 2 + len(PROMPT_IDS)
    assert {one.decoded_token for entry in positions if entry for one in entry.values()} == {None}


def test_guesses_and_frames_are_summed_over_choices_and_by_proposer() -> None:
    answer = make_answer(streamed=False, n=2)
    one, two = answer.choices
    answer.add(one, text_delta("ab", guessed=4, accepted=1, drafter="ngram", frames=1))
    answer.add(two, text_delta("c", guessed=2, accepted=2, drafter="ngram", frames=1))
    answer.add(two, text_delta("d", guessed=3, accepted=0, drafter="decode", frames=1))
    metrics = answer.output().metrics
    assert (metrics.num_output_tokens, metrics.num_frames) == (4, 3)
    assert (metrics.num_guessed_tokens, metrics.num_accepted_tokens) == (9, 3)
    assert metrics.drafters == {"decode": (3, 0), "ngram": (6, 3)}


def test_abort_ends_the_choices_that_are_still_running() -> None:
    answer = make_answer(streamed=False, n=2)
    answer.add(answer.choices[0], text_delta("a", Finish.LENGTH))
    assert not answer.finished
    assert answer.abort() == [11]
    assert answer.finished
    assert [completion.finish_reason for completion in answer.output().outputs] == ["length", "abort"]
    assert answer.abort() == []
