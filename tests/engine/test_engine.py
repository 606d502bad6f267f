"""Engine: requests in, deltas out, one step at a time; frames started ahead change nothing."""

import random
from typing import Any

import pytest

from samewise.engine import Engine
from samewise.errors import BadParameter, BadPrompt, CallerError
from samewise.llm import LLM
from samewise.params import SamplingParams
from samewise.testing import Adversary, Jitter, Scripted, Transcript, preempting, run, submit, tiny_engine
from samewise.types import Ask, Delta, Finish, Proposal, Sampling

PAGE_BYTES = 12288  # of the tiny llama
PROMPTS = [[65, 66, 67], [70] * 20, list(range(40, 75)), [1], [9, 8, 7, 6]]
ASKS = [(prompt, Sampling(temperature=float(i % 2), seed=i), 5 + 3 * i) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def reference() -> list[Transcript]:
    return [run(tiny_engine(), [ask])[0] for ask in ASKS[:1]] + run(tiny_engine(), ASKS)[1:]


def drain(engine: Engine) -> dict[int, list[Delta]]:
    found: dict[int, list[Delta]] = {}
    while not engine.idle:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
        engine.check()
    return found


def all_pages_back(engine: Engine) -> bool:
    engine.check()
    stats = engine.stats()
    return bool(stats["pages_available"] == stats["pages"])


@pytest.mark.parametrize("ahead", [False, True])
def test_frames_started_ahead_change_nothing(ahead: bool, reference: list[Transcript]) -> None:
    engine = tiny_engine(ahead=ahead)
    assert run(engine, ASKS, arrivals=[0, 2, 1, 7, 3]) == reference
    assert all_pages_back(engine)


@pytest.mark.parametrize("seed", range(2))
def test_ahead_and_tight_and_preempted_and_aborted(seed: int, reference: list[Transcript]) -> None:
    engine = tiny_engine(ahead=True, kv_memory=8 * PAGE_BYTES, max_model_len=64, max_num_seqs=3)
    rng = random.Random(seed)
    doomed: list[int] = []

    def step(engine: Engine) -> list[Delta]:
        if rng.random() < 0.4:
            doomed.append(submit(engine, [rng.randrange(300) for _ in range(9)], Sampling(), max_tokens=20))
        if doomed and rng.random() < 0.4:
            engine.abort(doomed.pop(rng.randrange(len(doomed))))
        return preempting(engine, seed) if rng.random() < 0.5 else engine.step()

    order = list(range(len(ASKS)))
    rng.shuffle(order)
    found = run(
        engine, [ASKS[i] for i in order], step=lambda e: step(e) if e.stats()["requests"] < 16 else e.step()
    )
    assert found == [reference[i] for i in order]
    assert all_pages_back(engine)


def test_stop_ids_end_a_chained_answer_where_they_stand(reference: list[Transcript]) -> None:
    prompt, sampling, most = ASKS[2]
    whole = reference[2].tokens
    engines = [tiny_engine(ahead=ahead) for ahead in (False, True)]
    for at in (0, 3, len(whole) - 1):
        stop = Sampling(temperature=sampling.temperature, seed=sampling.seed, stop_ids=frozenset({whole[at]}))
        for engine in engines:
            (found,) = run(engine, [(prompt, stop, most)])
            assert found.tokens == whole[: whole.index(whole[at]) + 1]
            assert found.finish == "stop"
            assert all_pages_back(engine)


def test_a_delta_per_step_and_the_last_one_says_why() -> None:
    engine = tiny_engine(proposer="none")
    one = submit(engine, [1, 2, 3], Sampling(), max_tokens=5)
    deltas = drain(engine)[one]
    assert [len(delta.tokens) for delta in deltas] == [1] * 5
    assert [delta.finish for delta in deltas] == [None] * 4 + [Finish.LENGTH]
    assert engine.step() == []
    assert engine.idle


def test_accepted_guesses_arrive_at_once(reference: list[Transcript]) -> None:
    whole = PROMPTS[0] + reference[0].tokens
    engine = tiny_engine(make_proposer=lambda _: Scripted(lambda ask: whole[len(ask.tokens) :]))
    (found,) = run(engine, ASKS[:1])
    assert found == reference[0]
    stats = engine.stats()
    assert stats["frames"] == 2  # the prompt's token, then all the rest
    assert (stats["guessed"], stats["rolled_back"]) == (stats["accepted"], 0)
    assert stats["proposer"] == "scripted"


def test_wrong_guesses_are_rolled_back_and_counted(reference: list[Transcript]) -> None:
    engine = tiny_engine(make_proposer=lambda parts: Adversary(parts.vocab, seed=4))
    assert run(engine, ASKS) == reference
    stats = engine.stats()
    assert stats["rolled_back"] > 0
    assert stats["guessed"] == stats["accepted"] + stats["rolled_back"]
    assert all_pages_back(engine)


def test_half_right_guesses(reference: list[Transcript]) -> None:
    engine = tiny_engine(make_proposer=lambda parts: Jitter(parts, scale=0.5))
    assert run(engine, ASKS) == reference
    assert engine.stats()["accepted"] > 0


class Shouting(Scripted):
    """Guesses for everybody, asked or not, alive or not, and more than there is room for."""

    def __init__(self) -> None:
        super().__init__(lambda _: [])

    def propose(self, asks: list[Any]) -> list[Proposal]:
        return [Proposal(i, (3, 5, 7) * 9) for i in range(8)]


def test_a_proposer_that_shouts_at_everybody_changes_nothing(reference: list[Transcript]) -> None:
    engine = tiny_engine(make_proposer=lambda _: Shouting())
    assert run(engine, ASKS, check=False) == reference
    assert all_pages_back(engine)


def test_a_proposer_that_shouts_leaves_those_who_opted_out_alone() -> None:
    plain, shouted = tiny_engine(), tiny_engine(make_proposer=lambda _: Shouting())
    ask = [([65, 66, 67], Sampling(), 8)]
    assert [t.tokens for t in run(shouted, ask, verify=False, check=False)] == [
        t.tokens for t in run(plain, ask, verify=False)
    ]


def test_an_abort_at_any_step_gives_every_page_back(reference: list[Transcript]) -> None:
    engine = tiny_engine(enable_prefix_caching=False)
    for steps in range(6):
        ids = [submit(engine, prompt, sampling, max_tokens=most) for prompt, sampling, most in ASKS]
        for _ in range(steps):
            engine.step()
        for i in ids:
            delta = engine.abort(i)
            assert delta is None or delta.finish is Finish.ABORT
            assert engine.abort(i) is None
        assert engine.scheduler.idle
        assert all_pages_back(engine)
    assert run(engine, ASKS) == reference


def test_ending_a_request_is_quiet_and_final() -> None:
    engine = tiny_engine()
    one = submit(engine, [1, 2, 3], Sampling(), max_tokens=50)
    for _ in range(5):
        engine.step()
    engine.end(one)
    assert one not in drain(engine)
    assert engine.stats()["finished"] == 1
    assert all_pages_back(engine)


@pytest.mark.parametrize("ahead", [False, True])
def test_preempting_between_steps_loses_no_delta(ahead: bool, reference: list[Transcript]) -> None:
    engine = tiny_engine(ahead=ahead)
    prompt, sampling, most = ASKS[0]
    one = submit(engine, prompt, sampling, max_tokens=most)
    found = Transcript()
    for n in range(400):
        if engine.idle:
            break
        if n % 5 == 4:
            engine.preempt(one)
        for delta in engine.step():
            found.take(delta)
    assert found == reference[0]
    assert engine.preempt(one) is False


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "says"),
    [
        ([], 4, "the prompt is empty"),
        ([320], 4, "holds 320; token ids of this model are 0 to 319"),
        ([1, -1], 4, "holds -1"),
        ([1, "a"], 4, "holds 'a'"),
        ([1] * 512, 1, "512 tokens and max_model_len is 512"),
    ],
)
def test_what_is_refused_leaves_no_trace(prompt: list[Any], max_tokens: int, says: str) -> None:
    engine = tiny_engine()
    with pytest.raises(BadPrompt, match=says):
        LLM.over(engine).generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=max_tokens))
    assert engine.idle
    assert engine.scheduler.counters.requests == 0


