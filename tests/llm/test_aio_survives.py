"""AsyncLLM after a failed step: one request may end with an error, the others give their bits."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from aio_cases import LONG, SHORT, assert_idle, bits, run_async, wait_until

from samewise import AsyncLLM, SamplingParams
from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.errors import EngineLost, GuaranteeLost, InvariantBroken, MachineError, RequestFailed
from samewise.llm.step_loop import StepLoop
from samewise.testing import Scripted, paced, tiny, tiny_engine
from samewise.types import Ask, Delta, Span

PARAMS = SamplingParams(temperature=0.7, seed=2, max_tokens=20, ignore_eos=True)
PROMPTS = ["one", "another one", "and a third, which is longer than a page of the KV cache holds", "x"]


class Poisoned(Scripted):
    """Raises where it is asked about a sequence whose prompt begins with "!", as often as `times` says."""

    def __init__(self, times: int, error: Exception) -> None:
        super().__init__(self._script)
        self.left, self.error = times, error

    def _script(self, ask: Ask) -> list[int]:
        if ask.tokens[0] == ord("!") - 33 and self.left:
            self.left -= 1
            raise self.error
        return []


def poisoned_llm(times: int = 10**9, error: Exception | None = None) -> AsyncLLM:
    proposer = Poisoned(times, error or ZeroDivisionError("a planted bug"))
    # Paced, so that all requests are there when the engine fails.
    return AsyncLLM.over(paced(tiny_engine(make_proposer=lambda _: proposer), 0.02))


async def answers(llm: AsyncLLM, prompts: list[str]) -> list[Any]:
    results = await asyncio.gather(
        *(llm.generate(prompt, PARAMS) for prompt in prompts), return_exceptions=True
    )
    return [result if isinstance(result, BaseException) else bits(result) for result in results]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    async def work() -> list[Any]:
        async with AsyncLLM.over(tiny_engine()) as llm:
            return await answers(llm, PROMPTS)

    return run_async(work())


@pytest.mark.parametrize("place", range(5))
def test_a_request_that_always_fails_ends_alone(
    expected: list[Any], place: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with poisoned_llm() as llm:
            results = await answers(llm, [*PROMPTS[:place], "!poison", *PROMPTS[place:]])
            failed = results.pop(place)
            assert isinstance(failed, RequestFailed)
            assert "planted" not in str(failed)  # its client learns that it failed, the log why
            assert results == expected
            assert llm.failure is None
            assert await answers(llm, PROMPTS) == expected
            await assert_idle(llm)
            assert (await llm.stats())["failed"] == 1

    run_async(work())
    assert "a planted bug" in caplog.text


def test_a_request_that_fails_once_is_computed_again(expected: list[Any]) -> None:
    async def work() -> None:
        async with poisoned_llm(times=1, error=MemoryError()) as llm:
            first = await answers(llm, ["!poison", *PROMPTS])
            assert first[1:] == expected
            assert await answers(llm, ["!poison"]) == first[:1]
            stats = await llm.stats()
            assert (stats["failed"], stats["recoveries"]) == (0, 1)

    run_async(work())


def test_a_stream_gets_its_tokens_and_then_the_error() -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    async def work() -> None:
        llm = AsyncLLM.over(tiny_engine(make_proposer=lambda _: Scripted(fail_late)))
        async with llm:
            tokens: list[int] = []

            async def read() -> None:
                async for chunk in llm.stream("hello", params):
                    tokens.extend(chunk.token_ids)

            with pytest.raises(RequestFailed):
                await read()
            assert len(tokens) == 6  # the seventh was committed by the step that failed
            await assert_idle(llm)

    def fail_late(ask: Ask) -> list[int]:
        if len(ask.tokens) - ask.prompt_len >= 7:
            raise ZeroDivisionError
        return []

    run_async(work())


def test_an_answer_whose_text_cannot_be_made_ends_alone(
    expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with AsyncLLM.over(tiny_engine()) as llm:
            text_stream = llm.intake.text_stream

            def broken(checked: Any) -> Any:
                stream = text_stream(checked)
                if checked.text == "broken":
                    assert stream is not None
                    monkeypatch.setattr(stream, "push", None)  # calling it raises TypeError
                return stream

            monkeypatch.setattr(llm.intake, "text_stream", broken)
            results = await answers(llm, ["broken", *PROMPTS])
            assert isinstance(results[0], RequestFailed)
            assert results[1:] == expected
            await assert_idle(llm)

    run_async(work())


def test_an_engine_that_fails_without_any_request_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        llm = AsyncLLM.over(tiny_engine())
        monkeypatch.setattr(llm._engine.scheduler.__class__, "admit", None)  # calling it raises TypeError
        results = await answers(llm, PROMPTS)
        assert all(isinstance(result, RequestFailed | MachineError) for result in results)
        assert isinstance(llm.failure, InvariantBroken)
        assert isinstance(llm.failure.__cause__, TypeError)
        assert "TypeError" in str(llm.failure)
        llm.close()

    run_async(work())


def test_a_device_error_ends_the_thread_and_says_so() -> None:
    error = torch.AcceleratorError("CUDA error: unspecified launch failure")

    async def work() -> None:
        llm = poisoned_llm(error=error)
        results = await answers(llm, ["!poison", "one"])
        assert all(isinstance(result, MachineError) and "launch failure" in str(result) for result in results)
        assert llm.failure is error
        assert not llm.alive
        assert isinstance(llm._engine.lost, EngineLost)
        with pytest.raises(MachineError, match="has stopped"):
            await llm.generate("a", SHORT)
        llm.close()

    run_async(work())


def test_answers_that_end_in_a_step_before_its_failure_reach_their_readers(
    expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All answers end in one step, and giving out the third end fails."""
    dispatch, num_ends = StepLoop._dispatch, [0]

    def failing(loop: StepLoop, delta: Delta, *args: Any) -> None:
        num_ends[0] += delta.finish is not None
        if num_ends[0] == 3:
            num_ends[0] += 1
            raise MemoryError
        dispatch(loop, delta, *args)

    async def work() -> None:
        async with AsyncLLM.over(tiny_engine()) as llm:
            monkeypatch.setattr(StepLoop, "_dispatch", failing)
            readers = await llm.submit([llm.intake.check(prompt, PARAMS) for prompt in PROMPTS])
            for reader in readers:
                with reader:
                    while await reader.next_chunks():
                        pass
            assert [bits(reader.output()) for reader in readers] == expected
            await assert_idle(llm)

    run_async(work(), 20)
    assert num_ends[0] > 5


