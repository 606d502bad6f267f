"""LLM after an exception inside a call: the next call gives the same bits, and open streams go on."""

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from llm_cases import PROMPT, assert_idle, bits, generate, greedy, greedy_letters

from samewise import LLM, SamplingParams
from samewise.errors import EngineLost
from samewise.llm.answer import Answer
from samewise.llm.step_loop import StepLoop
from samewise.testing import tiny_engine
from samewise.types import Grammar

PROMPTS = [PROMPT, "another prompt", "a third one, a little longer than the other two"]
PARAMS = [
    greedy(max_tokens=20, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=12, ignore_eos=True, logprobs=2),
    greedy(max_tokens=12, grammar=Grammar.regex("[a-f]{20}")),
]
INTERRUPTED = [PARAMS[0].clone(speculate=False), *PARAMS[1:]]
"""For calls that end in a given frame: the first request alone takes 20, however many tokens drafts bring."""


@pytest.fixture(scope="module", params=["none", "auto"])
def survivor(request: pytest.FixtureRequest) -> LLM:
    return LLM.over(tiny_engine(eos=True, max_model_len=256, proposer=request.param))


@pytest.fixture(scope="module")
def expected(survivor: LLM) -> list[Any]:
    return everything(survivor)


def everything(llm: LLM) -> list[Any]:
    """The bits of every answer, prompt log-probabilities and scores among them."""
    outputs = generate(llm, PROMPTS, PARAMS)
    scores = [score.logprobs for score in llm.score(PROMPTS, ["abc", "de", "f"])]
    return [bits(outputs), [output.prompt_logprobs for output in outputs], scores]


class FailingFrame:
    """Does something in the frame of a number, counted from now on."""

    def __init__(self, llm: LLM, number: int, act: Callable[[], None]) -> None:
        self.runner, self.number, self.act = llm.engine.runner, number, act
        self.frame = self.runner.frame

    def __enter__(self) -> None:
        self.runner.frame = self  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        self.runner.frame = self.frame  # type: ignore[method-assign]

    def __call__(self, inputs: Any) -> torch.Tensor:
        self.number -= 1
        if self.number == 0:
            self.act()
        return self.frame(inputs)