def test_ids_are_never_used_again() -> None:
    engine = tiny_engine()
    one = submit(engine, [1], Sampling(), max_tokens=1)
    drain(engine)
    two = submit(engine, [1], Sampling(), max_tokens=1)
    engine.abort(two)
    assert submit(engine, [1], Sampling(), max_tokens=1) == two + 1 == one + 2


def test_unverified_tokens_are_counted_and_never_cached() -> None:
    engine = tiny_engine()
    (found,) = run(engine, [([5] * 16, Sampling(), 40)], verify=False)
    stats = engine.stats()
    assert stats["unverified_tokens"] == 39  # the first comes from the prompt's frame
    assert stats["pages_indexed"] == 1
    run(engine, [([5] * 16 + found.tokens, Sampling(), 2)])
    assert engine.stats()["cached_tokens"] == 16


def test_verified_and_unverified_side_by_side(reference: list[Transcript]) -> None:
    engine = tiny_engine()
    found = {submit(engine, p, s, max_tokens=n): Transcript() for p, s, n in ASKS}
    for _ in range(3):
        submit(engine, [7, 7, 7], Sampling(), max_tokens=12, verify=False)
    while not engine.idle:
        for delta in engine.step():
            if delta.request_id in found:
                found[delta.request_id].take(delta)
        engine.check()
    assert list(found.values()) == reference


