"""Replacing weights while requests wait or run: wait, abort, keep; and pauses."""

import asyncio
import functools
from typing import Any

import pytest
import torch
from aio_cases import assert_idle, in_engine_thread, paced_llm, run_async, wait_until
from llm_cases import PROMPT, bits, encode, generate, greedy

from samewise import LLM, AsyncLLM, SamplingParams
from samewise.errors import BadParameter, CallerError, GuaranteeLost
from samewise.llm.gate import MODES
from samewise.outputs import ABORTED, RequestOutput
from samewise.receipts import is_complete
from samewise.receipts.reader import loads
from samewise.testing import tiny_engine, tiny_model
from samewise.text.grammar import Grammar

SAMPLED = SamplingParams(temperature=0.9, max_tokens=60, ignore_eos=True, seed=3)


@functools.cache
def weights(seed: int) -> dict[str, torch.Tensor]:
    return dict(tiny_model(seed=seed).state_dict())


@functools.cache
def reference(seed: int) -> LLM:
    """An engine that never had other weights."""
    return LLM.over(tiny_engine(seed=seed, proposer="none"))


def check_tokens(output: RequestOutput, params: SamplingParams, seeds: list[int]) -> None:
    """Every token is the one that the weights it names give after the tokens before it, to the bit.

    `seeds`: of the weights, by version.
    """
    for choice in output.outputs:
        if not choice.weights:
            assert not choice.token_ids  # aborted before its first token
            continue
        ends = [*(span.start for span in choice.weights[1:]), len(choice.token_ids)]
        for span, end in zip(choice.weights, ends, strict=True):
            llm = reference(seeds[span.version])
            assert span.contract == llm.contract.id
            if span.start == end:
                continue
            prompt = output.prompt_token_ids + choice.token_ids[: span.start]
            same = params.clone(max_tokens=end - span.start, seed=choice.seed)
            (again,) = generate(llm, [prompt], same)
            same_choice = again.outputs[choice.index]
            assert same_choice.token_ids == choice.token_ids[span.start : end]
            assert same_choice.token_logprobs == choice.token_logprobs[span.start : end]


# -- LLM ----------------------------------------------------------------------------------------------


def stream_tokens(llm: LLM, mode: str) -> tuple[list[Any], Any]:
    """The chunks of a stream in the middle of which weights are replaced."""
    stream = llm.stream(PROMPT, SAMPLED)
    chunks = [next(stream) for _ in range(5)]
    contract = llm.update_weights(weights(1), mode=mode)
    return [*chunks, *stream], contract