def fail_with(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.fixture
def handled() -> Iterator[type[BaseException]]:
    """A handler of SIGALRM that raises, as many programs use it for a time limit."""

    def raise_timeout(*_: object) -> None:
        raise TimeoutError("time is up")

    before = signal.signal(signal.SIGALRM, raise_timeout)
    yield TimeoutError
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_lack_of_memory_inside_a_frame_fails_one_call(
    survivor: LLM, expected: list[Any], number: int
) -> None:
    with FailingFrame(survivor, number, fail_with(MemoryError("no memory"))), pytest.raises(MemoryError):
        generate(survivor, PROMPTS, INTERRUPTED)
    assert_idle(survivor)
    assert everything(survivor) == expected


@pytest.mark.parametrize("number", [1, 3])
def test_a_signal_handler_that_raises_fails_one_call(
    survivor: LLM, expected: list[Any], number: int, handled: type[BaseException]
) -> None:
    def interrupt() -> None:
        signal.raise_signal(signal.SIGALRM)

    with FailingFrame(survivor, number, interrupt), pytest.raises(handled):
        generate(survivor, PROMPTS, INTERRUPTED)
    with FailingFrame(survivor, 1, interrupt), pytest.raises(handled):
        survivor.score(PROMPTS, ["abc", "de", "f"])
    assert_idle(survivor)
    assert everything(survivor) == expected


def test_ctrl_c_fails_one_call(survivor: LLM, expected: list[Any]) -> None:
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    # A process in the background of a shell starts with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with FailingFrame(survivor, 4, interrupt), pytest.raises(KeyboardInterrupt):
            generate(survivor, PROMPTS, INTERRUPTED)
    finally:
        handler = signal.signal(signal.SIGINT, before)
    assert handler is signal.default_int_handler
    assert everything(survivor) == expected


def test_autocast_around_a_call_changes_nothing(survivor: LLM, expected: list[Any]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert everything(survivor) == expected
    assert everything(survivor) == expected


@pytest.mark.parametrize("number", range(1, 9))
def test_a_stream_left_open_goes_on_after_another_call_failed(survivor: LLM, number: int) -> None:
    params = greedy_letters(max_tokens=24, stop="never", logprobs=1, temperature=0.8, seed=5)
    whole = list(survivor.stream(PROMPT, params))
    stream = survivor.stream(PROMPT, params)
    chunks = [next(stream) for _ in range(3)]
    with FailingFrame(survivor, number, fail_with(MemoryError())), pytest.raises(MemoryError):
        generate(survivor, PROMPTS, INTERRUPTED)
    chunks += stream

    def joined(chunks: list[Any]) -> tuple[Any, ...]:
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = [value.hex() for chunk in chunks for value in chunk.token_logprobs]
        return tokens, logprobs, "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason

    assert joined(chunks) == joined(whole)
    assert_idle(survivor)


def test_a_failed_update_of_an_answer_is_taken_back(survivor: LLM, expected: list[Any]) -> None:
    """The text of a stream is made of the tokens before the failure, each once."""
    params = greedy_letters(max_tokens=24)
    whole = "".join(chunk.text for chunk in survivor.stream(PROMPT, params))
    for number in range(1, 5):
        stream = survivor.stream(PROMPT, params)
        text = next(stream).text
        ((answer, choice),) = survivor._loop._open.values()
        assert choice.stream is not None
        choice.stream.push = failing_push(choice.stream.push, number)  # type: ignore[method-assign]
        with pytest.raises(TimeoutError):
            generate(survivor, PROMPT, greedy(max_tokens=20, ignore_eos=True))
        assert text + "".join(chunk.text for chunk in stream) == whole
        assert "".join(piece for piece in [answer.output().outputs[0].text]) == whole
    assert everything(survivor) == expected


def failing_push(push: Callable[[int], Any], number: int) -> Callable[[int], Any]:
    """Raises after the token of a number was pushed."""
    left = [number]

    def failing(token: int) -> Any:
        pushed = push(token)
        left[0] -= 1
        if left[0] == 0:
            raise TimeoutError
        return pushed

    return failing


def test_a_lost_engine_says_so_in_every_call() -> None:
    llm = LLM.over(tiny_engine())
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with FailingFrame(llm, 2, fail_with(error)), pytest.raises(RuntimeError) as first:
        generate(llm, PROMPTS, greedy())
    assert first.value is error
    for call in (
        lambda: generate(llm, PROMPT),
        lambda: llm.score(["a"], ["b"]),
        lambda: next(llm.stream("a")),
    ):
        with pytest.raises(EngineLost, match="this engine is lost: RuntimeError: CUDA error: an illegal"):
            call()
    llm.close()


def test_a_call_in_another_thread_survives_too(survivor: LLM, expected: list[Any]) -> None:
    results: list[Any] = []

    def work() -> None:
        with FailingFrame(survivor, 3, fail_with(MemoryError())), pytest.raises(MemoryError):
            generate(survivor, PROMPTS, INTERRUPTED)
        results.append(everything(survivor))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [expected]


@pytest.mark.parametrize("kind", ["generate", "score"])
@pytest.mark.parametrize("then", ["generate", "score", "update_weights"])
def test_a_second_ctrl_c_leaves_no_request_running(
    monkeypatch: pytest.MonkeyPatch, kind: str, then: str
) -> None:
    """It comes while the first one's call aborts its requests. The next call drops them."""
    llm = LLM.over(tiny_engine())
    calls: dict[str, Callable[[], Any]] = {
        "generate": lambda: bits(generate(llm, PROMPTS)),
        "score": lambda: [score.logprobs for score in llm.score(PROMPTS, ["abc" * 20] * 3)],
        "update_weights": lambda: llm.update_weights({}).id,
    }
    expected, step = calls[then](), StepLoop.step

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def step_then_interrupt(loop: StepLoop) -> list[Answer]:
        monkeypatch.setattr(StepLoop, "step", interrupted)
        return step(loop)

    monkeypatch.setattr(StepLoop, "step", step_then_interrupt)
    monkeypatch.setattr(StepLoop, "abort", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calls[kind]()
    monkeypatch.undo()
    assert not llm.engine.scheduler.idle
    assert calls[then]() == expected
    assert_idle(llm)
    assert llm.stats()["aborted"] == len(PROMPTS)


def test_a_stream_read_by_a_signal_handler_between_two_steps_takes_no_answer_from_a_call(
    survivor: LLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = StepLoop.step
    streams = [survivor.stream(PROMPT, greedy(max_tokens=60, ignore_eos=True))]

    def handled_step(loop: StepLoop) -> list[Answer]:
        monkeypatch.setattr(StepLoop, "step", step)
        changed = step(loop)
        list(streams.pop())
        return changed

    monkeypatch.setattr(StepLoop, "step", handled_step)
    assert everything(survivor) == expected
    assert_idle(survivor)
