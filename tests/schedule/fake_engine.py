"""The engine's loop over a fake model, for tests of the Scheduler.

The fake model's next token is a hash of the prefix, and so is the KV of a position. Every request must get
the fake model's own tokens, in order, none twice and none lost.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from samewise.schedule.limits import Limits
from samewise.schedule.scheduler import Scheduler
from samewise.types import ROOT, Ask, Delta, Finish, Proposal, Request, Sampling, Span, Truth, Verdict
from samewise.verify.judge import judge, trust

VOCAB, STOP = 6, 5  # STOP is the token that ends a text where the request says so
PAGE = 4

Propose = Callable[[Ask], list[int] | Proposal]


def make_limits(**changes: Any) -> Limits:
    defaults = {"num_pages": 40, "page": PAGE, "max_rows": 8, "max_num_seqs": 4, "max_model_len": 60}
    return Limits(**(defaults | changes))  # type: ignore[arg-type]


def next_token(prefix: list[int]) -> int:
    return sha256(bytes(prefix)).digest()[0] % VOCAB


def logprob(prefix: list[int], token: int) -> float:
    return -float(int.from_bytes(sha256(bytes([*prefix, 255, token])).digest()[:3], "little"))


def kv_of(prefix: list[int]) -> bytes:
    return sha256(b"kv" + bytes(prefix)).digest()


def expected_tokens(request: Request, max_model_len: int) -> tuple[list[int], Finish]:
    tokens = list(request.prompt)
    max_len = min(len(tokens) + request.max_tokens, max_model_len)
    while len(tokens) < max_len:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.sampling.stop_ids:
            return tokens[len(request.prompt) :], Finish.STOP
    return tokens[len(request.prompt) :], Finish.LENGTH


def draft_with(right: list[bool]) -> Propose:
    """A proposer whose guess i is the model's token if `right[i]`, and another one otherwise."""

    def propose(ask: Ask) -> list[int]:
        prefix, guesses = ask.tokens + ask.draft, []
        for is_right in right[: ask.room]:
            token = next_token(prefix)
            guesses.append(token if is_right else (token + 1) % VOCAB)
            prefix = [*prefix, guesses[-1]]
        return guesses

    return propose


class FakeModel:
    """Runs spans over fake pages. Reading KV that is not that of the prefix is an error."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.unverified: set[int] = set()  # requests whose KV may come from the fast path
        self.kv: dict[tuple[int, int], object] = {}  # by page and offset

    def _slot(self, pages: Iterable[int], position: int) -> tuple[int, int]:
        return list(pages)[position // self.page], position % self.page

    def frame(self, spans: list[Span], previous: list[int]) -> tuple[list[Verdict], list[int]]:
        """Verdicts, and the token of every row; `previous` are those of the frame before."""
        verdicts, row_tokens = [], []
        for span in spans:
            inputs = span.inputs if span.source is None else (previous[span.source],)
            verdict, tokens = self.verify(span._replace(inputs=inputs))
            verdicts.append(verdict)
            row_tokens += tokens
        return verdicts, row_tokens

    def move(self, moves: list[tuple[int, int]]) -> None:
        """Move the KV of slots, one after the other."""
        for source, target in moves:
            self.kv[divmod(target, self.page)] = self.kv.get(divmod(source, self.page))

    def verify(self, span: Span) -> tuple[Verdict, list[int]]:
        """A span's verdict and the token of each of its rows."""
        prefix = span.tokens[: span.start]
        assert len(prefix) == span.start, f"request {span.seq_id}: tokens before its span are not known"
        for p in range(span.start):
            kv = self.kv.get(self._slot(span.pages, p))
            from_fast_path = kv == "fast" and span.seq_id in self.unverified
            assert from_fast_path or kv == kv_of(prefix[: p + 1]), (
                f"request {span.seq_id}: wrong KV below kv_len at {p}"
            )
        tokens: list[int] = []
        logprobs: list[float] = []
        scores: list[float] = []
        prefixes = {ROOT: prefix}  # by guess of a tree
        for row, token in enumerate(span.inputs):
            if span.parents and row >= span.given:
                prefix = prefixes[span.parents[row - span.given]]
            prefix = [*prefix, token]
            prefixes[max(row - span.given, ROOT)] = prefix
            self.kv[self._slot(span.pages, span.start + row)] = kv_of(prefix)
            tokens.append(next_token(prefix))
            logprobs.append(logprob(prefix, tokens[-1]))
            target = row - span.target_row
            if 0 <= target < len(span.targets):
                scores.append(logprob(prefix, span.targets[target]))
        judged = slice(min(span.given - 1, len(tokens)), None)
        truth = Truth(
            tuple(tokens[judged]),
            tuple(logprobs[judged]),
            scores=tuple(scores),
            score_tops=((),) * len(scores),
        )
        return judge(span, truth), tokens

    def decode(self, ask: Ask) -> Proposal:
        """The fast path: the model's own token, and KV that is not canonical."""
        assert not ask.draft
        position = len(ask.tokens) - 1
        self.kv[self._slot(ask.pages, position)] = "fast"
        token = next_token(ask.tokens)
        return Proposal(ask.seq_id, (token,), (logprob(ask.tokens, token),))

    def write_scratch(self, ask: Ask) -> None:
        """Overwrite every position above kv_len, as a proposer may."""
        for p in range(ask.kv_len, len(ask.pages) * self.page):
            self.kv[self._slot(ask.pages, p)] = "scratch"