@pytest.mark.parametrize("mode", MODES)
def test_an_open_stream_sees_the_mode(mode: str) -> None:
    llm = LLM.over(tiny_engine())
    old = llm.contract
    chunks, new = stream_tokens(llm, mode)
    assert new == llm.contract == reference(1).contract
    assert llm.stats()["weights_version"] == 1
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    versions = [chunk.weights_version for chunk in chunks for _ in chunk.token_ids]
    contracts = {chunk.weights_version: chunk.contract for chunk in chunks}
    assert versions == sorted(versions)
    if mode == "keep":
        assert contracts == {0: old.id, 1: new.id}
        assert len(tokens) == SAMPLED.max_tokens
        prompt = encode(PROMPT) + tokens[: versions.count(0)]
        (again,) = generate(reference(1), [prompt], SAMPLED.clone(max_tokens=versions.count(1)))
        assert again.outputs[0].token_ids == tokens[versions.count(0) :]
    else:
        assert contracts == {0: old.id}
        assert (len(tokens) == SAMPLED.max_tokens) == (mode == "wait")
    assert chunks[-1].finish_reason == ("abort" if mode == "abort" else "length")
    assert chunks[-1].stop_reason == (ABORTED if mode == "abort" else None)
    llm.engine.check()
    assert llm.stats()["pages_available"] == llm.stats()["pages"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_open_stream_goes_on_under_new_weights_on_a_gpu(dtype: str) -> None:
    settings = {"device": "cuda", "dtype": dtype}
    llm, new = (LLM.over(tiny_engine(seed=seed, **settings)) for seed in (0, 1))
    chunks, contract = stream_tokens(llm, "keep")
    assert contract == new.contract
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    num_old = sum(len(chunk.token_ids) for chunk in chunks if chunk.weights_version == 0)
    assert 0 < num_old < len(tokens) == SAMPLED.max_tokens
    params = SAMPLED.clone(max_tokens=len(tokens) - num_old)
    (again,) = generate(new, [encode(PROMPT) + tokens[:num_old]], params)
    assert again.outputs[0].token_ids == tokens[num_old:]


def test_an_unknown_mode_is_refused(llm: LLM) -> None:
    with pytest.raises(BadParameter, match="mode='now': choose one of wait, abort, keep"):
        llm.update_weights({}, mode="now")


def test_without_a_mode_open_streams_are_refused() -> None:
    llm = LLM.over(tiny_engine())
    stream = llm.stream(PROMPT, SAMPLED)
    next(stream)
    with pytest.raises(CallerError, match="give a mode"):
        llm.update_weights({})
    stream.close()


def test_tensors_may_come_one_by_one() -> None:
    llm = LLM.over(tiny_engine())
    assert llm.update_weights((name, tensor) for name, tensor in weights(1).items()) == reference(1).contract


def test_a_piece_that_does_not_fit_leaves_no_certified_weights() -> None:
    llm = LLM.over(tiny_engine())
    pieces = [("model.norm.weight", torch.zeros(64)), ("lm_head.weight", torch.zeros(3))]
    with pytest.raises(BadParameter, match=r"lm_head.weight has shape \(3,\)"):
        llm.update_weights(iter(pieces))
    with pytest.raises(GuaranteeLost):
        generate(llm, PROMPT)
    assert llm.update_weights(weights(1)) == reference(1).contract
    assert bits(generate(llm, PROMPT)) == bits(generate(reference(1), PROMPT))


def test_the_models_own_memory_is_not_copied() -> None:
    """After a write in place the state dict is the model's own: nothing but packed copies is made anew."""
    llm = LLM.over(tiny_engine())
    model = llm.engine.loaded.model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights(1)[name])
    writes = [parameter._version for parameter in model.parameters()]
    assert llm.update_weights(model.state_dict()) == reference(1).contract
    assert [parameter._version for parameter in model.parameters()] == writes


def test_prompt_logprobs_are_all_of_one_version() -> None:
    params = greedy(prompt_logprobs=1, max_tokens=4)
    engine = tiny_engine(frame_rows=8)
    llm = LLM.over(engine)
    prompt = list(range(3, 103))
    stream = llm.stream(prompt, params)
    loop = llm._loop
    answer_outputs: list[Any] = []
    submit = loop.submit

    def remember(*args: Any, **kwargs: Any) -> Any:
        answer_outputs.append(submit(*args, **kwargs))
        return answer_outputs[-1]

    loop.submit = remember  # type: ignore[method-assign]
    step, num_steps = loop.step, 0

    def update_early() -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            assert 0 < len(answer_outputs[0]._prompt_scores) < len(prompt) - 1
            llm._loop.update_weights(weights(1))
        return step()

    loop.step = update_early  # type: ignore[method-assign]
    list(stream)
    assert num_steps > 4
    (expected,) = generate(LLM.over(tiny_engine(seed=1, frame_rows=8)), [prompt], params)
    assert answer_outputs[0].output().prompt_logprobs == expected.prompt_logprobs


