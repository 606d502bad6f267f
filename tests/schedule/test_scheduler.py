"""The Scheduler against a fake model: the next token is a hash of the prefix, KV is a hash of the prefix.

A rule machine adds, aborts, ends and preempts at random over a pool so small that it preempts by
itself, with guesses that are right, wrong and half right. Whatever happens, every request gets the fake
model's own tokens, in order, none twice and none lost.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import product

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from samewise.errors import InvariantBroken, QueueFull
from samewise.schedule.limits import Limits
from samewise.schedule.scheduler import PATIENCE, Scheduler
from samewise.types import Ask, Delta, Finish, Proposal, Request, Sampling, Span, Truth, Verdict
from samewise.verify.judge import judge, trust

VOCAB, STOP = 6, 5
PAGE = 4


def next_token(prefix: list[int]) -> int:
    return sha256(bytes(prefix)).digest()[0] % VOCAB


def logprob(prefix: list[int], token: int) -> float:
    return -float(int.from_bytes(sha256(bytes([*prefix, 255, token])).digest()[:3], "little"))


def kv_of(prefix: list[int]) -> bytes:
    return sha256(b"kv" + bytes(prefix)).digest()


def expected_tokens(request: Request, max_model_len: int) -> tuple[list[int], Finish]:
    tokens = list(request.prompt)
    most = min(len(tokens) + request.max_tokens, max_model_len)
    while len(tokens) < most:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.sampling.stop_ids:
            return tokens[len(request.prompt) :], Finish.STOP
    return tokens[len(request.prompt) :], Finish.LENGTH


class FakeModel:
    """Replays spans over fake pages. Reading KV that is not that of the prefix is an error."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.lax: set[int] = set()  # who opted out: their KV may come from the fast path
        self.kv: dict[tuple[int, int], object] = {}

    def _slot(self, pages: Iterable[int], position: int) -> tuple[int, int]:
        return list(pages)[position // self.page], position % self.page

    def frame(self, spans: list[Span], before: list[int]) -> tuple[list[Verdict], list[int]]:
        """Verdicts, and what every row answered; `before` is what the rows of the frame before answered."""
        verdicts, answers = [], []
        for span in spans:
            inputs = span.inputs if span.source is None else (before[span.source],)
            verdict, rows = self.replay(span._replace(inputs=inputs))
            verdicts.append(verdict)
            answers += rows
        return verdicts, answers

    def replay(self, span: Span) -> tuple[Verdict, list[int]]:
        prefix = span.tokens[: span.start]
        assert len(prefix) == span.start, f"request {span.seq_id}: nobody knows what stands before its span"
        for p in range(span.start):
            found = self.kv.get(self._slot(span.pages, p))
            trusted = found == "fast" and span.seq_id in self.lax
            assert trusted or found == kv_of(prefix[: p + 1]), (
                f"request {span.seq_id}: junk below kv_len at {p}"
            )
        answers: list[int] = []
        logprobs: list[float] = []
        scores: list[float] = []
        for row, token in enumerate(span.inputs):
            prefix.append(token)
            self.kv[self._slot(span.pages, span.start + row)] = kv_of(prefix)
            answers.append(next_token(prefix))
            logprobs.append(logprob(prefix, answers[-1]))
            place = row - span.target_row
            if 0 <= place < len(span.targets):
                scores.append(logprob(prefix, span.targets[place]))
        told = slice(min(span.given - 1, len(answers)), None)
        truth = Truth(
            tuple(answers[told]),
            tuple(logprobs[told]),
            scores=tuple(scores),
            score_tops=((),) * len(scores),
        )
        return judge(span, truth), answers

    def decode(self, ask: Ask) -> Proposal:
        """The fast path: right tokens, KV of another make."""
        assert not ask.draft
        position = len(ask.tokens) - 1
        self.kv[self._slot(ask.pages, position)] = "fast"
        token = next_token(ask.tokens)
        return Proposal(ask.seq_id, (token,), (logprob(ask.tokens, token),))

    def scribble(self, ask: Ask) -> None:
        """What a drafter does: write scratch over everything above kv_len that it may."""
        for p in range(ask.kv_len, len(ask.pages) * self.page):
            self.kv[self._slot(ask.pages, p)] = "scratch"


@dataclass
class Seen:
    """What became public of one request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    finish: Finish | None = None

    def take(self, delta: Delta) -> None:
        assert self.finish is None, "a delta after the last one"
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.scores += delta.scores
        self.finish = delta.finish


class Loop:
    """The engine's loop over a fake model, with a frame in flight between steps."""

    def __init__(self, limits: Limits) -> None:
        self.scheduler, self.model, self.limits = Scheduler(limits), FakeModel(limits.page), limits
        self.seen: dict[int, Seen] = {}
        self.gone: set[int] = set()  # aborted, or ended by their reader
        self.kv_lens: dict[int, int] = {}
        self.flight: list[Span] = []
        self.result: tuple[list[Verdict], list[int]] | None = None
        self.num = 0
        self.guessing = False

    def add(self, prompt: list[int], max_tokens: int, **given: object) -> int:
        request = Request(self.num, tuple(prompt), given.pop("sampling", Sampling()), max_tokens, **given)  # type: ignore[arg-type]
        self.scheduler.add(request)
        self.seen[self.num] = Seen(request)
        if not request.verify:
            self.model.lax.add(self.num)
        self.num += 1
        return request.id

    def step(self, propose: object = None, how: str = "lazy") -> list[Delta]:
        """`lazy` runs a frame when it lands, `eager` when it starts, `chained` starts the next one first."""
        ahead = self.launch_ahead() if how == "chained" and propose is None else None
        deltas = self.land()
        if ahead is None:
            self.scheduler.admit()
            free = self.scheduler.asks(verified=False)
            if callable(propose):
                self.draft(propose)
            self.flight = self.scheduler.spans()
            self.check_frame(self.flight)
            self.result = self.model.frame(self.flight, []) if how != "lazy" else None
            riding = {span.seq_id for span in self.flight}
            free = [a for a in free if a.seq_id not in riding and self.scheduler.is_running(a.seq_id)]
            trusted = [trust(self.model.decode(ask), ask.kv_len) for ask in free]
            deltas += self.publish(self.scheduler.commit(trusted))
        else:
            self.flight, self.result = ahead
        self.scheduler.check()
        return deltas

    def draft(self, propose: Callable[[Ask], list[int]]) -> None:
        self.guessing = True  # an engine that guesses never chains
        asks = self.scheduler.asks(verified=True)
        for ask in asks:
            self.model.scribble(ask)
        self.scheduler.extend(
            [
                Proposal(ask.seq_id, tuple(propose(ask)), more=(ask.seq_id + len(ask.tokens)) % 3 > 0)
                for ask in asks
            ]
        )

    def launch_ahead(self) -> tuple[list[Span], tuple[list[Verdict], list[int]]] | None:
        """As the engine does where the device runs beside the host."""
        if not self.flight or self.guessing:
            return None
        if self.result is None:
            self.result = self.model.frame(self.flight, [])
        self.scheduler.admit()
        spans = self.scheduler.spans_ahead(self.flight)
        self.check_frame(spans)
        return (spans, self.model.frame(spans, self.result[1])) if spans else None

    def land(self) -> list[Delta]:
        verdicts, _ = self.result or self.model.frame(self.flight, [])
        self.flight, self.result = [], None
        return self.publish(self.scheduler.commit(verdicts))

    def publish(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            assert delta.request_id not in self.gone, "a delta for somebody who left"
            self.seen[delta.request_id].take(delta)
        return deltas

    def check_frame(self, spans: list[Span]) -> None:
        limits = self.limits
        assert sum(len(span.inputs) for span in spans) <= limits.frame_rows
        assert len({span.seq_id for span in spans}) == len(spans), "one span each"
        written: list[tuple[int, int]] = []
        for span in spans:
            assert span.inputs
            assert span.given >= 1
            reach = range(span.start, span.start + len(span.inputs))
            assert reach.stop <= min(len(span.pages) * limits.page, limits.max_model_len)
            if span.source is not None:
                assert (len(span.inputs), span.given) == (1, 1)
                written += [(span.pages[p // limits.page], p % limits.page) for p in reach]
                continue
            assert list(span.inputs[: span.given]) == span.tokens[reach.start : reach.stop][: span.given]
            written += [(span.pages[p // limits.page], p % limits.page) for p in reach]
        assert len(set(written)) == len(written), "two rows write to one slot"
        assert all(page != 0 for page, _ in written)

    def kv_never_goes_back(self) -> None:
        """Except by preemption, which takes a sequence out of the running."""
        now = {seq_id: seq.kv_len for seq_id, seq in self.scheduler._running.items()}
        for seq_id, kv_len in now.items():
            assert kv_len >= self.kv_lens.get(seq_id, 0)
        self.kv_lens = now

    def check_prefixes(self) -> None:
        for seen in self.seen.values():
            wanted, finish = expected_tokens(seen.request, self.limits.max_model_len)
            assert seen.tokens == wanted[: len(seen.tokens)]
            if seen.finish is not None and seen.request.id not in self.gone:
                assert (seen.tokens, seen.finish) == (wanted, finish)
            prompt = list(seen.request.prompt)
            whole = prompt + seen.tokens
            starts = range(len(prompt), len(whole))
            assert seen.logprobs == [logprob(whole[:p], whole[p]) for p in starts]
            first = seen.request.first_scored
            owed = (
                [] if first is None else [logprob(prompt[:p], prompt[p]) for p in range(first, len(prompt))]
            )
            assert seen.scores == (
                owed if seen.tokens or seen.finish is Finish.LENGTH else owed[: len(seen.scores)]
            )

    def drain(self, propose: object = None, how: str = "lazy") -> int:
        """Steps until idle. Nobody starves, so it is bounded by the work there is."""
        live = [s.request for i, s in self.seen.items() if s.finish is None and i not in self.gone]
        bound = 10 + 2 * (1 + self.limits.deadline * self.guessing) * sum(
            len(r.prompt) + r.max_tokens + 2 for r in live
        )
        steps = 0
        while not self.scheduler.idle or self.flight:
            self.step(propose, how)
            steps += 1
            assert steps <= bound, f"still running after {bound} steps: {self.scheduler.running_ids()}"
        self.check_prefixes()
        self.scheduler.check()
        for seq_id, seen in self.seen.items():
            assert seq_id in self.gone or seen.finish is not None, f"request {seq_id} was lost"
        assert self.scheduler.index.num_available == self.limits.num_pages - 1
        return steps


PREFIXES = ([1], [1, 2, 3], [0] * 9, [1, 2, 3, 4, 0, 1, 2, 3, 1])


class Storm(RuleBasedStateMachine):
    """Everything at once."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: Loop | None = None

    @precondition(lambda self: self.loop is None)
    @rule(
        num_pages=st.integers(8, 14),
        frame_rows=st.integers(1, 12),
        max_num_seqs=st.integers(1, 5),
        caching=st.booleans(),
        guessing=st.booleans(),
    )
    def begin(
        self, num_pages: int, frame_rows: int, max_num_seqs: int, caching: bool, guessing: bool
    ) -> None:
        self.ways = ("drafting", "lazy", "eager") if guessing else ("chained", "chained", "eager")
        self.loop = Loop(
            Limits(
                num_pages,
                PAGE,
                frame_rows,
                max_num_seqs,
                max_model_len=26,
                max_draft=5,
                prefix_caching=caching,
            )
        )

    @precondition(lambda self: self.loop is not None and len(self.loop.seen) < 12)
    @rule(
        head=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(0, VOCAB - 1), max_size=8),
        max_tokens=st.integers(0, 12),
        verify=st.sampled_from([True, True, True, False]),
        stops=st.booleans(),
        kind=st.sampled_from(["plain", "plain", "plain", "prompt_logprobs", "score"]),
        salt=st.sampled_from([b"", b"", b"other"]),
        data=st.data(),
    )
    def add(
        self,
        head: list[int],
        tail: list[int],
        max_tokens: int,
        verify: bool,
        stops: bool,
        kind: str,
        salt: bytes,
        data: st.DataObject,
    ) -> None:
        assert self.loop is not None
        prompt = head + tail
        given: dict[str, object] = {"verify": verify, "salt": salt}
        given["sampling"] = Sampling(stop_ids=frozenset({STOP} if stops else ()))
        if kind == "prompt_logprobs":
            given["prompt_logprobs"] = 0
        if kind == "score":
            given["score_from"] = data.draw(st.integers(1, len(prompt)))
            max_tokens = 0
        live = [i for i, seen in self.loop.seen.items() if seen.request.prompt == tuple(prompt)]
        if live:
            given["leader"] = data.draw(st.sampled_from([None, *live]))
        self.loop.add(prompt, max_tokens, **given)

    @precondition(lambda self: self.loop is not None)
    @rule(
        right=st.lists(st.booleans(), min_size=5, max_size=5),
        way=st.integers(0, 2),
    )
    def step(self, right: list[bool], way: int) -> None:
        assert self.loop is not None
        how = self.ways[way]
        self.loop.step(drafting(right) if how == "drafting" else None, how)
        self.loop.kv_never_goes_back()

    @precondition(lambda self: self.loop is not None and self.loop.seen)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        assert self.loop is not None
        seq_id = data.draw(st.sampled_from(sorted(self.loop.seen)))
        known = self.loop.seen[seq_id].finish is None and seq_id not in self.loop.gone
        delta = self.loop.scheduler.abort(seq_id)
        assert (delta is not None) == known
        if delta is not None:
            assert delta.finish is Finish.ABORT
            self.loop.gone.add(seq_id)

    @precondition(lambda self: self.loop is not None and self.loop.scheduler.num_running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        assert self.loop is not None
        seq_id = data.draw(st.sampled_from(self.loop.scheduler.running_ids()))
        self.loop.scheduler.end(seq_id)
        self.loop.gone.add(seq_id)

    @precondition(lambda self: self.loop is not None and self.loop.scheduler.num_running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        assert self.loop is not None
        self.loop.land()  # as Engine.preempt does
        if not self.loop.scheduler.num_running:
            return
        seq_id = data.draw(st.sampled_from(self.loop.scheduler.running_ids()))
        assert self.loop.scheduler.preempt(seq_id)
        self.loop.kv_lens.pop(seq_id, None)

    @invariant()
    def everything_is_in_order(self) -> None:
        if self.loop is not None:
            self.loop.scheduler.check()
            self.loop.check_prefixes()

    def teardown(self) -> None:
        if self.loop is not None:
            how = self.ways[0]
            self.loop.drain(drafting([True, True, False, True, True]) if how == "drafting" else None, how)


def drafting(right: list[bool]):
    """A proposer that is right where told."""

    def propose(ask: Ask) -> list[int]:
        prefix, guesses = ask.tokens + ask.draft, []
        for good in right[: ask.room]:
            token = next_token(prefix)
            guesses.append(token if good else (token + 1) % VOCAB)
            prefix = [*prefix, guesses[-1]]
        return guesses

    return propose


Storm.TestCase.settings = settings(
    max_examples=250, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestStorm = Storm.TestCase


def limits(**changes: object) -> Limits:
    return Limits(
        **({"num_pages": 40, "page": PAGE, "frame_rows": 8, "max_num_seqs": 4, "max_model_len": 60} | changes)
    )  # type: ignore[arg-type]


# ---- what the storm does not show by itself


@pytest.mark.parametrize("how", ["lazy", "chained"])
def test_a_tiny_pool_preempts_and_everybody_finishes(how: str) -> None:
    loop = Loop(limits(num_pages=8, max_model_len=26, max_num_seqs=4))
    for i in range(6):
        loop.add([i % VOCAB, 1, 2, 3, 4], 16)
    loop.drain(how=how)
    assert loop.scheduler.counters.preempted > 0


def test_a_chained_frame_is_planned_for_every_step_but_the_first() -> None:
    loop = Loop(limits())
    one = loop.add([1, 2, 3], 20, sampling=Sampling(stop_ids=frozenset({STOP})))
    loop.step(how="chained")
    sources = []
    while not loop.scheduler.idle or loop.flight:
        loop.step(how="chained")
        sources += [span.source for span in loop.flight]
    wanted, finish = expected_tokens(loop.seen[one].request, 60)
    assert (loop.seen[one].tokens, loop.seen[one].finish) == (wanted, finish)
    assert sources[0] == 2  # the last row of the prompt
    assert set(sources[1:]) <= {0}


def test_the_youngest_is_preempted_first() -> None:
    loop = Loop(limits(num_pages=6, max_model_len=20))
    first, second = loop.add([1] * 7, 12), loop.add([2] * 7, 12)
    while loop.scheduler.counters.preempted == 0:
        loop.step()
    assert loop.scheduler.running_ids() == [first]
    assert loop.seen[second].finish is None
    loop.drain()


def test_generating_goes_before_reading_and_rows_are_shared_in_turn() -> None:
    loop = Loop(limits(frame_rows=4))
    talker = loop.add([1], 10)
    loop.step()
    loop.step()
    loop.add([2] * 30, 2)
    before = len(loop.seen[talker].tokens)
    for _ in range(5):
        loop.step()
    assert len(loop.seen[talker].tokens) == before + 5
    loop.drain()


def test_those_who_generate_keep_streaming_however_many_prompts_come() -> None:
    loop = Loop(limits(frame_rows=12, num_pages=200, max_num_seqs=16))
    talkers = [loop.add([i], 50) for i in range(4)]
    loop.step()
    loop.step()
    for i in range(8):
        loop.add([i % VOCAB] * 30, 2)
    for _ in range(20):
        before = [len(loop.seen[i].tokens) for i in talkers]
        loop.step()
        assert [len(loop.seen[i].tokens) for i in talkers] == [n + 1 for n in before]
    loop.drain()


def test_a_prompt_is_read_even_where_everybody_generates() -> None:
    loop = Loop(limits(frame_rows=4, num_pages=200, max_num_seqs=9))
    for i in range(8):  # twice as many as there are rows
        loop.add([i % VOCAB], 50)
    for _ in range(6):
        loop.step()
    late = loop.add([5] * 8, 2)
    steps = 0
    while not loop.seen[late].tokens:
        loop.step()
        steps += 1
    assert steps <= 2 * (PATIENCE + 2)  # two frames of four rows, each after some patience
    loop.drain()


def test_more_sequences_than_rows_all_move() -> None:
    loop = Loop(limits(frame_rows=2, max_num_seqs=8))
    ids = [loop.add([i % VOCAB], 12) for i in range(6)]
    for _ in range(3 * 6):
        loop.step()
    made = [len(loop.seen[i].tokens) for i in ids]
    assert max(made) - min(made) <= 1
    loop.drain()


def test_right_guesses_save_frames_and_wrong_ones_cost_none() -> None:
    frames = []
    for right in ([], [False] * 5, [True] * 5):
        loop = Loop(limits(prefix_caching=False))
        loop.add([1, 2, 3], 24)
        loop.drain(drafting(right))
        frames.append(loop.scheduler.counters.frames)
    assert frames[1] == frames[0] == 24
    assert frames[2] <= 5


def test_room_never_reaches_past_the_end_or_the_frame() -> None:
    loop = Loop(limits(frame_rows=4, max_draft=16))
    loop.add([1, 2], 6)
    rooms = []

    def propose(ask: Ask) -> list[int]:
        rooms.append((ask.room, len(ask.tokens)))
        return []

    loop.drain(propose)
    assert rooms[0] == (3, 3)  # a frame holds the known token and three guesses
    assert all(room <= 8 - known - 1 for room, known in rooms)
    assert rooms[-1][1] == 6  # with two to go one guess is of use; with one to go none is


def test_a_prompt_of_full_pages_seen_before_is_read_but_for_its_last_page() -> None:
    loop = Loop(limits())
    prompt = [1, 2, 3, 4, 0, 1, 2, 3]
    loop.add(prompt, 1)
    loop.drain()
    loop.add(prompt, 1)
    loop.scheduler.admit()
    (span,) = loop.scheduler.spans()
    assert (span.start, span.inputs) == (4, (0, 1, 2, 3))
    assert loop.scheduler.counters.cached_tokens == 4


def test_answers_are_shared_too() -> None:
    loop = Loop(limits())
    one = loop.add([1, 2, 3], 14)
    loop.drain()
    loop.add([1, 2, 3, *loop.seen[one].tokens, 1], 1)
    loop.drain()
    assert loop.scheduler.counters.cached_tokens == 16


def test_another_salt_shares_nothing() -> None:
    loop = Loop(limits())
    loop.add([1] * 12, 1, salt=b"mine")
    loop.drain()
    loop.add([1] * 12, 1, salt=b"yours")
    loop.drain()
    assert loop.scheduler.counters.cached_tokens == 0


def test_what_the_fast_path_wrote_is_never_shared() -> None:
    loop = Loop(limits())
    one = loop.add([1, 2, 3, 4], 14, verify=False)
    loop.drain()
    assert loop.scheduler.index.num_indexed <= 1  # the prompt's page, read in a frame
    loop.add([1, 2, 3, 4, *loop.seen[one].tokens], 2)
    loop.drain()


def test_a_follower_waits_for_its_leader_to_read() -> None:
    loop = Loop(limits(frame_rows=4))
    prompt = [1, 2, 3, 4] * 3
    leader = loop.add(prompt, 4)
    loop.add(prompt, 4, leader=leader)
    loop.step()
    assert loop.scheduler.running_ids() == [leader]
    loop.drain()
    assert loop.scheduler.counters.cached_tokens == 8


@pytest.mark.parametrize("how", ["abort", "preempt", "end"])
def test_a_follower_does_not_wait_for_a_leader_that_left(how: str) -> None:
    loop = Loop(limits(frame_rows=2))
    prompt = [1, 2, 3, 4] * 3
    leader = loop.add(prompt, 4)
    loop.add(prompt, 4, leader=leader)
    loop.step()
    getattr(loop.scheduler, how)(leader)
    if how != "preempt":
        loop.gone.add(leader)
    loop.drain()


def test_end_while_preempted_ends_it_all_the_same() -> None:
    """A stop string may be found in a delta whose sequence lost its pages in the same step."""
    loop = Loop(limits())
    one = loop.add([1, 2, 3], 20)
    for _ in range(3):
        loop.step()
    loop.land()
    loop.scheduler.preempt(one)
    loop.scheduler.end(one)
    loop.gone.add(one)
    assert loop.scheduler.idle, "it will be admitted again and run to its end for nobody"
    assert loop.scheduler.counters.finished == 1


def test_cached_tokens_are_counted_once_however_often_a_prompt_is_preempted() -> None:
    """`num_cached` is what was found when first admitted; its own pages are no find."""
    loop = Loop(limits(frame_rows=4))
    loop.add([1, 2, 3, 4] * 4, 2)
    loop.step()
    loop.step()
    loop.land()
    loop.scheduler.preempt(0)
    (last,) = [delta for delta in iter_deltas(loop) if delta.finish]
    assert last.num_cached == 0
    assert loop.scheduler.counters.cached_tokens == 0


def iter_deltas(loop: Loop) -> list[Delta]:
    found: list[Delta] = []
    while not loop.scheduler.idle or loop.flight:
        found += loop.step()
    return found


def test_guesses_for_somebody_who_opted_out_or_left_are_dropped() -> None:
    """A proposer may say anything to anybody: it can never change a token."""
    loop = Loop(limits())
    one = loop.add([1, 2, 3], 8, verify=False)
    while loop.scheduler.num_running or loop.scheduler.num_waiting or loop.flight:
        loop.step()
        loop.scheduler.extend([Proposal(one, (0,)), Proposal(999, (1, 2))])
    loop.check_prefixes()


def test_more_guesses_than_were_asked_for_change_nothing() -> None:
    loop = Loop(limits(num_pages=9, max_model_len=30))
    loop.add([1, 2, 3], 12)
    loop.add([2, 2, 3], 12)

    def shout(ask: Ask) -> list[int]:
        return drafting([True, True, False] * 9)(ask._replace(room=27))

    checks = loop.check_frame
    loop.check_frame = lambda spans: None  # type: ignore[method-assign]  # rows may be junk past the end
    loop.drain(shout)
    loop.check_frame = checks  # type: ignore[method-assign]


def test_guesses_are_forgotten_with_the_pages_they_were_made_on() -> None:
    loop = Loop(limits(prefix_caching=False))
    one = loop.add([1, 2, 3], 9)
    for _ in range(3):
        loop.step()
    loop.land()
    loop.draft(drafting([False, False]))
    loop.scheduler.preempt(one)
    loop.scheduler.admit()
    loop.scheduler.check()
    assert [len(span.inputs) for span in loop.scheduler.spans()] == [3 + len(loop.seen[one].tokens)]
    loop.scheduler.preempt(one)
    loop.drain()


def test_a_page_that_reaches_past_the_end_of_the_text_is_not_shared() -> None:
    """The stop stands among the guesses: nothing after it belongs to any text."""
    for found in product(range(VOCAB), repeat=3):
        prompt = list(found)
        third = next_token([*prompt, next_token(prompt), next_token([*prompt, next_token(prompt)])])
        if third == STOP and STOP not in expected_tokens(Request(0, found, Sampling(), 2), 60)[0]:
            break
    loop = Loop(limits(frame_rows=16))
    one = loop.add(prompt, 30, sampling=Sampling(stop_ids=frozenset({STOP})))
    loop.drain(drafting([True] * 12))
    assert len(loop.seen[one].tokens) == 3
    assert loop.scheduler.counters.guessed == 2  # what stands behind the stop is not replayed
    assert loop.scheduler.index.num_indexed == (3 + 3 - 1) // PAGE


@pytest.mark.parametrize("rows", [1, 3, 8, 32])
@pytest.mark.parametrize("how", ["lazy", "eager", "chained"])
def test_scores_come_once_each_however_the_prompt_is_cut(rows: int, how: str) -> None:
    loop = Loop(limits(frame_rows=rows))
    loop.add([1, 2, 3, 4, 5] * 4, 3, prompt_logprobs=0)
    loop.add([1, 2, 3, 4, 5] * 4, 0, score_from=11)
    loop.add([2, 2], 4, prompt_logprobs=0)
    loop.drain(how=how)  # checks every score
    loop.add([1, 2, 3, 4, 5] * 4, 0, score_from=17)
    loop.drain(how=how)
    assert loop.scheduler.counters.cached_tokens > 0


def test_guesses_stay_until_their_frame_comes() -> None:
    loop = Loop(limits(frame_rows=3, max_num_seqs=4))
    for i in range(4):
        loop.add([i], 9)
    loop.drain(drafting([True, True]))


def test_a_full_queue_refuses_and_names_the_limit() -> None:
    loop = Loop(limits(max_queued=2))
    loop.add([1], 2)
    loop.add([2], 2)
    with pytest.raises(QueueFull, match=r"max_queued is 2.*raise max_queued"):
        loop.add([3], 2)
    loop.step()
    loop.add([3], 2)
    loop.drain()


def test_what_just_fits_runs_alone_and_in_company() -> None:
    loop = Loop(limits(num_pages=6, max_model_len=20))
    for i in range(4):
        loop.add([i] * 8, 12)
    loop.drain()
    assert [len(loop.seen[i].tokens) for i in range(4)] == [12] * 4


def test_a_context_that_is_full_ends_the_answer() -> None:
    loop = Loop(limits(max_model_len=10))
    one = loop.add([1] * 7, 500)
    loop.drain()
    assert (len(loop.seen[one].tokens), loop.seen[one].finish) == (3, Finish.LENGTH)


def test_unknown_ids_are_nobody() -> None:
    scheduler = Scheduler(limits())
    assert scheduler.abort(3) is None
    assert scheduler.preempt(3) is False
    scheduler.end(3)
    scheduler.check()


def test_check_sees_a_sequence_without_pages() -> None:
    loop = Loop(limits())
    loop.add([1] * 9, 4)
    loop.step()
    loop.land()
    seq = next(iter(loop.scheduler._running.values()))
    loop.scheduler.index.release([seq.pages.pop()])
    with pytest.raises(InvariantBroken, match="too few pages"):
        loop.scheduler.check()


# ---- when a frame fires


def drafting_on(seq_ids: set[int]) -> Callable[[Ask], Proposal]:
    """One right guess a step; these sequences mean to go on."""

    def guess(ask: Ask) -> Proposal:
        return Proposal(
            ask.seq_id, (next_token(ask.tokens + ask.draft),), drafter="d", more=ask.seq_id in seq_ids
        )

    return guess


def turn(loop: Loop, guess: Callable[[Ask], Proposal]) -> list[Span]:
    """A step up to the frame it would fire."""
    loop.land()
    loop.scheduler.admit()
    loop.scheduler.extend([guess(ask) for ask in loop.scheduler.asks(verified=True)])
    loop.flight = loop.scheduler.spans()
    return loop.flight


def read_prompts(loop: Loop, num: int, **changes: object) -> None:
    for i in range(num):
        loop.add([1, 2, i % VOCAB], 20, **changes)
    while any(seq.prefilling for seq in loop.scheduler._running.values()) or loop.scheduler.num_waiting:
        loop.step()
    loop.land()


def test_an_open_draft_is_not_replayed():
    loop = Loop(limits(frame_rows=16, deadline=100))
    read_prompts(loop, 2)
    for length in range(1, 4):
        assert turn(loop, drafting_on({0, 1})) == []
        assert [len(s.draft) for s in loop.scheduler._running.values()] == [length, length]


def test_a_finished_draft_waits_for_company_until_its_deadline():
    loop = Loop(limits(frame_rows=16, deadline=3))
    read_prompts(loop, 2)
    fired = [[span.seq_id for span in turn(loop, drafting_on({1}))] for _ in range(4)]
    assert fired == [[], [], [], [0]]
    assert len(loop.scheduler._running[1].draft) == 4  # it drafts on


def test_a_full_group_does_not_wait():
    loop = Loop(limits(frame_rows=4, deadline=100, max_num_seqs=4))
    read_prompts(loop, 3)
    assert [span.seq_id for span in turn(loop, drafting_on({2}))] == [0, 1]


def test_nobody_waits_when_nobody_drafts_on():
    loop = Loop(limits(frame_rows=16, deadline=100))
    read_prompts(loop, 2)
    spans = turn(loop, drafting_on(set()))
    assert [(span.seq_id, len(span.inputs), span.drafter) for span in spans] == [(0, 2, "d"), (1, 2, "d")]
    loop.land()
    tally = loop.scheduler.counters.drafters["d"]
    assert (tally.drafts, tally.guessed, tally.accepted) == (2, 2, 2)


def test_a_prompt_does_not_wait_and_takes_finished_drafts_along():
    loop = Loop(limits(frame_rows=16, deadline=100, max_num_seqs=4))
    read_prompts(loop, 2)
    assert turn(loop, drafting_on({1})) == []
    loop.add([3, 3, 3, 3], 5)
    assert [span.seq_id for span in turn(loop, drafting_on({1}))] == [0, 2]


def test_a_guess_that_would_end_it_closes_the_draft():
    loop = Loop(limits(frame_rows=16, deadline=100))
    read_prompts(loop, 1, sampling=Sampling(stop_ids=frozenset(range(VOCAB))))
    assert loop.scheduler.idle  # it ended at once; so give it a stop it reaches by guessing
    loop = Loop(limits(frame_rows=16, deadline=100))
    read_prompts(loop, 1)
    seq = loop.scheduler._running[0]
    seq.request = Request(0, seq.request.prompt, Sampling(stop_ids=frozenset(range(VOCAB))), 20)
    assert [span.seq_id for span in turn(loop, drafting_on({0}))] == [0]


def test_who_opted_out_rides_where_there_is_room_for_all():
    for rows, riding in ((16, {0, 1, 2}), (2, {0})):
        loop = Loop(limits(frame_rows=rows, deadline=0, max_num_seqs=4))
        loop.add([1, 2], 20)
        for n in range(2):
            loop.add([3, n], 20, verify=False)
        for _ in range(4):
            loop.step()
        loop.land()
        loop.scheduler.admit()
        assert {span.seq_id for span in loop.scheduler.spans()} == riding


def test_a_draft_that_does_not_grow_is_closed():
    for tokens in ((), (VOCAB,), (-1,)):
        loop = Loop(limits(frame_rows=16, deadline=100, vocab=VOCAB))
        read_prompts(loop, 1)
        assert [s.seq_id for s in turn(loop, lambda ask, t=tokens: Proposal(ask.seq_id, t, more=True))] == [0]


def test_nothing_is_guessed_behind_a_stop():
    loop = Loop(limits(frame_rows=16, deadline=100))
    read_prompts(loop, 1)
    seq = loop.scheduler._running[0]
    seq.request = Request(0, seq.request.prompt, Sampling(stop_ids=frozenset({3})), 20)
    turn(loop, lambda ask: Proposal(ask.seq_id, (1, 3, 2, 2), more=True))
    assert seq.draft == [1, 3]
    assert not seq.drafting


def test_a_draft_is_never_longer_than_a_frame_can_replay():
    loop = Loop(limits(frame_rows=4, deadline=100, max_draft=16))
    read_prompts(loop, 1)
    for _ in range(6):
        turn(loop, drafting_on({0}))
        assert all(len(s.draft) <= 3 for s in loop.scheduler._running.values())


def test_a_draft_that_does_not_fit_waits_whole():
    loop = Loop(limits(frame_rows=6, deadline=0, max_num_seqs=3))
    read_prompts(loop, 3)
    guess = lambda ask: Proposal(ask.seq_id, tuple([next_token(ask.tokens)] + [1] * 2))  # noqa: E731
    first = turn(loop, guess)
    assert [(s.seq_id, len(s.inputs)) for s in first] == [(0, 4)]
    assert turn(loop, guess)[0].seq_id != 0
