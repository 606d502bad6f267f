"""AsyncLLM: many readers, one engine thread, and what happens when either goes away."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from samewise import LLM, AsyncLLM, SamplingParams
from samewise.errors import BadParameter, BadPrompt, MachineError, QueueFull
from samewise.llm import aio
from samewise.llm.aio import _Call
from samewise.outputs import RequestOutput
from samewise.testing import Scripted, paced, tiny_engine

T = TypeVar("T")
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def go(work: Coroutine[Any, Any, T], seconds: float = 60) -> T:
    """Run a coroutine; whatever hangs is a failure."""

    async def timed() -> T:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(timed())


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM.over(paced(tiny_engine(**settings))) as llm:
        yield llm


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.005)


async def on_engine(llm: AsyncLLM, look: Callable[[], T]) -> T:
    """Look at the engine from its own thread."""
    return await llm._call(look)


async def pages_are_back(llm: AsyncLLM) -> None:
    engine = llm._engine
    for _ in range(2000):
        if await on_engine(llm, lambda: engine.scheduler.idle):
            break
        await asyncio.sleep(0.002)
    stats = await llm.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["pages_available"] == stats["pages"]
    await on_engine(llm, engine.check)
    assert not await on_engine(llm, lambda: dict(llm._readers))
    assert not await on_engine(llm, lambda: dict(llm._loop._open))


def bits(out: RequestOutput) -> list[tuple[list[int], list[str]]]:
    return [(o.token_ids, [v.hex() for v in o.token_logprobs]) for o in out.outputs]


def test_a_reader_of_the_whole_answer_receives_no_chunks() -> None:
    async def work() -> None:
        async with served() as llm:
            with await llm.open("hello", SHORT, whole=True) as reader:
                assert await reader.next_chunks() == []
                assert reader.finished
                assert bits(reader.output()) == bits(await llm.generate("hello", SHORT))
            await pages_are_back(llm)

    go(work())


def test_requests_sent_together_start_in_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "GATHER", aio.GatherTimes(expected=20.0))

    async def work() -> None:
        async with served(proposer="none") as llm:
            inner, order = llm.intake.check, iter(range(8))

            def slow(*what: Any) -> Any:
                time.sleep(next(order) * 0.02)
                return inner(*what)

            llm.intake.check = slow  # type: ignore[method-assign]
            await asyncio.gather(*(llm.generate("hello", SHORT, salt=b"%d" % i) for i in range(8)))
            together = (await llm.stats())["frames"]
            llm.intake.check = inner  # type: ignore[method-assign]
            began = time.monotonic()
            await llm.generate("hello", SHORT, salt=b"alone")
            assert time.monotonic() - began < 10  # no other request is on its way
            assert together <= (await llm.stats())["frames"] - together + 3
            assert not llm._expected

    go(work())


def test_an_expected_request_that_never_arrives_is_not_waited_for_long() -> None:
    async def work() -> None:
        async with served() as llm:
            llm._expected.add(object())  # as if it were stuck on its way
            assert (await llm.generate("hello", SHORT)).finished

    go(work())


def test_generate_and_stream_give_the_bits_of_llm() -> None:
    params = SamplingParams(max_tokens=10, seed=3, n=2, logprobs=2)
    (wanted,) = LLM.over(tiny_engine()).generate("hello", params, use_tqdm=False)

    async def work() -> None:
        async with served() as llm:
            whole = await llm.generate("hello", params)
            assert bits(whole) == bits(wanted)
            assert whole.finished
            assert whole.contract == llm.contract.id == wanted.contract
            chunks = [chunk async for chunk in llm.stream("hello", params)]
            for choice in wanted.outputs:
                mine = [chunk for chunk in chunks if chunk.index == choice.index]
                assert [t for chunk in mine for t in chunk.token_ids] == choice.token_ids
                assert [v for chunk in mine for v in chunk.token_logprobs] == choice.token_logprobs
                assert "".join(chunk.text for chunk in mine) == choice.text
                assert mine[-1].finish_reason == choice.finish_reason
            await pages_are_back(llm)

    go(work())


def test_many_tasks_give_the_same_bits_as_alone() -> None:
    prompts = [f"{'word ' * (i % 5)}{i}" for i in range(24)]
    params = [SamplingParams(max_tokens=4 + i % 9, temperature=float(i % 2), seed=i) for i in range(24)]

    async def work() -> None:
        async with served(max_num_seqs=7) as llm:
            alone = [bits(await llm.generate(p, s)) for p, s in zip(prompts, params, strict=True)]

            async def late(i: int) -> list[Any]:
                await asyncio.sleep(0.003 * (i * 7 % 5))
                return bits(await llm.generate(prompts[i], params[i]))

            assert await asyncio.gather(*(late(i) for i in range(24))) == alone
            await pages_are_back(llm)

    go(work())


def test_the_event_loop_never_waits_for_the_engine() -> None:
    """A step that takes long takes nothing from the loop."""

    def slow(_: object) -> list[int]:
        time.sleep(0.15)
        return []

    async def work() -> float:
        gaps = [0.0]

        async def tick() -> None:
            last = time.monotonic()
            while True:
                await asyncio.sleep(0.002)
                now = time.monotonic()
                gaps.append(now - last)
                last = now

        async with served(make_proposer=lambda _: Scripted(slow)) as llm:
            ticker = asyncio.create_task(tick())
            began = time.monotonic()
            await asyncio.gather(*(llm.generate(f"{i}", SHORT) for i in range(2)))
            assert time.monotonic() - began > 0.9
            ticker.cancel()
        # Half the time of a step: far above a busy machine's hiccups at the median, far below a step.
        assert len(gaps) > 20
        return sorted(gaps)[len(gaps) * 9 // 10]

    assert go(work()) < 0.075


@pytest.mark.parametrize("how", ["generate", "stream", "break"])
def test_a_reader_that_goes_away_is_aborted(how: str) -> None:
    async def leave_early(llm: AsyncLLM) -> None:
        stream = llm.stream("hello", LONG)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    async def read_all(llm: AsyncLLM) -> None:
        async for _ in llm.stream("hello", LONG):
            pass

    async def work() -> None:
        async with served() as llm:
            if how == "break":
                await leave_early(llm)
            else:
                reading = llm.generate("hello", LONG) if how == "generate" else read_all(llm)
                task = asyncio.ensure_future(reading)
                await until(lambda: llm._engine.scheduler.counters.output_tokens >= 3)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await pages_are_back(llm)
            stats = await llm.stats()
            assert stats["aborted"] == 1
            assert stats["output_tokens"] < 300
            assert bits(await llm.generate("hello", SHORT))

    go(work())


def test_cancelling_takes_one_step() -> None:
    gate, steps = threading.Event(), [0]

    def count(_: object) -> list[int]:
        steps[0] += 1
        if steps[0] == 5:
            gate.wait(20)
        return []

    async def work() -> None:
        async with served(make_proposer=lambda _: Scripted(count)) as llm:
            task = asyncio.create_task(llm.generate("hello", LONG))
            await until(lambda: steps[0] == 5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.set()
            await pages_are_back(llm)
            assert steps[0] <= 6

    go(work())


def test_cancelling_before_the_request_is_in_aborts_it_too() -> None:
    """The reader goes away while the engine's thread has not yet taken the call."""
    gate = threading.Event()

    async def work() -> None:
        async with served() as llm:
            llm._calls.put(_Call(lambda: gate.wait(20) and None, lambda _: None))
            await until(llm._calls.empty)
            task = asyncio.create_task(llm.generate("hello", LONG))
            await until(lambda: llm._calls.qsize() > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.set()
            await pages_are_back(llm)
            assert (await llm.stats())["output_tokens"] < 300

    go(work())


def test_others_do_not_notice_a_cancellation() -> None:
    async def work() -> None:
        async with served() as llm:
            wanted = bits(await llm.generate("the one that stays", LONG.clone(max_tokens=40)))
            others = [asyncio.create_task(llm.generate(f"{i} goes", LONG)) for i in range(5)]
            mine = asyncio.create_task(llm.generate("the one that stays", LONG.clone(max_tokens=40)))
            await until(lambda: llm._engine.scheduler.counters.output_tokens >= 60)
            for task in others:
                task.cancel()
            assert bits(await mine) == wanted
            await asyncio.gather(*others, return_exceptions=True)
            await pages_are_back(llm)

    go(work())


@pytest.mark.parametrize(
    ("ask", "error", "says"),
    [
        (lambda llm: llm.generate(""), BadPrompt, "the prompt is empty"),
        (lambda llm: llm.generate([1, 999]), BadPrompt, "holds 999"),
        (lambda llm: llm.generate([1] * 600), BadPrompt, "max_model_len is 512"),
        (lambda llm: llm.generate("a", SamplingParams(stop_token_ids=[999])), BadParameter, "999"),
        (lambda llm: anext(llm.stream("")), BadPrompt, "the prompt is empty"),
        (lambda llm: anext(llm.stream([-1])), BadPrompt, "holds -1"),
        (lambda llm: llm.chat_prompt([]), BadPrompt, "the conversation is empty"),
    ],
)
def test_a_mistake_is_raised_where_it_was_made(
    ask: Callable[[AsyncLLM], Awaitable[Any]], error: type[Exception], says: str
) -> None:
    async def work() -> None:
        async with served() as llm:
            with pytest.raises(error, match=says):
                await ask(llm)
            assert llm.failure is None
            await pages_are_back(llm)
            assert (await llm.generate("a", SHORT)).finished

    go(work())


@pytest.mark.parametrize("n", [1, 3])
def test_a_full_queue_refuses_whom_it_cannot_take(n: int) -> None:
    async def work() -> None:
        async with served(max_queued=2, max_num_seqs=1) as llm:
            asked = [llm.generate(f"{i}", SHORT.clone(n=n)) for i in range(8)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            refused = [one for one in found if isinstance(one, QueueFull)]
            answered = [one for one in found if isinstance(one, RequestOutput)]
            assert len(refused) + len(answered) == 8
            assert refused
            await pages_are_back(llm)
            assert (await llm.generate("a", SHORT)).finished

    go(work())


def test_chat_prompt_and_salt() -> None:
    async def work() -> None:
        async with served() as llm:
            prompt = await llm.chat_prompt([{"role": "user", "content": "a question of some length"}])
            one = await llm.generate(prompt, SHORT, salt=b"one")
            two = await llm.generate(prompt, SHORT, salt=b"two")
            again = await llm.generate(prompt, SHORT, salt=b"one")
            assert bits(one) == bits(two) == bits(again)
            assert [out.num_cached_tokens for out in (one, two)] == [0, 0]
            assert again.num_cached_tokens > 0

    go(work())


def test_defaults_are_the_checkpoints_here_too() -> None:
    """What `LLM.generate` does when given no parameters."""
    engine = tiny_engine()
    engine.loaded.generation["temperature"] = 0.0  # type: ignore[index]
    engine.loaded.generation["max_new_tokens"] = 5  # type: ignore[index]
    (wanted,) = LLM.over(engine).generate("hello", use_tqdm=False)

    async def work() -> None:
        async with AsyncLLM.over(engine) as llm:
            assert bits(await llm.generate("hello")) == bits(wanted)

    go(work())


# ---- the end


def test_closing_ends_every_reader_with_an_error() -> None:
    async def work() -> None:
        llm = AsyncLLM.over(tiny_engine())
        tasks = [asyncio.create_task(llm.generate(f"{i}", LONG)) for i in range(3)]
        await until(lambda: llm._engine.scheduler.counters.output_tokens >= 6)
        await asyncio.to_thread(llm.close)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, MachineError) and "has stopped" in str(one) for one in found)
        with pytest.raises(MachineError, match="the engine has stopped"):
            await llm.generate("a", SHORT)
        llm.close()
        assert llm.failure is None

    go(work())