def test_receipts_name_the_version_and_are_of_one_contract() -> None:
    llm = LLM.over(tiny_engine())
    params = greedy(max_tokens=4)
    (before,) = generate(llm, PROMPT, params)
    (plain,) = llm.receipts(before, params)
    assert "weights_version" not in plain.body
    llm.update_weights(weights(1))
    assert llm.receipts(before, params)[0].body == plain.body  # its contract is remembered
    (after,) = generate(llm, PROMPT, params)
    (receipt,) = llm.receipts(after, params)
    assert (after.weights_version, receipt.weights_version) == (1, 1)
    assert loads(receipt.dumps()).weights_version == 1


# -- AsyncLLM under load ------------------------------------------------------------------------------

NUM_CLIENTS = 16
UPDATES = [1, 2, 3, 4, 5]


LETTERS = Grammar.regex("[a-z ]*")  # what follows an answer's beginning is of the same form
KINDS: list[dict[str, Any]] = [
    {}, {"n": 2}, {"stop_token_ids": list(range(60, 90))}, {"grammar": LETTERS}, {"prompt_logprobs": 1}
]  # fmt: skip
Done = list[tuple[RequestOutput, SamplingParams]]


async def client(llm: AsyncLLM, number: int, done: Done, stop: asyncio.Event) -> None:
    """Streams answers one after the other until `stop`."""
    turn = 0
    while not stop.is_set():
        params = client_params(number, turn)
        prompt = client_prompt(number, turn)
        with await llm.open(prompt, params) as reader:
            streamed: list[list[int]] = [[] for _ in range(params.n)]
            while chunks := await reader.next_chunks():
                for chunk in chunks:
                    streamed[chunk.index] += chunk.token_ids
            output = reader.output()
        assert [choice.token_ids for choice in output.outputs] == streamed
        done.append((output, params))
        turn += 1


def client_params(number: int, turn: int) -> SamplingParams:
    temperature, kind = 0.0 if number % 2 else 0.9, KINDS[(number + turn) % len(KINDS)]
    return SAMPLED.clone(seed=number, temperature=temperature, max_tokens=10 + 3 * number, **kind)


def check_prompt(output: RequestOutput, seeds: list[int]) -> None:
    """The prompt's log-probabilities are those of the weights under which the answer began."""
    (choice,) = output.outputs
    if choice.weights:  # not aborted before its first token
        llm = reference(seeds[choice.weights[0].version])
        (again,) = generate(llm, [output.prompt_token_ids], greedy(prompt_logprobs=1, max_tokens=1))
        assert again.prompt_logprobs == output.prompt_logprobs


def client_prompt(number: int, turn: int) -> list[int]:
    return [3 + number, *range(5, 5 + 4 * (number % 5)), 7 + turn % 3]


@pytest.mark.parametrize("mode", MODES)
def test_sixteen_clients_stream_while_weights_change_five_times(mode: str) -> None:
    async def scenario() -> tuple[Done, int]:
        async with paced_llm(0.002, max_num_seqs=8) as llm:
            done: Done = []
            stop = asyncio.Event()
            clients = [asyncio.create_task(client(llm, i, done, stop)) for i in range(NUM_CLIENTS)]
            contracts = [llm.contract.id]
            for seed in UPDATES:
                num_done = len(done)
                await wait_until(lambda num_done=num_done: len(done) >= num_done + 3)
                contracts.append((await llm.update_weights(weights(seed), mode=mode)).id)
            num_done = len(done)
            await wait_until(lambda: len(done) >= num_done + 3)
            stop.set()
            await asyncio.gather(*clients)
            stats = await llm.stats()
            await assert_idle(llm)
            assert stats["weights_version"] == len(UPDATES)
            assert contracts == [reference(seed).contract.id for seed in (0, *UPDATES)]
            return done, stats["requests"]

    done, num_requests = run_async(scenario())
    assert sum(params.n for _, params in done) == num_requests  # none was lost
    assert all(output.finished for output, _ in done)
    for output, params in done:
        check_tokens(output, params.clone(prompt_logprobs=None), [0, *UPDATES])
        if params.prompt_logprobs is not None:
            check_prompt(output, [0, *UPDATES])
        for choice in output.outputs:
            assert len(choice.token_logprobs) == len(choice.token_ids)
            reasons = {"length"} | ({"abort"} if mode == "abort" else set())
            if choice.token_ids and choice.token_ids[-1] in (params.stop_token_ids or ()):
                reasons = {"stop"}
            assert choice.finish_reason in reasons
    mixed = [output for output, _ in done if output.mixed]
    aborted = [output for output, _ in done if any(one.finish_reason == "abort" for one in output.outputs)]
    assert bool(mixed) == (mode == "keep")
    assert bool(aborted) == (mode == "abort")
    assert not any(is_complete(output) for output in (*mixed, *aborted))