@dataclass
class Output:
    """What was committed for one request."""

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

    def check(self, max_model_len: int, *, dropped: bool) -> None:
        """The output is a prefix of what the fake model gives, and all of it if the request finished."""
        tokens, finish = expected_tokens(self.request, max_model_len)
        assert self.tokens == tokens[: len(self.tokens)]
        if self.finish is not None and not dropped:
            assert (self.tokens, self.finish) == (tokens, finish)
        prompt = list(self.request.prompt)
        context = prompt + self.tokens
        positions = range(len(prompt), len(context))
        assert self.logprobs == [logprob(context[:p], context[p]) for p in positions]
        first = len(prompt) if self.request.first_scored is None else self.request.first_scored
        scores = [logprob(prompt[:p], prompt[p]) for p in range(first, len(prompt))]
        complete = self.tokens or self.finish is Finish.LENGTH
        assert self.scores == (scores if complete else scores[: len(self.scores)])


class FakeEngine:
    """The engine's loop over a fake model, with a frame in flight between steps."""

    def __init__(self, limits: Limits) -> None:
        self.scheduler, self.model, self.limits = Scheduler(limits), FakeModel(limits.page), limits
        self.outputs: dict[int, Output] = {}
        self.dropped: set[int] = set()  # ids of requests that were aborted, or ended from outside
        self.kv_lens: dict[int, int] = {}
        self.flight: list[Span] = []
        self.result: tuple[list[Verdict], list[int]] | None = None  # of the frame in flight, if it ran
        self.num_requests = 0
        self.drafting = False

    def add(self, prompt: list[int], max_tokens: int, **fields: Any) -> int:
        sampling, guide = fields.pop("sampling", Sampling()), fields.pop("guide", None)
        request = Request(self.num_requests, tuple(prompt), sampling, max_tokens, **fields)
        self.scheduler.add(request, guide)
        self.outputs[request.id] = Output(request)
        if not request.verify:
            self.model.unverified.add(request.id)
        self.num_requests += 1
        return request.id

    def step(self, propose: Propose | None = None, how: str = "lazy") -> list[Delta]:
        """One step. How frames run: `lazy` when they land, `eager` when they are launched, `chained` with
        the next frame launched before the one in flight lands.
        """
        ahead = self.launch_ahead() if how == "chained" and propose is None else None
        deltas = self.land()
        if ahead is None:
            self.scheduler.admit()
            unverified = self.scheduler.asks(verified=False)
            if propose is not None:
                self.draft(propose)
            self.flight = self.scheduler.spans()
            self.check_frame(self.flight)
            self.result = self.model.frame(self.flight, []) if how != "lazy" else None
            in_frame = {span.seq_id for span in self.flight}
            verdicts = [
                trust(self.model.decode(ask), ask.kv_len)
                for ask in unverified
                if ask.seq_id not in in_frame and self.scheduler.is_running(ask.seq_id)
            ]
            deltas += self.publish(self.scheduler.commit(verdicts))
        else:
            self.flight, self.result = ahead
        self.scheduler.check()
        return deltas

    def draft(self, propose: Propose) -> None:
        """Extend drafts; about two of three are said to grow further."""
        self.drafting = True  # from now on no frame is launched ahead
        asks = self.scheduler.asks(verified=True)
        for ask in asks:
            self.model.write_scratch(ask)
        self.scheduler.extend([self.propose(propose, ask) for ask in asks])

    @staticmethod
    def propose(propose: Propose, ask: Ask) -> Proposal:
        """The guesses as a chain that may grow further, or as the tree that they are."""
        guesses = propose(ask)
        if isinstance(guesses, Proposal):
            return guesses
        return Proposal(ask.seq_id, tuple(guesses), more=(ask.seq_id + len(ask.tokens)) % 3 > 0)

    def launch_ahead(self) -> tuple[list[Span], tuple[list[Verdict], list[int]]] | None:
        """The frame after the one in flight, launched before that one lands, and its result."""
        if not self.flight or self.drafting:
            return None
        if self.result is None:
            self.result = self.model.frame(self.flight, [])
        self.scheduler.admit()
        spans = self.scheduler.spans_ahead(self.flight)
        self.check_frame(spans)
        return (spans, self.model.frame(spans, self.result[1])) if spans else None

    def land(self) -> list[Delta]:
        """Commit the frame in flight."""
        verdicts, _ = self.result or self.model.frame(self.flight, [])
        self.flight, self.result = [], None
        deltas = self.publish(self.scheduler.commit(verdicts))
        self.model.move(self.scheduler.take_moves())
        return deltas

    def publish(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            assert delta.request_id not in self.dropped, "a delta for a request that was aborted or ended"
            self.outputs[delta.request_id].take(delta)
        return deltas

    def check_frame(self, spans: list[Span]) -> None:
        """Spans fit the frame and the limits, start with known tokens, and write each slot once."""
        limits = self.limits
        assert sum(len(span.inputs) for span in spans) <= limits.max_rows
        assert len({span.seq_id for span in spans}) == len(spans), "one span per sequence"
        slots: list[tuple[int, int]] = []
        for span in spans:
            assert span.inputs
            assert span.given >= 1
            positions = range(span.start, span.start + len(span.inputs))
            assert positions.stop <= len(span.pages) * limits.page
            assert span.parents or positions.stop <= limits.max_model_len
            slots += [(span.pages[p // limits.page], p % limits.page) for p in positions]
            if span.source is not None:
                assert (len(span.inputs), span.given) == (1, 1)
                continue
            known = span.tokens[positions.start : positions.stop][: span.given]
            assert list(span.inputs[: span.given]) == known
        assert len(set(slots)) == len(slots), "two rows write to one slot"
        assert all(page != 0 for page, _ in slots)

    def check_kv_lens(self) -> None:
        """The kv_len of a sequence never falls, except by preemption, which stops it from running."""
        kv_lens = {seq_id: seq.kv_len for seq_id, seq in self.scheduler._running.items()}
        for seq_id, kv_len in kv_lens.items():
            assert kv_len >= self.kv_lens.get(seq_id, 0)
        self.kv_lens = kv_lens

    def check_outputs(self) -> None:
        for request_id, output in self.outputs.items():
            output.check(self.limits.max_model_len, dropped=request_id in self.dropped)

    def drain(self, propose: Propose | None = None, how: str = "lazy") -> int:
        """Step until idle and return the number of steps, which the work left bounds: no request starves."""
        left = [o.request for i, o in self.outputs.items() if o.finish is None and i not in self.dropped]
        max_steps = 10 + 2 * (1 + self.limits.deadline * self.drafting) * sum(
            len(request.prompt) + request.max_tokens + 2 for request in left
        )
        steps = 0
        while not self.scheduler.idle or self.flight:
            self.step(propose, how)
            steps += 1
            assert steps <= max_steps, f"after {steps} steps still running: {self.scheduler.running_ids()}"
        self.check_outputs()
        self.scheduler.check()
        for seq_id, output in self.outputs.items():
            assert seq_id in self.dropped or output.finish is not None, f"request {seq_id} was lost"
        assert self.scheduler.index.num_available == self.limits.num_pages - 1
        return steps


def read_prompts(engine: FakeEngine, num: int, **fields: Any) -> None:
    """Add requests and step until their prompts are read."""
    for i in range(num):
        engine.add([1, 2, i % VOCAB], 20, **fields)
    while any(s.prefilling for s in engine.scheduler._running.values()) or engine.scheduler.num_waiting:
        engine.step()
    engine.land()


def one_guess_each(growing: set[int]) -> Callable[[Ask], Proposal]:
    """A proposer of one right guess per step; the drafts of these sequences are to grow further."""

    def guess(ask: Ask) -> Proposal:
        token = next_token(ask.tokens + ask.draft)
        return Proposal(ask.seq_id, (token,), drafter="d", more=ask.seq_id in growing)

    return guess


def next_frame(engine: FakeEngine, propose: Callable[[Ask], Proposal]) -> list[Span]:
    """A step up to the frame it launches, which is empty if none is due."""
    engine.land()
    engine.scheduler.admit()
    engine.scheduler.extend([propose(ask) for ask in engine.scheduler.asks(verified=True)])
    engine.flight = engine.scheduler.spans()
    return engine.flight
