"""Decide who runs, and make verdicts public. Host only: this module has never heard of a tensor.

Order is by arrival. A frame's rows go first to sequences that are generating, so that they keep streaming
while prompts are read, then to prompts; among equals whoever has waited longest goes first. Where those who
generate leave no row, whoever got nothing for some steps goes before everybody, so nobody starves. When
pages run out the youngest sequence is preempted: it gives up its pages and later reads its tokens again, to
the same bits. The oldest can always take what it needs, and a request that could never fit alone was refused.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter, deque
from dataclasses import dataclass, field

from samewise.counters import Counters, DrafterCounters
from samewise.errors import InvariantBroken, QueueFull
from samewise.kv.pages import PagePool
from samewise.kv.prefix import PrefixIndex, chain
from samewise.schedule.limits import Limits
from samewise.schedule.plan import ask_of, continued, must_land, span_of
from samewise.types import Ask, Branch, Delta, Finish, Guide, Proposal, Request, Sequence, Span, Verdict

PATIENCE = 4  # steps without a row after which one goes first, a prompt too


@dataclass(slots=True)
class Scheduler:
    """Owns every Sequence and every page number."""

    limits: Limits
    counters: Counters = field(default_factory=Counters)
    index: PrefixIndex = field(init=False)
    _waiting: list[Sequence] = field(default_factory=list)  # by arrival
    _newcomers: deque[Sequence] = field(default_factory=deque)  # admitted, and nobody was told yet
    _running: dict[int, Sequence] = field(default_factory=dict)  # by admission
    _step: int = 0
    _unverified: int = 0  # running or waiting requests that opted out
    _disturbed: bool = False  # somebody was preempted since the order was fixed

    def __post_init__(self) -> None:
        self.index = PrefixIndex(PagePool(self.limits.num_pages), enabled=self.limits.prefix_caching)

    # ---- requests come and go

    def add(self, request: Request, guide: Guide | None = None) -> None:
        """Queue a request, or refuse what could never run. With a grammar comes its guide."""
        limits = self.limits
        if limits.max_queued is not None and len(self._waiting) >= limits.max_queued:
            raise QueueFull(
                f"{len(self._waiting)} requests are waiting and max_queued is {limits.max_queued}; "
                "try again later or raise max_queued"
            )
        self.counters.requests += 1
        self._unverified += not request.verify
        self.counters.prompt_tokens += len(request.prompt)
        insort(
            self._waiting,
            Sequence(
                request,
                list(request.prompt),
                min(len(request.prompt) + request.max_tokens, limits.max_model_len),
                score_next=request.scores_from,
                guide=guide,
            ),
            key=_arrival,
        )

    def abort(self, request_id: int) -> Delta | None:
        """Drop a request wherever it is. None if it is not (or no longer) known."""
        seq = self._drop(request_id)
        if seq is None:
            return None
        seq.finish = Finish.ABORT
        self.counters.aborted += 1
        return Delta(request_id, (), (), (), Finish.ABORT)

    def end(self, request_id: int) -> None:
        """The reader has enough (a stop string stood in the text): retire without a further delta."""
        if self._drop(request_id) is not None:
            self.counters.finished += 1

    def _drop(self, request_id: int) -> Sequence | None:
        """Take a request out, running or waiting (it may have been preempted a moment ago)."""
        seq = self._running.get(request_id)
        if seq is not None:
            self._leave(seq)
            return seq
        seq = next((s for s in self._waiting if s.request.id == request_id), None)
        if seq is not None:
            self._waiting.remove(seq)
            self._unverified -= not seq.request.verify
        return seq

    def preempt(self, request_id: int) -> bool:
        """Take a running sequence's pages away and queue it again. False if it is not running."""
        seq = self._running.get(request_id)
        if seq is None:
            return False
        self._preempt(seq)
        return True

    # ---- one step, in the order the loop calls them

    def admit(self) -> None:
        """Move waiting requests to running while there is room, oldest first."""
        self._step += 1
        held_back: list[Sequence] = []
        while self._waiting and len(self._running) < self.limits.max_num_seqs:
            seq = self._waiting.pop(0)
            if self._worth_waiting(seq):
                held_back.append(seq)
            elif not self._start(seq):
                held_back.append(seq)
                break
        self._waiting[:0] = held_back

    def asks(self, *, verified: bool) -> list[Ask]:
        """Sequences past their prompt that could use guesses: the verified ones, or the unverified ones.

        A sequence whose draft is complete and waits for its frame is not among them.
        """
        if not verified and not self._unverified:
            return []
        asks: list[Ask] = []
        for seq in list(self._running.values()):
            request = seq.request
            if request.verify is not verified or seq.reading:
                continue
            if verified and not request.speculate:
                continue
            if request.id in self._running and (seq.open or not seq.draft):
                room = self._room(seq) if verified else self._room_unverified(seq)
                end = len(seq.tokens) + len(seq.draft) + room
                if room > 0 and self._reserve(seq, end, force=not verified):
                    asks.append(ask_of(seq, room))
        return [ask for ask in asks if ask.seq_id in self._running]

    def newcomers(self, most: int) -> list[Ask]:
        """Sequences lately admitted that will be asked about, until they have `most` tokens or more."""
        found: list[Ask] = []
        while self._newcomers and most > 0:
            seq = self._newcomers.popleft()
            if seq.request.id in self._running:
                found.append(ask_of(seq, 0))
                most -= len(seq.tokens)
        return found

    def _reserve(self, seq: Sequence, length: int, *, force: bool) -> bool:
        """Pages for `length` tokens. Guesses are worth a free page, but nobody's place."""
        return self._grow(seq, -(-length // self.limits.page)) if force else self._grow_idle(seq, length)

    def _room(self, seq: Sequence) -> int:
        """How many more guesses could be of use."""
        # The replay adds one token of its own, so the last one need not be guessed.
        left = seq.most - len(seq.tokens) - len(seq.draft) - 1
        most = min(self.limits.max_draft, self.limits.frame_rows - 1)
        return min(left, most - len(seq.draft))

    def _room_unverified(self, seq: Sequence) -> int:
        """How many tokens it may take at once; one even where it is only to be told that it is done."""
        return max(1, min(seq.most - len(seq.tokens), self.limits.burst))

    def extend(self, proposals: list[Proposal]) -> None:
        """Append guesses to drafts. What cannot be a guess is dropped, whatever a proposer says."""
        vocab = self.limits.vocab
        for live in self._running.values():
            live.open = False
        for proposal in proposals:
            seq = self._running.get(proposal.seq_id)
            if seq is None or seq.reading or not seq.request.verify:
                continue
            if not seq.draft:
                seq.drafter = proposal.drafter
            ends = seq.request.sampling.stop_ids
            before = len(seq.draft)
            guesses = proposal.tokens[: max(0, self._room(seq))]
            if seq.guide is not None:
                guesses = guesses[: seq.guide.fits(seq.draft, guesses)]
            for token in guesses:
                if not 0 <= token < vocab:
                    break
                seq.draft.append(token)
                if token in ends:  # what would come after it is of no use
                    break
            grown = len(seq.draft) > before
            seq.branches = tuple(branch for branch in proposal.branches if self._sensible(seq, branch))
            seq.open = proposal.more and grown and self._room(seq) > 0 and seq.draft[-1] not in ends

    def _sensible(self, seq: Sequence, branch: Branch) -> bool:
        """Whether a branch leaves the draft where it says and ends where a draft may."""
        at, tokens = branch
        room = seq.most - len(seq.tokens) - 1
        most = min(self.limits.max_draft, self.limits.frame_rows - 1, room)
        inside = bool(tokens) and 0 <= at <= len(seq.draft) and at + len(tokens) <= most
        if not inside or not all(0 <= token < self.limits.vocab for token in tokens):
            return False
        return seq.guide is None or seq.guide.fits(seq.draft[:at], tokens) == len(tokens)

    def spans(self) -> list[Span]:
        """The next frame, at most `frame_rows` rows. Empty when nothing needs a replay yet."""
        if not self._due():
            return []
        left = frame_rows = self.limits.frame_rows
        step, spans = self._step, list[Span]()
        for seq in self._order():
            if left == 0:
                break
            known = len(seq.tokens) - seq.kv_len
            if seq.open or (known == 1 and not seq.request.verify):
                continue
            if spans and seq.draft and left < known + len(seq.draft):
                continue  # a draft cut short would be thrown away in part; it goes first next time
            rows = self._fit(seq, min(left, known + len(seq.draft)))
            if rows:
                spans.append(span_of(seq, rows, known))
                seq.last_served = step
                left -= rows
        if self._disturbed:
            # Growing an older sequence preempted a younger one that may have been placed already.
            spans = [span for span in spans if span.seq_id in self._running]
            left = frame_rows - sum(len(span.inputs) for span in spans)
        if spans:
            left = self._fill_up(spans, left)
            self._count_frame(frame_rows - left)
        return spans

    def _fill_up(self, spans: list[Span], left: int) -> int:
        """Let requests that opted out, then branches, have rows that are left. Returns how many then are."""
        trunks = list(spans)
        if self._unverified:
            spans += self._riders(left)
            left -= len(spans) - len(trunks)
        for trunk in trunks:
            branches = self._branches(trunk, left)
            spans += branches
            left -= sum(len(branch.inputs) for branch in branches)
        return left

    def _branches(self, trunk: Span, left: int) -> list[Span]:
        """Further spans of a sequence, in pages of their own, while there are rows and idle pages for them.

        Each repeats the known tokens and the trunk up to where it leaves it, so that its KV is canonical and
        can simply be kept if it wins.
        """
        seq = self._running[trunk.seq_id]
        if not seq.branches or len(trunk.inputs) != seq.given + len(seq.draft):
            return []
        page = self.limits.page
        shared, within = divmod(seq.kv_len, page)
        found: list[Span] = []
        for branch in seq.branches:
            inputs = (*trunk.inputs[: trunk.given + branch.at], *branch.tokens)
            lent = (
                self._lend(-(-(seq.kv_len + len(inputs)) // page) - shared) if len(inputs) <= left else None
            )
            if lent is None:
                break
            seq.lent.append(lent)
            copy = (seq.pages[shared], lent[0]) if within else None
            pages = seq.pages[:shared] + lent
            found.append(
                trunk._replace(inputs=inputs, pages=pages, branch=len(seq.lent), copy=copy, targets=())
            )
            left -= len(inputs)
        return found

    def _lend(self, num: int) -> array[int] | None:
        """Idle pages, or None and nothing taken."""
        pages = array("i")
        while len(pages) < num:
            page = self.index.take()
            if page is None:
                self.index.release(pages)
                return None
            pages.append(page)
        return pages

    def _due(self) -> bool:
        """Whether a frame is worth firing: it is full, a prompt waits, nobody drafts on, or time is up."""
        drafting, rows, oldest = False, 0, self._step
        for seq in self._running.values():
            if seq.reading:
                return True
            if seq.open:
                drafting = True
            elif seq.request.verify:
                if seq.ready_since is None:
                    seq.ready_since = self._step
                oldest = min(oldest, seq.ready_since)
                rows += 1 + len(seq.draft)
        if not drafting:
            return True
        limits = self.limits
        return rows >= (limits.full or limits.frame_rows) or (
            rows > 0 and self._step - oldest >= limits.deadline
        )

    def _riders(self, left: int) -> list[Span]:
        """Requests that opted out, as rows of a frame that runs anyway, if it has room for all of them."""
        free = [s for s in self._running.values() if not s.request.verify and not s.reading]
        if len(free) > left or not all(self._grow_idle(seq, len(seq.tokens)) for seq in free):
            return []
        for seq in free:
            seq.last_served = self._step
        return [span_of(seq, 1, 1) for seq in free]

    def spans_ahead(self, flying: list[Span]) -> list[Span]:
        """The frame after the one in flight, planned before its answers are known.

        Without guesses every span's outcome is known but for the token itself: its KV will be there,
        and a span that reached its last given row will have answered one token, which the next frame
        takes from the device. Should that token end the sequence, the row is dropped when it lands.
        Empty when this cannot be done without preempting or without knowing tokens.
        """
        if any(must_land(span) for span in flying):
            return []
        if not any(seq.request.verify or seq.reading for seq in self._running.values()):
            return []  # nobody left who needs a frame
        flown: dict[int, tuple[Span | None, int]] = {}
        row = 0
        for span in flying:
            row += len(span.inputs)
            flown[span.seq_id] = (span, row - 1)
        left = frame_rows = self.limits.frame_rows
        spans: list[Span] = []
        served: list[Sequence] = []
        for seq in self._order():
            planned = continued(seq, *flown.get(seq.request.id, (None, 0)), left)
            if planned is None:
                continue
            if not self._grow_idle(seq, planned.start + len(planned.inputs)):
                return []
            spans.append(planned)
            served.append(seq)
            left -= len(planned.inputs)
            if left == 0:
                break
        for seq in served:
            seq.last_served = self._step
        if spans:
            self._count_frame(frame_rows - left)
        return spans

    def _order(self) -> list[Sequence]:
        """Who is served first. Where there are rows for all, the order cannot matter."""
        self._disturbed = False
        live = list(self._running.values())
        wanted = sum(len(seq.tokens) - seq.kv_len + len(seq.draft) for seq in live)
        if wanted <= self.limits.frame_rows:
            return live
        generating = sum(1 + len(seq.draft) for seq in live if seq.request.verify and not seq.reading)
        # Where they leave no row for a prompt, one that has waited long enough goes before them.
        late = self._step - PATIENCE if generating >= self.limits.frame_rows else -1
        return sorted(live, key=lambda seq: (seq.last_served > late, seq.reading, *_turn(seq)))

    def commit(self, verdicts: list[Verdict]) -> list[Delta]:
        """Make tokens public: here, and only here."""
        deltas: list[Delta] = []
        for verdict in verdicts:
            seq = self._running.get(verdict.seq_id)
            if seq is not None:  # else it was aborted while its frame ran
                deltas.append(self._commit(seq, verdict))
        return [delta for delta in deltas if delta.tokens or delta.scores or delta.finish]

    # ---- views

    @property
    def idle(self) -> bool:
        """Whether nothing is running or waiting."""
        return not self._running and not self._waiting

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none."""
        return len(self._waiting)

    def is_running(self, request_id: int) -> bool:
        """Whether a request holds pages."""
        return request_id in self._running

    def running_ids(self) -> list[int]:
        """Ids of running requests, oldest first."""
        return sorted(self._running)

    def check(self) -> None:
        """Raise InvariantBroken unless sequences and pages are consistent."""
        held: Counter[int] = Counter()
        for seq in self._running.values():
            seq.check()
            held.update(seq.pages)
            for lent in seq.lent:
                held.update(lent)
            if len(seq.pages) * self.limits.page < seq.kv_len:
                raise InvariantBroken(f"request {seq.request.id} has too few pages for its KV")
        for seq in self._waiting:
            if seq.pages or seq.lent:
                raise InvariantBroken(f"request {seq.request.id} waits but holds pages")
        self.index.check(dict(held))

    # ---- inside

    def _worth_waiting(self, seq: Sequence) -> bool:
        leader = self._running.get(seq.request.leader) if seq.request.leader is not None else None
        return (
            leader is not None and leader.reading and self.index.enabled and seq.request.scores_from is None
        )

    def _start(self, seq: Sequence) -> bool:
        page = self.limits.page
        matched: list[int] = []
        if self.index.enabled:
            # The last known token is always read again: its logits are what the next one needs. So are
            # the rows whose logits score a prompt token.
            owed = seq.score_next
            scoring = owed is not None and owed < seq.prompt_len
            num = ((owed if scoring and owed is not None else len(seq.tokens)) - 1) // page
            chain(seq.digests, seq.tokens, seq.request.salt, page, num)
            matched = self.index.match(seq.digests[:num])
        for number in matched:
            self.index.hold(number)
        needed = len(seq.tokens) // page + 1 - len(matched)
        if self._running and needed > self.index.num_available:
            self.index.release(matched)
            return False
        seq.pages = array("i", matched)
        seq.kv_len = len(matched) * page
        seq.num_indexed = len(matched)
        if seq.num_cached is None:
            seq.num_cached = seq.kv_len
            self.counters.cached_tokens += seq.kv_len
        if seq.request.verify and seq.request.speculate and self._room(seq) > 0:
            self._newcomers.append(seq)
        seq.last_served = self._step - 1  # as if just served: those already generating go first
        self._running[seq.request.id] = seq
        return True

    def _fit(self, seq: Sequence, rows: int) -> int:
        """How many of `rows` rows the sequence can get pages for."""
        if seq.request.id not in self._running:
            return 0
        page = self.limits.page
        need = seq.kv_len + rows
        if need > len(seq.pages) * page and not self._grow(seq, -(-need // page)):
            rows = min(rows, len(seq.pages) * page - seq.kv_len)
        return max(rows, 0)

    def _grow(self, seq: Sequence, num_pages: int) -> bool:
        """Get the sequence `num_pages` pages, preempting younger ones if need be."""
        while len(seq.pages) < num_pages:
            page = self.index.take()
            if page is not None:
                seq.pages.append(page)
                continue
            youngest = self._running[max(self._running)]
            if youngest is seq:
                return False
            self._preempt(youngest)
        return True

    def _grow_idle(self, seq: Sequence, length: int) -> bool:
        """Get the sequence pages for `length` tokens out of those nobody holds."""
        while len(seq.pages) * self.limits.page < length:
            page = self.index.take()
            if page is None:
                return False
            seq.pages.append(page)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._retire(seq)
        seq.kv_len = 0
        seq.num_indexed = 0
        _drop_draft(seq)
        seq.trusted = False
        self._disturbed = True
        self.counters.preempted += 1
        insort(self._waiting, seq, key=_arrival)

    def _leave(self, seq: Sequence) -> None:
        self._retire(seq)
        self._unverified -= not seq.request.verify

    def _retire(self, seq: Sequence) -> None:
        del self._running[seq.request.id]
        self.index.release(seq.pages)
        seq.pages = array("i")
        self._take_back(seq)

    def _take_back(self, seq: Sequence) -> None:
        """The pages of branches that are not needed any more."""
        for lent in seq.lent:
            self.index.release(lent)
        seq.lent.clear()

    def _commit(self, seq: Sequence, verdict: Verdict) -> Delta:
        found = verdict.tokens
        if verdict.branch:
            shared = seq.kv_len // self.limits.page
            kept = seq.lent.pop(verdict.branch - 1)
            self.index.release(seq.pages[shared:])
            seq.pages = seq.pages[:shared] + kept
        self._take_back(seq)
        num = _append(seq, found)
        seq.kv_len = min(verdict.kv_len, len(seq.tokens) - 1)
        if verdict.scores and seq.score_next is not None:
            seq.score_next += len(verdict.scores)
        if not verdict.verified:
            seq.trusted = True
            self.counters.unverified_tokens += num
        elif not seq.trusted and seq.kv_len // self.limits.page > seq.num_indexed:
            self._share(seq)
        self.counters.output_tokens += num
        if verdict.guessed:
            self._count(verdict)
        _drop_draft(seq)
        if seq.finish is not None:
            self._leave(seq)
            self.counters.finished += 1
        if num < len(found):
            verdict = verdict._replace(
                tokens=found[:num], logprobs=verdict.logprobs[:num], tops=verdict.tops[:num]
            )
        return Delta(
            verdict.seq_id, verdict.tokens, verdict.logprobs, verdict.tops, seq.finish, seq.stop_id,
            verdict.scores, verdict.score_tops, seq.num_cached or 0, verdict.accepted,
            verdict.guessed + verdict.spent, verdict.drafter, int(seq.request.verify and num > 0),
        )  # fmt: skip

    def _count_frame(self, rows: int) -> None:
        sizes = self.limits.frame_sizes or (self.limits.frame_rows,)
        self.counters.frames += 1
        self.counters.rows += rows
        self.counters.padded_rows += sizes[bisect_left(sizes, rows)] - rows

    def _count(self, verdict: Verdict) -> None:
        guessed = verdict.guessed + verdict.spent
        self.counters.guessed += guessed
        self.counters.accepted += verdict.accepted
        self.counters.rolled_back += guessed - verdict.accepted
        drafter = self.counters.drafters.setdefault(verdict.drafter, DrafterCounters())
        drafter.drafts += 1
        drafter.guessed += guessed
        drafter.accepted += verdict.accepted
        drafter.branches += verdict.branch > 0

    def _share(self, seq: Sequence) -> None:
        """Offer full canonical pages to the prefix index."""
        page = self.limits.page
        full = seq.kv_len // page
        if self.index.enabled:
            chain(seq.digests, seq.tokens, seq.request.salt, page, full)
            for i in range(seq.num_indexed, full):
                self.index.offer(seq.digests[i], seq.pages[i])
        seq.num_indexed = full


def _append(seq: Sequence, found: tuple[int, ...]) -> int:
    """Add tokens until one of them, or a limit, ends the sequence. Returns how many were added."""
    tokens, stop_ids = seq.tokens, seq.request.sampling.stop_ids
    before, guide = len(tokens), seq.guide
    for token in found[: seq.most - before]:
        if guide is not None:
            seq.finish = guide.take(token)
            if seq.finish is Finish.ABORT:  # not a token of this grammar, so not one of this text
                break
        tokens.append(token)
        if token in stop_ids:
            seq.finish, seq.stop_id = Finish.STOP, token
        if seq.finish is not None:
            break
    if found and len(tokens) >= seq.most and seq.finish is None:
        seq.finish = Finish.LENGTH  # also at max_tokens=0: a prompt that was only to be scored
    return len(tokens) - before


def _drop_draft(seq: Sequence) -> None:
    if seq.draft:
        seq.draft.clear()
    seq.drafter, seq.open, seq.ready_since, seq.branches = "", False, None, ()


def _arrival(seq: Sequence) -> int:
    return seq.request.id


def _turn(seq: Sequence) -> tuple[int, int]:
    return (seq.last_served, seq.request.id)


__all__ = ["PATIENCE", "Scheduler"]
