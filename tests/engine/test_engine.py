"""Engine: requests in, deltas out, one step at a time; load, drafts and launching ahead change no bit."""

import random
from typing import Any

import pytest

from samewise.engine import Engine
from samewise.errors import BadParameter
from samewise.testing import Adversary, Jitter, Scripted, Transcript, preempting, run, submit, tiny_engine
from samewise.types import Ask, Delta, Finish, Proposal, Sampling

PAGE_BYTES = 12288  # of a KV page of the tiny llama
PROMPTS = [[65, 66, 67], [70] * 20, list(range(40, 75)), [1], [9, 8, 7, 6]]
ASKS = [(prompt, Sampling(temperature=float(i % 2), seed=i), 5 + 3 * i) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def reference() -> list[Transcript]:
    return [run(tiny_engine(), [ask])[0] for ask in ASKS[:1]] + run(tiny_engine(), ASKS)[1:]


def drain(engine: Engine) -> dict[int, list[Delta]]:
    """Step until idle; the deltas of each request."""
    deltas: dict[int, list[Delta]] = {}
    while not engine.idle:
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
        engine.check()
    return deltas


def all_pages_free(engine: Engine) -> bool:
    engine.check()
    stats = engine.stats()
    return bool(stats["pages_available"] == stats["pages"])


@pytest.mark.parametrize("ahead", [False, True])
def test_frames_launched_ahead_change_no_bit(ahead: bool, reference: list[Transcript]) -> None:
    engine = tiny_engine(ahead=ahead)
    assert run(engine, ASKS, arrivals=[0, 2, 1, 7, 3]) == reference
    assert all_pages_free(engine)


@pytest.mark.parametrize("seed", range(2))
def test_preemptions_and_aborts_with_a_small_kv_cache_change_no_bit(
    seed: int, reference: list[Transcript]
) -> None:
    engine = tiny_engine(ahead=True, kv_memory=8 * PAGE_BYTES, max_model_len=64, max_num_seqs=3)
    rng = random.Random(seed)
    to_abort: list[int] = []

    def step(engine: Engine) -> list[Delta]:
        if rng.random() < 0.4:
            to_abort.append(submit(engine, [rng.randrange(300) for _ in range(9)], Sampling(), max_tokens=20))
        if to_abort and rng.random() < 0.4:
            engine.abort(to_abort.pop(rng.randrange(len(to_abort))))
        return preempting(engine, seed) if rng.random() < 0.5 else engine.step()

    order = list(range(len(ASKS)))
    rng.shuffle(order)
    transcripts = run(
        engine, [ASKS[i] for i in order], step=lambda e: step(e) if e.stats()["requests"] < 16 else e.step()
    )
    assert transcripts == [reference[i] for i in order]
    assert all_pages_free(engine)


def test_a_stop_token_ends_an_answer_at_its_position(reference: list[Transcript]) -> None:
    prompt, sampling, max_tokens = ASKS[2]
    tokens = reference[2].tokens
    engines = [tiny_engine(ahead=ahead) for ahead in (False, True)]
    for at in (0, 3, len(tokens) - 1):
        stop = Sampling(
            temperature=sampling.temperature, seed=sampling.seed, stop_ids=frozenset({tokens[at]})
        )
        for engine in engines:
            (transcript,) = run(engine, [(prompt, stop, max_tokens)])
            assert transcript.tokens == tokens[: tokens.index(tokens[at]) + 1]
            assert transcript.finish == "stop"
            assert all_pages_free(engine)


def test_each_step_gives_one_delta_and_the_last_has_the_finish_reason() -> None:
    engine = tiny_engine(proposer="none")
    one = submit(engine, [1, 2, 3], Sampling(), max_tokens=5)
    deltas = drain(engine)[one]
    assert [len(delta.tokens) for delta in deltas] == [1] * 5
    assert [delta.finish for delta in deltas] == [None] * 4 + [Finish.LENGTH]
    assert engine.step() == []
    assert engine.idle


def test_accepted_guesses_are_committed_in_one_frame(reference: list[Transcript]) -> None:
    tokens = PROMPTS[0] + reference[0].tokens
    engine = tiny_engine(make_proposer=lambda _: Scripted(lambda ask: tokens[len(ask.tokens) :]))
    (transcript,) = run(engine, ASKS[:1])
    assert transcript == reference[0]
    stats = engine.stats()
    assert stats["frames"] == 2  # the prompt's, then one for all guesses
    assert (stats["guessed"], stats["rolled_back"]) == (stats["accepted"], 0)
    assert stats["proposer"] == "scripted"


def test_wrong_guesses_are_rolled_back_and_counted(reference: list[Transcript]) -> None:
    engine = tiny_engine(make_proposer=lambda parts: Adversary(parts.vocab, seed=4))
    assert run(engine, ASKS) == reference
    stats = engine.stats()
    assert stats["rolled_back"] > 0
    assert stats["guessed"] == stats["accepted"] + stats["rolled_back"]
    assert all_pages_free(engine)


def test_partly_accepted_drafts_change_no_bit(reference: list[Transcript]) -> None:
    engine = tiny_engine(make_proposer=lambda parts: Jitter(parts, scale=0.5))
    assert run(engine, ASKS) == reference
    assert engine.stats()["accepted"] > 0


class UnaskedProposer(Scripted):
    """Proposes more guesses than there is room for, for ids that were not asked about or have ended."""

    def __init__(self) -> None:
        super().__init__(lambda _: [])

    def propose(self, asks: list[Any]) -> list[Proposal]:
        return [Proposal(i, (3, 5, 7) * 9) for i in range(8)]


def test_guesses_that_were_not_asked_for_change_no_bit(reference: list[Transcript]) -> None:
    engine = tiny_engine(make_proposer=lambda _: UnaskedProposer())
    assert run(engine, ASKS, check=False) == reference
    assert all_pages_free(engine)


def test_guesses_for_unverified_requests_are_dropped() -> None:
    plain, proposed = tiny_engine(), tiny_engine(make_proposer=lambda _: UnaskedProposer())
    ask = [([65, 66, 67], Sampling(), 8)]
    assert [t.tokens for t in run(proposed, ask, verify=False, check=False)] == [
        t.tokens for t in run(plain, ask, verify=False)
    ]


def test_an_abort_at_any_step_frees_every_page(reference: list[Transcript]) -> None:
    engine = tiny_engine(enable_prefix_caching=False)
    for steps in range(6):
        ids = [
            submit(engine, prompt, sampling, max_tokens=max_tokens) for prompt, sampling, max_tokens in ASKS
        ]
        for _ in range(steps):
            engine.step()
        for i in ids:
            delta = engine.abort(i)
            assert delta is None or delta.finish is Finish.ABORT
            assert engine.abort(i) is None
        assert engine.scheduler.idle
        assert all_pages_free(engine)
    assert run(engine, ASKS) == reference


def test_an_ended_request_gives_no_further_delta() -> None:
    engine = tiny_engine()
    one = submit(engine, [1, 2, 3], Sampling(), max_tokens=50)
    for _ in range(5):
        engine.step()
    engine.end(one)
    assert one not in drain(engine)
    assert engine.stats()["finished"] == 1
    assert all_pages_free(engine)


@pytest.mark.parametrize("ahead", [False, True])
def test_preempting_between_steps_loses_no_delta(ahead: bool, reference: list[Transcript]) -> None:
    engine = tiny_engine(ahead=ahead)
    prompt, sampling, max_tokens = ASKS[0]
    one = submit(engine, prompt, sampling, max_tokens=max_tokens)
    transcript = Transcript()
    for n in range(400):
        if engine.idle:
            break
        if n % 5 == 4:
            engine.preempt(one)
        for delta in engine.step():
            transcript.take(delta)
    assert transcript == reference[0]
    assert engine.preempt(one) is False


def test_request_ids_are_never_reused() -> None:
    engine = tiny_engine()
    one = submit(engine, [1], Sampling(), max_tokens=1)
    drain(engine)
    two = submit(engine, [1], Sampling(), max_tokens=1)
    engine.abort(two)
    assert submit(engine, [1], Sampling(), max_tokens=1) == two + 1 == one + 2


def test_unverified_tokens_are_counted_and_never_cached() -> None:
    engine = tiny_engine()
    (transcript,) = run(engine, [([5] * 16, Sampling(), 40)], verify=False)
    stats = engine.stats()
    assert stats["unverified_tokens"] == 39  # the first token comes from the prompt's frame
    assert stats["pages_indexed"] == 1
    run(engine, [([5] * 16 + transcript.tokens, Sampling(), 2)])
    assert engine.stats()["cached_tokens"] == 16


def test_unverified_requests_change_no_bit_of_verified_ones(reference: list[Transcript]) -> None:
    engine = tiny_engine()
    transcripts = {submit(engine, p, s, max_tokens=n): Transcript() for p, s, n in ASKS}
    for _ in range(3):
        submit(engine, [7, 7, 7], Sampling(), max_tokens=12, verify=False)
    while not engine.idle:
        for delta in engine.step():
            if delta.request_id in transcripts:
                transcripts[delta.request_id].take(delta)
        engine.check()
    assert list(transcripts.values()) == reference


def test_an_unknown_proposer_is_refused_by_name() -> None:
    with pytest.raises(BadParameter, match="proposer='magic': choose one of auto, none"):
        tiny_engine(proposer="magic")


def test_the_engine_goes_on_after_a_proposer_failed(reference: list[Transcript]) -> None:
    failing = [True]

    def script(_: object) -> list[int]:
        if failing[0]:
            raise ZeroDivisionError
        return []

    engine = tiny_engine(make_proposer=lambda _: Scripted(script))
    one = submit(engine, [1, 2, 3], Sampling(), max_tokens=5)
    with pytest.raises(ZeroDivisionError):
        drain(engine)
    engine.abort(one)
    failing[0] = False
    assert all_pages_free(engine)
    assert run(engine, ASKS) == reference


class MeetLog(Scripted):
    """Logs the ids it meets and is asked about, in order. It makes no guesses."""

    def __init__(self, log: list[tuple[str, list[int]]]) -> None:
        super().__init__(lambda _: [])
        self.log = log

    def meet(self, asks: list[Ask]) -> None:
        self.log.append(("meet", [ask.seq_id for ask in asks]))
        assert all(ask.tokens for ask in asks)

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        # A prompt of one token needs no prefill: it may be asked about before it is met.
        self.log.append(("propose", [ask.seq_id for ask in asks if ask.prompt_len > 1]))
        return super().propose(asks)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_proposer_meets_each_request_once_before_it_is_asked_about_it(
    ahead: bool, reference: list[Transcript]
) -> None:
    log: list[tuple[str, list[int]]] = []
    engine = tiny_engine(make_proposer=lambda _: MeetLog(log), ahead=ahead)
    assert run(engine, ASKS, arrivals=[0, 2, 1, 7, 3]) == reference
    met = [seq_id for what, ids in log if what == "meet" for seq_id in ids]
    assert sorted(met) == list(range(len(ASKS)))
    seen: set[int] = set()
    for what, ids in log:
        assert what == "meet" or seen.issuperset(ids)
        seen.update(ids)
    for settings in ({"verify": False}, {"speculate": False}):
        submit(engine, [1, 2, 3], Sampling(), max_tokens=3, **settings)
    aborted = submit(engine, [1, 2, 3], Sampling(), max_tokens=3)
    engine.abort(aborted)
    drain(engine)
    assert sorted(met) == sorted(seq_id for what, ids in log if what == "meet" for seq_id in ids)


def test_many_long_prompts_are_met_over_several_steps() -> None:
    log: list[tuple[str, list[int]]] = []
    engine = tiny_engine(
        make_proposer=lambda _: MeetLog(log), kv_memory=1200 * PAGE_BYTES, max_num_seqs=40, max_model_len=512
    )
    for i in range(20):
        submit(engine, [i + 1] * 400, Sampling(), max_tokens=2)
    engine.step()
    assert 1 < sum(len(ids) for what, ids in log if what == "meet") < 20
    drain(engine)
    assert sum(len(ids) for what, ids in log if what == "meet") == 20


@pytest.mark.parametrize("owner", [b"", b"one"])
def test_a_request_with_an_owner_is_in_a_frame_that_has_not_begun(owner: bytes) -> None:
    """On a CPU a frame runs when it lands: till then a request may take the place of a crowd's rows."""
    engine = tiny_engine(max_num_seqs=16, proposer="none")
    crowd = [submit(engine, [i, 5], Sampling(), max_tokens=9, owner=b"crowd") for i in range(8)]
    for _ in range(3):
        engine.step()
    late = submit(engine, [1, 2, 3], Sampling(), max_tokens=4, owner=owner)
    deltas = engine.step()
    assert {delta.request_id for delta in deltas} == ({late} if owner else set(crowd))
    tokens = [token for delta in [*deltas, *drain(engine).get(late, [])]
              if delta.request_id == late for token in delta.tokens]  # fmt: skip
    assert tokens == run(tiny_engine(), [([1, 2, 3], Sampling(), 4)])[0].tokens
    assert all_pages_free(engine)
