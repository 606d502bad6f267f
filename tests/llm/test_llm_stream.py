"""LLM.stream: chunks add up to the output, and calls during a stream lose nothing."""

from typing import Any

from llm_cases import PROMPT, assert_idle, bits, generate, greedy, greedy_letters

from samewise import LLM
from samewise.testing import Scripted, tiny_engine


def test_the_chunks_of_a_stream_add_up_to_the_output(llm: LLM) -> None:
    params = greedy_letters(stop="never", logprobs=2, max_tokens=20)
    (output,) = generate(llm, PROMPT, params)
    chunks = list(llm.stream(PROMPT, params))
    assert "".join(chunk.text for chunk in chunks) == output.outputs[0].text
    assert [token for chunk in chunks for token in chunk.token_ids] == output.outputs[0].token_ids
    assert [v for chunk in chunks for v in chunk.token_logprobs] == output.outputs[0].token_logprobs
    assert [d for chunk in chunks for d in chunk.logprobs or ()] == output.outputs[0].logprobs
    assert [chunk.finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])


def test_a_stream_left_early_is_aborted(llm: LLM) -> None:
    for chunk in llm.stream(PROMPT, greedy(max_tokens=100)):
        assert chunk.token_ids
        break
    assert_idle(llm)


def test_two_interleaved_streams_lose_no_token(shared_llm: LLM) -> None:
    params = greedy(max_tokens=12, ignore_eos=True)
    expected = [bits(generate(shared_llm, p, params))[0][0] for p in ("one", "two")]
    tokens: list[list[int]] = [[], []]
    streams = [shared_llm.stream("one", params), shared_llm.stream("two", params)]
    unfinished = [0, 1]
    while unfinished:
        for i in list(unfinished):
            chunk = next(streams[i], None)
            if chunk is None:
                unfinished.remove(i)
            else:
                tokens[i] += chunk.token_ids
    assert tokens == expected


def test_generating_during_a_stream_loses_no_token(shared_llm: LLM, reference_bits: list[Any]) -> None:
    params = greedy(max_tokens=12, ignore_eos=True)
    expected = bits(generate(shared_llm, "one", params))[0][0]
    stream = shared_llm.stream("one", params)
    tokens = list(next(stream).token_ids)
    assert bits(generate(shared_llm, PROMPT)) == reference_bits
    tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tokens == expected


def test_scoring_during_a_stream_neither_blocks_it_nor_loses_a_token() -> None:
    steps_left = [300]

    def no_guesses(_: object) -> list[int]:
        return []

    class Watchdog(Scripted):
        def propose(self, asks: list[Any]) -> list[Any]:
            steps_left[0] -= 1
            if steps_left[0] < 0:
                raise TimeoutError("the stream does not end")
            return super().propose(asks)

    llm = LLM.over(tiny_engine(make_proposer=lambda _: Watchdog(no_guesses)))
    params = greedy(max_tokens=6)
    expected = bits(generate(llm, "one", params))[0][0]
    stream = llm.stream("one", params)
    tokens = list(next(stream).token_ids)
    llm.score(["a"], ["b" * 60])
    tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tokens == expected