@pytest.mark.parametrize("mode", MODES)
def test_a_pause_holds_requests_back_until_it_ends(mode: str) -> None:
    async def scenario() -> None:
        async with paced_llm() as llm:
            running = asyncio.create_task(llm.generate(PROMPT, SAMPLED))
            await wait_until(lambda: bool(llm._readers))
            await llm.pause(mode)
            assert llm.paused
            frames = (await llm.stats())["frames"]
            assert running.done() or mode != "wait"
            later = asyncio.create_task(llm.generate(PROMPT, SAMPLED.clone(seed=9)))
            await asyncio.sleep(0.05)
            stats = await llm.stats()
            assert stats["frames"] == frames
            assert (stats["running"] > 0) == (mode == "keep")
            assert not later.done()
            contract = await llm.update_weights(weights(1), mode="wait")  # paused: nothing can end
            assert llm.paused
            await llm.resume()
            assert not llm.paused
            first, second = await asyncio.gather(running, later)
            check_tokens(first, SAMPLED, [0, 1])
            check_tokens(second, SAMPLED, [0, 1])
            assert (first.weights_version, second.contract) == (int(mode == "keep"), contract.id)
            assert first.outputs[0].finish_reason == ("abort" if mode == "abort" else "length")
            await assert_idle(llm)

    run_async(scenario())


def test_resuming_calls_off_a_pause_that_waits() -> None:
    async def scenario() -> None:
        async with paced_llm() as llm:
            running = asyncio.create_task(llm.generate(PROMPT, SAMPLED))
            await wait_until(lambda: bool(llm._readers))
            pause = asyncio.create_task(llm.pause("wait"))
            await wait_until(lambda: llm.paused)
            await llm.resume()
            await pause
            assert (await running).outputs[0].finish_reason == "length"
            assert not llm.paused
            await llm.generate(PROMPT, SAMPLED)

    run_async(scenario())


def test_a_caller_that_leaves_while_it_is_held_back_leaves_no_request() -> None:
    async def scenario() -> None:
        async with paced_llm() as llm:
            await llm.pause("keep")
            task = asyncio.create_task(llm.generate(PROMPT, SAMPLED))
            await wait_until(lambda: bool(llm._held))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await llm.resume()
            assert (await llm.stats())["requests"] == 0
            await assert_idle(llm)

    run_async(scenario())


def test_closing_fails_what_is_held_back() -> None:
    async def scenario() -> None:
        async with paced_llm() as llm:
            await llm.pause("keep")
            task = asyncio.create_task(llm.generate(PROMPT, SAMPLED))
            await wait_until(lambda: bool(llm._held))
            await asyncio.to_thread(llm.close)
            with pytest.raises(Exception, match="the engine has stopped"):
                await task

    run_async(scenario())


def test_aborting_everything_keeps_what_was_generated() -> None:
    async def scenario() -> None:
        async with paced_llm() as llm:
            running = asyncio.create_task(llm.generate(PROMPT, SAMPLED))
            await wait_until(lambda: bool(llm._readers))
            await in_engine_thread(llm, lambda: None)
            assert await llm.abort_all() == 1
            output = await running
            check_tokens(output, SAMPLED, [0])
            assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("abort", ABORTED)
            await assert_idle(llm)

    run_async(scenario())