def test_closing_answers_calls_that_were_still_queued() -> None:
    """Or their callers would wait for ever."""
    gate = threading.Event()

    async def work() -> None:
        llm = AsyncLLM.over(tiny_engine())
        llm._calls.put(_Call(lambda: gate.wait(20) and None, lambda _: None))
        await until(llm._calls.empty)
        closing = asyncio.create_task(asyncio.to_thread(llm.close))
        await until(lambda: llm._calls.qsize() == 1)
        late = asyncio.create_task(llm.stats())
        await until(lambda: llm._calls.qsize() == 2)
        gate.set()
        await closing
        with pytest.raises(MachineError, match="has stopped"):
            await asyncio.wait_for(late, 3)

    go(work())


class Broken(Scripted):
    """A proposer with a bug, that shows when told."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(lambda _: [])
        self.gate, self.inside = gate, threading.Event()

    def propose(self, asks: list[Any]) -> list[Any]:
        if asks:
            self.inside.set()
            self.gate.wait(20)
            raise ZeroDivisionError("a planted bug")
        return []


def test_a_failure_in_the_engine_reaches_every_reader() -> None:
    gate = threading.Event()
    gate.set()

    async def work() -> None:
        llm = AsyncLLM.over(tiny_engine(make_proposer=lambda _: Broken(gate)))
        found = await asyncio.gather(*(llm.generate(f"{i}", LONG) for i in range(3)), return_exceptions=True)
        assert all(isinstance(one, MachineError) and "a planted bug" in str(one) for one in found)
        assert isinstance(llm.failure, ZeroDivisionError)
        for call in (llm.generate("a", SHORT), llm.stats()):
            with pytest.raises(MachineError, match=r"has stopped: a planted bug"):
                await call
        llm.close()

    go(work())


def test_a_failure_reaches_whoever_was_just_asking() -> None:
    """A call that was queued while the engine failed must not wait for ever."""
    gate = threading.Event()
    broken = Broken(gate)

    async def work() -> None:
        llm = AsyncLLM.over(tiny_engine(make_proposer=lambda _: broken))
        first = asyncio.create_task(llm.generate("first", LONG))
        await until(broken.inside.is_set)
        second = asyncio.create_task(llm.generate("second", LONG))
        await until(lambda: llm._calls.qsize() > 0)
        gate.set()
        with pytest.raises(MachineError, match="a planted bug"):
            await asyncio.wait_for(first, 3)
        with pytest.raises(MachineError, match="a planted bug"):
            await asyncio.wait_for(second, 3)

    go(work())


def test_two_event_loops_may_share_one_engine() -> None:
    llm = AsyncLLM.over(tiny_engine())
    try:
        found: list[Any] = [None, None]

        def reader(i: int) -> None:
            found[i] = bits(asyncio.run(llm.generate("the same question", SHORT)))

        threads = [threading.Thread(target=reader, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert found[0] is not None
        assert found[0] == found[1]
    finally:
        llm.close()


def test_a_loop_that_died_does_not_take_the_engine_with_it() -> None:
    llm = AsyncLLM.over(tiny_engine())
    try:

        async def start() -> None:
            stream = llm.stream("hello", LONG)
            await anext(stream)

        asyncio.run(start())
        assert asyncio.run(llm.generate("a", SHORT)).finished
        assert llm.failure is None
    finally:
        llm.close()


# ---- readers


def test_a_reader_returns_the_chunks_before_its_error() -> None:
    async def work() -> None:
        async with served() as llm:
            with await llm.open("hello", LONG) as reader:
                await until(lambda: llm._engine.scheduler.counters.output_tokens >= 6)
                await asyncio.sleep(0)
                reader.fail(MachineError("sent away"))
                assert await reader.next_chunks()
                with pytest.raises(MachineError, match="sent away"):
                    await reader.next_chunks()
                assert await reader.next_chunks() == []
                assert not reader.finished
            await pages_are_back(llm)
            with await llm.open("hello", SHORT.clone(logprobs=1, prompt_logprobs=1)) as reader:
                (first, *_) = await reader.next_chunks()
                known = reader.prompt_output()
                assert first.seed == reader.output().outputs[0].seed
                assert len(known.prompt_logprobs or []) == len(known.prompt_token_ids)
                while await reader.next_chunks():
                    pass
                assert reader.finished
                assert reader.output().prompt_logprobs == known.prompt_logprobs
            await pages_are_back(llm)

    go(work())


def test_properties_that_a_server_needs() -> None:
    async def work() -> None:
        async with served() as llm:
            assert llm.alive
            assert llm.max_model_len == 512
            assert llm.config.model == "tiny-llama"
            assert llm.report.frames > 0
            assert llm.intake.decode(llm.intake.encode("é!")) == "é!"
            with pytest.raises(BadPrompt, match="holds 999"):
                llm.intake.decode([999])
        assert not llm.alive

    go(work())


def test_a_request_with_speculate_false_gets_no_drafts() -> None:
    async def work() -> None:
        async with served(proposer="ngram") as llm:
            asked = LONG.clone(max_tokens=60)
            one = await llm.generate("ab" * 20, asked)
            two = await llm.generate("ab" * 20, asked.clone(speculate=False))
            assert bits(one) == bits(two)
            assert one.metrics.num_guessed_tokens > 0
            assert two.metrics.num_guessed_tokens == 0

    go(work())
