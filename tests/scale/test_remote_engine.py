"""An engine over replicas gives the bits of one engine, also when replicas die in the middle of answers."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from local_replicas import LocalReplicas

from samewise import AsyncLLM, SamplingParams
from samewise.engine import Engine
from samewise.errors import BadParameter, GuaranteeLost, QueueFull, RequestFailed
from samewise.outputs import RequestOutput
from samewise.scale.engine_host import facts_of
from samewise.scale.records import (
    Job,
    JobKey,
    Lost,
    News,
    Progress,
    Refused,
    ReplicaGone,
    Started,
    refuse_other,
)
from samewise.scale.remote_engine import LIMITS, RemoteEngine
from samewise.testing import tiny_engine
from samewise.types import Delta, Finish, Grammar, Received, Request, Sampling

SCHEMA = Grammar.json_schema(
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 30}}, "required": ["a"]}
)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 5, "top_p": 0.9, "logprobs": 3},
    "several": {"temperature": 1.0, "seed": 1, "n": 3, "logprobs": 0},
    "penalties": {
        "temperature": 0.7, "seed": 2, "presence_penalty": 0.8, "frequency_penalty": 0.5,
        "repetition_penalty": 1.2, "min_tokens": 20, "stop_token_ids": tuple(range(60, 90)),
    },
    "stop": {"temperature": 1.3, "seed": 3, "stop": ["e", "\ufffd\ufffd", "zz"], "min_tokens": 15},
    "prompt": {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 20},
    "prediction": {"temperature": 0.0, "prediction": "hello world"},
    "bias": {"temperature": 1.0, "seed": 8, "logit_bias": {70: 5.0}, "bad_words": ["a", "bc"]},
    "unverified": {"temperature": 0.0, "speculate": False},
    "grammar": {"temperature": 1.0, "seed": 4, "grammar": SCHEMA},
}  # fmt: skip


TOO_LARGE = BadParameter("grammar=regex: too large", param="grammar")


def make_engine(**settings: Any) -> Engine:
    return tiny_engine(max_num_seqs=32, **settings)


def params_of(case: str) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "ignore_eos": True} | CASES[case])


def result(output: RequestOutput) -> list[Any]:
    """Everything of an answer that is a function of the request."""
    return [output.prompt_token_ids, output.prompt_logprobs] + [
        (
            choice.index, choice.text, choice.token_ids, choice.token_logprobs, choice.logprobs,
            choice.finish_reason, choice.stop_reason, choice.seed, choice.cumulative_logprob.hex(),
            choice.accepted_prediction_tokens, choice.rejected_prediction_tokens,
        )
        for choice in output.outputs
    ]  # fmt: skip


async def answers(llm: AsyncLLM, cases: list[str]) -> list[tuple[list[Any], list[str]]]:
    """For each case the whole answer, and the text of each choice as it was streamed."""

    async def one(number: int, case: str) -> tuple[list[Any], list[str]]:
        params = params_of(case)
        texts = [""] * params.n
        with await llm.open(f"{case} {number % 3}: once upon a time", params) as reader:
            while chunks := await reader.next_chunks():
                for chunk in chunks:
                    texts[chunk.index] += chunk.text
            return result(reader.output()), texts

    return list(await asyncio.gather(*(one(i, case) for i, case in enumerate(cases))))


def over(replicas: LocalReplicas) -> AsyncLLM:
    return AsyncLLM.over(RemoteEngine(facts_of(make_engine()), replicas))


@pytest.fixture(scope="module")
def wanted() -> list[tuple[list[Any], list[str]]]:
    async def alone() -> list[tuple[list[Any], list[str]]]:
        async with AsyncLLM.over(make_engine()) as llm:
            return await answers(llm, [*CASES, *CASES])

    return asyncio.run(asyncio.wait_for(alone(), 240))


@pytest.mark.parametrize("kill_after", [None, 31, 90])
def test_answers_are_those_of_one_engine(
    wanted: list[tuple[list[Any], list[str]]], kill_after: int | None
) -> None:
    async def main() -> None:
        # Without drafts every delta has one token, however fast drafts are: enough for several deaths.
        settings = {} if kill_after is None else {"proposer": "none"}
        replicas = LocalReplicas([make_engine(**settings), make_engine(**settings)], kill_after)
        async with over(replicas) as llm:
            assert await answers(llm, [*CASES, *CASES]) == wanted
            stats = await llm.stats()
        assert (stats["failovers"] > 0) is (kill_after is not None)
        assert (replicas.num_killed > 1) is (kill_after is not None)
        assert len(replicas.resumed) >= replicas.num_killed
        replicas.close()

    for text, streamed in ((o[0], o[1]) for o in wanted):
        assert [choice[1] for choice in text[2:]] == streamed
    asyncio.run(asyncio.wait_for(main(), 240))


def test_a_message_that_is_lost_leaves_no_hole(wanted: list[tuple[list[Any], list[str]]]) -> None:
    async def main() -> None:
        engines = [make_engine(proposer="none") for _ in range(2)]
        replicas = LocalReplicas(engines, lose_every=40)
        async with over(replicas) as llm:
            assert await answers(llm, [*CASES, *CASES]) == wanted
            stats = await llm.stats()
        assert replicas.num_lost > 3
        assert (
            stats["failovers"] >= replicas.num_lost / 2
        )  # two of one answer may be lost before it is noticed
        replicas.close()

    asyncio.run(asyncio.wait_for(main(), 240))


def test_nothing_is_left_when_clients_go_while_replicas_die() -> None:
    async def ask_and_leave(llm: AsyncLLM, number: int) -> None:
        """Read some chunks of a stream of several choices, and go."""
        params = SamplingParams(max_tokens=90, ignore_eos=True, seed=number, n=1 + number % 3)
        left = 10 + 4 * number
        with await llm.open(f"{number % 4}: once upon a time", params) as reader:
            while left > 0:
                chunks = await reader.next_chunks()
                assert chunks
                left -= len(chunks)

    async def main() -> None:
        engines = [make_engine(proposer="none") for _ in range(2)]
        replicas = LocalReplicas(engines, kill_after=37)
        async with over(replicas) as llm:
            await asyncio.gather(*(ask_and_leave(llm, number) for number in range(16)))
            while llm._engine._asked:
                await asyncio.sleep(0.01)
        assert replicas.num_killed > 3
        replicas.close()  # after all that the engines were told
        for engine in engines:
            while not engine.idle:
                engine.step()
            engine.check()
            stats = engine.stats()
            assert (stats["running"], stats["waiting"]) == (0, 0)
            assert stats["pages_available"] == stats["pages"]

    asyncio.run(asyncio.wait_for(main(), 240))


class NoReplicas:
    """Replicas that only note what they are told; the test says what they answer."""

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self.names = names  # of those that report
        self.jobs: list[Job] = []
        self.ended: list[JobKey] = []

    def connect(self, inbox: Callable[[News | None], None]) -> None:
        self.inbox = inbox

    def start(self, job: Job, delay: float) -> None:
        self.jobs.append(job)

    def end(self, key: JobKey, replica: str | None) -> None:
        self.ended.append(key)

    def stats(self) -> dict[str, dict[str, Any]]:
        return {name: {} for name in self.names}

    def close(self) -> None: ...


def remote(names: tuple[str, ...] = (), **options: Any) -> tuple[RemoteEngine, NoReplicas]:
    replicas = NoReplicas(names)
    return RemoteEngine(facts_of(make_engine()), replicas, **options), replicas


def test_a_request_that_loses_replica_after_replica_ends_with_an_error() -> None:
    engine, replicas = remote()
    engine.add(Request(engine.new_id(), (1, 2), Sampling(), 4))
    for _ in range(LIMITS.started - 1):
        replicas.inbox(Lost(replicas.jobs[-1].key, "it died", started=True))
        assert engine.step() == []
    replicas.inbox(Lost(replicas.jobs[-1].key, "it died", started=True))
    (delta,) = engine.step()
    assert delta.finish is Finish.ERROR
    assert len(replicas.jobs) == LIMITS.started
    assert len({job.key for job in replicas.jobs}) == LIMITS.started
    assert engine.idle


def test_a_request_given_up_is_a_failed_request_for_its_reader() -> None:
    class Dying(NoReplicas):
        def start(self, job: Job, delay: float) -> None:
            self.inbox(Lost(job.key, "it died", started=True))

    async def main() -> None:
        replicas = Dying()
        async with AsyncLLM.over(RemoteEngine(facts_of(make_engine()), replicas)) as llm:
            with pytest.raises(RequestFailed):
                await llm.generate("hello", SamplingParams(max_tokens=4))

    asyncio.run(asyncio.wait_for(main(), 240))


def test_a_replica_of_another_contract_is_not_used_and_avoided() -> None:
    engine, replicas = remote()
    engine.add(Request(engine.new_id(), (1, 2), Sampling(), 4))
    key = replicas.jobs[0].key
    replicas.inbox(Started(key, "r0", "sw-other"))
    assert engine.step() == []
    assert replicas.ended == [key]
    assert replicas.jobs[1].key.attempt == 1
    assert replicas.jobs[1].avoid == ("r0",)


def test_contracts_that_differ_are_refused_by_the_facts_that_differ() -> None:
    first, other = make_engine().contract, tiny_engine(dtype="bfloat16").contract
    refuse_other(first, make_engine().contract, "r1")
    with pytest.raises(GuaranteeLost, match=r"replica r1 .*dtype is .*bfloat16, not .*float32"):
        refuse_other(first, other, "r1")


def test_a_replica_that_was_lost_is_avoided() -> None:
    engine, replicas = remote()
    engine.add(Request(engine.new_id(), (1, 2), Sampling(), 4))
    replicas.inbox(Started(replicas.jobs[0].key, "r0", engine.contract.id))
    replicas.inbox(ReplicaGone("r0", "it died"))
    assert engine.step() == []
    assert [job.avoid for job in replicas.jobs] == [(), ("r0",)]


def test_a_job_says_what_its_router_has_under_way_where() -> None:
    engine, replicas = remote()

    def add() -> Job:
        engine.add(Request(engine.new_id(), (1, 2), Sampling(), 4))
        return replicas.jobs[-1]

    for replica in ("r0", "r0", "r1"):
        replicas.inbox(Started(add().key, replica, engine.contract.id))
        engine.step()
    assert add().loads == {"r0": 2, "r1": 1}
    replicas.inbox(Progress(replicas.jobs[0].key, Received(), delta_of(replicas.jobs[0], (5,), Finish.STOP)))
    replicas.inbox(ReplicaGone("r1", "it died"))
    engine.step()
    assert replicas.jobs[-1].loads == {"r0": 1}


def lose(engine: RemoteEngine, replicas: NoReplicas, news: Callable[[Job], News]) -> Job:
    """Have the newest job begun by replica r0 and then lost; returns the job that replaces it."""
    job = replicas.jobs[-1]
    replicas.inbox(Started(job.key, "r0", engine.contract.id))
    replicas.inbox(news(job))
    assert engine.step() == []
    assert replicas.jobs[-1] is not job
    return replicas.jobs[-1]


@pytest.mark.parametrize(
    "news",
    [
        lambda job: ReplicaGone("r0", "it died"),
        lambda job: Lost(job.key, "its engine has stopped", started=True),
        lambda job: Lost(job.key, "its engine has stopped", started=False, replica="r0"),
        lambda job: Progress(job.key, Received(1, 0), delta_of(job, (5,))),
    ],
)
def test_a_replica_that_failed_is_avoided_for_a_while(news: Callable[[Job], News]) -> None:
    seconds = [100.0]
    engine, replicas = remote(clock=lambda: seconds[0])
    engine.add(Request(engine.new_id(), (1, 2), Sampling(), 4))
    assert lose(engine, replicas, news).avoid == ("r0",)
    seconds[0] += LIMITS.avoided - 1
    engine.add(Request(engine.new_id(), (1, 2), Sampling(), 4))
    assert replicas.jobs[-1].avoid == ("r0",)
    seconds[0] += 2
    engine.add(Request(engine.new_id(), (1, 2), Sampling(), 4))
    assert replicas.jobs[-1].avoid == ()


def delta_of(job: Job, tokens: tuple[int, ...], finish: Finish | None = None) -> Delta:
    return Delta(job.key.number, tokens, (0.0,) * len(tokens), ((),) * len(tokens), finish)


def test_an_answer_goes_on_where_the_message_before_it_ended() -> None:
    engine, replicas = remote()
    engine.add(Request(engine.new_id(), (1, 2), Sampling(), 9))
    first = replicas.jobs[0]
    replicas.inbox(Progress(first.key, Received(), delta_of(first, (5, 6))))
    replicas.inbox(Progress(first.key, Received(3, 0), delta_of(first, (8,), Finish.STOP)))
    (delta,) = engine.step()
    assert (delta.tokens, delta.finish) == ((5, 6), None)
    assert replicas.ended == [first.key]
    again = replicas.jobs[1]
    assert again.request.output == (5, 6)
    replicas.inbox(Progress(again.key, Received(2, 0), delta_of(again, (7, 8), Finish.STOP)))
    (delta,) = engine.step()
    assert (delta.tokens, delta.finish) == ((7, 8), Finish.STOP)
    assert engine.idle


def test_a_mistake_that_a_replica_finds_ends_the_request_with_its_error() -> None:
    class Refusing(NoReplicas):
        def start(self, job: Job, delay: float) -> None:
            self.jobs.append(job)
            self.inbox(Refused(job.key, TOO_LARGE, "r1" if "r0" in job.avoid else "r0"))

    async def main() -> None:
        replicas = Refusing()
        async with AsyncLLM.over(RemoteEngine(facts_of(make_engine()), replicas)) as llm:
            with pytest.raises(BadParameter, match="too large") as refused:
                await llm.generate("hello", SamplingParams(max_tokens=4, n=2))
        assert refused.value.param == "grammar"
        assert len(replicas.jobs) == 4  # two for each choice

    asyncio.run(asyncio.wait_for(main(), 240))


def test_a_limit_of_one_machine_does_not_end_an_answer_that_has_begun() -> None:
    engine, replicas = remote()
    engine.add(Request(engine.new_id(), (1, 2), Sampling(), 9))
    first = replicas.jobs[0]
    replicas.inbox(Started(first.key, "r0", engine.contract.id))
    replicas.inbox(Progress(first.key, Received(), delta_of(first, (5, 6))))
    replicas.inbox(ReplicaGone("r0", "it died"))
    engine.step()
    for _ in range(3):  # r1 is the only one that runs
        replicas.inbox(Refused(replicas.jobs[-1].key, TOO_LARGE, "r1"))
        assert engine.step() == []
        assert set(replicas.jobs[-1].avoid) == {"r0", "r1"}
    again = replicas.jobs[-1]
    assert again.request.output == (5, 6)
    replicas.inbox(Started(again.key, "r2", engine.contract.id))
    replicas.inbox(Progress(again.key, Received(2, 0), delta_of(again, (7,), Finish.STOP)))
    assert [(delta.tokens, delta.finish) for delta in engine.step()] == [((7,), Finish.STOP)]


def test_two_replicas_that_refuse_a_request_are_believed() -> None:
    engine, replicas = remote()
    for tokens in ((), (5, 6)):
        engine.add(Request(engine.new_id(), (1, 2), Sampling(), 9))
        job = replicas.jobs[-1]
        if tokens:
            replicas.inbox(Progress(job.key, Received(), delta_of(job, tokens)))
            replicas.inbox(Lost(job.key, "it died", started=True))
            engine.step()
        for replica in ("r0", "r1"):
            replicas.inbox(Refused(replicas.jobs[-1].key, TOO_LARGE, replica))
            deltas = engine.step()
        assert [(delta.finish, delta.error) for delta in deltas] == [(Finish.ERROR, TOO_LARGE)]


def test_a_request_that_fails_on_one_replica_is_tried_once_on_another() -> None:
    engine, replicas = remote()
    engine.add(Request(engine.new_id(), (1, 2), Sampling(), 9))
    first = replicas.jobs[0]
    replicas.inbox(Started(first.key, "r0", engine.contract.id))
    replicas.inbox(Progress(first.key, Received(), delta_of(first, (5, 6))))
    replicas.inbox(Progress(first.key, Received(2, 0), delta_of(first, (), Finish.ERROR)))
    assert [(delta.tokens, delta.finish) for delta in engine.step()] == [((5, 6), None), ((), None)]
    again = replicas.jobs[1]
    assert (again.request.output, again.avoid) == ((5, 6), ("r0",))
    engine.add(Request(engine.new_id(), (1, 2), Sampling(), 9))
    assert replicas.jobs[2].avoid == ()  # the replica itself is well
    replicas.inbox(Started(again.key, "r1", engine.contract.id))
    replicas.inbox(Progress(again.key, Received(2, 0), delta_of(again, (), Finish.ERROR)))
    assert [delta.finish for delta in engine.step()] == [Finish.ERROR]
    assert len(replicas.jobs) == 3


def test_more_requests_than_may_wait_are_refused() -> None:
    engine, _ = remote(max_queued=2)
    for _ in range(32 + 2):  # 32 run at once
        engine.add(Request(engine.new_id(), (1, 2), Sampling(), 4))
    with pytest.raises(QueueFull, match="max_queued is 2"):
        engine.add(Request(engine.new_id(), (1, 2), Sampling(), 4))


def add_many(engine: RemoteEngine, num: int, **fields: Any) -> list[int]:
    """The ids of so many new requests."""
    numbers = [engine.new_id() for _ in range(num)]
    for number in numbers:
        engine.add(Request(number, (1, 2), Sampling(), 4, **fields))
    return numbers


def finish(engine: RemoteEngine, replicas: NoReplicas, number: int) -> None:
    (job,) = (job for job in replicas.jobs if job.key.number == number)
    replicas.inbox(Progress(job.key, Received(), delta_of(job, (5,), Finish.STOP)))
    engine.step()


def started(replicas: NoReplicas) -> list[int]:
    return [job.key.number for job in replicas.jobs]


def test_replicas_get_no_more_requests_than_they_have_places() -> None:
    engine, replicas = remote(("r0",), num_replicas=3, num_places=4)
    numbers = add_many(engine, 20)
    assert started(replicas) == numbers[:4]
    finish(engine, replicas, 2)
    assert started(replicas) == numbers[:5]
    engine.abort(5)  # which waits
    engine.abort(3)
    assert started(replicas) == [*numbers[:5], 6]
    assert [key.number for key in replicas.ended] == [3]
    replicas.names = ("r0", "r1", "r2")
    finish(engine, replicas, 0)
    assert started(replicas) == [*numbers[:5], *numbers[6:16]]
    replicas.names = ()  # nothing is known of them
    finish(engine, replicas, 1)
    assert started(replicas) == [*numbers[:5], *numbers[6:17]]


def test_a_request_of_another_key_does_not_wait_behind_all_of_the_first() -> None:
    engine, replicas = remote(num_places=64)
    add_many(engine, 300, owner=b"a")
    assert len(replicas.jobs) < 32
    (number,) = add_many(engine, 1, owner=b"b")
    assert started(replicas)[-1] == number


def test_waiting_requests_go_by_priority_and_then_by_arrival() -> None:
    engine, replicas = remote(num_places=1)
    first, *later = (add_many(engine, 1, priority=priority)[0] for priority in (9, 1, 0, -1, 0))
    for number in (first, later[2], later[1], later[3], later[0]):
        assert started(replicas)[-1] == number
        finish(engine, replicas, number)
    assert engine.idle


def test_a_request_that_goes_on_elsewhere_does_not_wait_again() -> None:
    engine, replicas = remote(num_places=1)
    number, waiting = add_many(engine, 2)
    replicas.inbox(Lost(replicas.jobs[0].key, "it died", started=True))
    assert engine.step() == []
    assert started(replicas) == [number, number]
    engine.recover()
    assert started(replicas) == [number, number, number]
    assert engine.stats()["waiting"] == 2
    engine.recover({number: None})
    assert started(replicas) == [number, number, number, waiting]


def test_recovery_starts_from_what_the_caller_has() -> None:
    engine, replicas = remote()
    numbers = [engine.new_id() for _ in range(3)]
    for number in numbers:
        engine.add(Request(number, (1, 2), Sampling(), 9))
        job = replicas.jobs[-1]
        replicas.inbox(Progress(job.key, Received(), delta_of(job, (5, 6, 7))))
    assert len(engine.step()) == 3
    engine.recover({numbers[0]: Received(1), numbers[1]: None})
    assert [job.request.output for job in replicas.jobs[3:]] == [(5,), (5, 6, 7)]
    assert [key.number for key in replicas.ended] == numbers