def test_an_answer_ended_by_a_stop_string_reaches_its_reader_if_the_engine_fails_to_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    async def work() -> None:
        async with AsyncLLM.over(tiny_engine()) as llm:
            text = (await llm.generate("one", params)).outputs[0].text
            stopped, end = replace(params, stop=text[3:5]), Engine.end

            def failing(engine: Engine, request_id: int) -> None:
                monkeypatch.setattr(Engine, "end", end)
                raise MemoryError

            monkeypatch.setattr(Engine, "end", failing)
            output = await llm.generate("one", stopped)
            assert (output.outputs[0].text, output.outputs[0].finish_reason) == (text[:3], "stop")
            await assert_idle(llm)

    run_async(work(), 20)


def test_answers_that_lack_one_token_when_a_step_fails_end_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends with the first token that it gets alone."""
    params = SamplingParams(temperature=0, max_tokens=1)

    async def work() -> None:
        async with AsyncLLM.over(tiny_engine()) as llm:
            verifier = llm._engine.verifier
            launch = verifier.launch

            def failing(spans: list[Span]) -> Any:
                monkeypatch.setattr(verifier, "launch", launch)
                raise MemoryError

            monkeypatch.setattr(verifier, "launch", failing)
            outputs = await asyncio.gather(*(llm.generate(prompt, params) for prompt in PROMPTS))
            assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(PROMPTS)
            assert (await llm.stats())["recoveries"] == 1

    run_async(work())


@pytest.mark.parametrize("running", [True, False])
def test_weights_that_another_engine_changed_end_the_thread_and_blame_no_request(
    running: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig.of(model="tiny", kv_memory=2**24, device="cpu")
    loaded = tiny()
    other = Engine(loaded, config)

    async def work() -> None:
        llm = AsyncLLM.over(paced(Engine(loaded, config), 0.003))
        reader = await llm.open("one", LONG if running else SHORT)
        while await reader.next_chunks() and not running:
            pass
        await asyncio.to_thread(other.update_weights, {})
        with pytest.raises((MachineError, GuaranteeLost), match="weights are not the certified ones"):
            await llm.generate("one", LONG)
        await wait_until(lambda: not llm.alive)
        assert isinstance(llm.failure, GuaranteeLost)
        with pytest.raises(MachineError, match="weights are not the certified ones") as stopped:
            await llm.generate("one", LONG)
        assert stopped.value.__cause__ is llm.failure
        llm.close()

    run_async(work())
    assert "a step failed" not in caplog.text