def test_an_unknown_proposer_is_refused_by_name() -> None:
    with pytest.raises(BadParameter, match="proposer='magic': choose one of auto, none"):
        tiny_engine(proposer="magic")


def test_weights_change_only_when_idle() -> None:
    engine = tiny_engine()
    submit(engine, [1, 2], Sampling(), max_tokens=3)
    with pytest.raises(CallerError, match="while requests are running"):
        engine.update_weights({})
    drain(engine)
    before = engine.contract
    assert engine.update_weights({}) == before


def test_a_proposer_that_fails_takes_nothing_with_it(reference: list[Transcript]) -> None:
    broken = [True]

    def script(_: object) -> list[int]:
        if broken[0]:
            raise ZeroDivisionError
        return []

    engine = tiny_engine(make_proposer=lambda _: Scripted(script))
    one = submit(engine, [1, 2, 3], Sampling(), max_tokens=5)
    with pytest.raises(ZeroDivisionError):
        drain(engine)
    engine.abort(one)
    broken[0] = False
    assert all_pages_back(engine)
    assert run(engine, ASKS) == reference


class Polite(Scripted):
    """Notes whom it meets, and when."""

    def __init__(self, log: list[tuple[str, list[int]]]) -> None:
        super().__init__(self._nothing)
        self.log = log

    def _nothing(self, _: object) -> list[int]:
        return []

    def meet(self, asks: list[Ask]) -> None:
        self.log.append(("meet", [ask.seq_id for ask in asks]))
        assert all(ask.tokens for ask in asks)

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        # A prompt of one token needs no reading, and may be asked about at once.
        self.log.append(("propose", [ask.seq_id for ask in asks if ask.prompt_len > 1]))
        return super().propose(asks)


@pytest.mark.parametrize("ahead", [False, True])
def test_whoever_will_be_asked_about_is_met_first_and_once(ahead: bool, reference: list[Transcript]) -> None:
    log: list[tuple[str, list[int]]] = []
    engine = tiny_engine(make_proposer=lambda _: Polite(log), ahead=ahead)
    assert run(engine, ASKS, arrivals=[0, 2, 1, 7, 3]) == reference
    met = [seq_id for what, ids in log if what == "meet" for seq_id in ids]
    assert sorted(met) == list(range(len(ASKS)))
    seen: set[int] = set()
    for what, ids in log:
        assert what == "meet" or seen.issuperset(ids)
        seen.update(ids)
    for settings in ({"verify": False}, {"speculate": False}):
        submit(engine, [1, 2, 3], Sampling(), max_tokens=3, **settings)
    gone = submit(engine, [1, 2, 3], Sampling(), max_tokens=3)
    engine.abort(gone)
    drain(engine)
    assert sorted(met) == sorted(seq_id for what, ids in log if what == "meet" for seq_id in ids)


def test_many_long_newcomers_are_met_over_several_steps() -> None:
    log: list[tuple[str, list[int]]] = []
    engine = tiny_engine(
        make_proposer=lambda _: Polite(log), kv_memory=1200 * PAGE_BYTES, max_num_seqs=40, max_model_len=512
    )
    for i in range(20):
        submit(engine, [i + 1] * 400, Sampling(), max_tokens=2)
    engine.step()
    assert 1 < sum(len(ids) for what, ids in log if what == "meet") < 20
    drain(engine)
    assert sum(len(ids) for what, ids in log if what == "meet") == 20
