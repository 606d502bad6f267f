"""Decide which sequences run and what the next frame holds, and commit verdicts. Host only: no tensors.

Requests are admitted by arrival, those of one owner by priority (`order.share_places`). A frame's rows go
first to sequences that generate, so that they keep streaming while prompts are read, then to prompts; among
equals the one that waited longest goes first. Where the generating sequences leave no row, one that got none
for some steps goes before them (`order`), so that none starves. When pages run out the sequence that would be
admitted last is preempted: it releases its pages and later computes its KV again, to the same bits. The first
can always take what it needs: a request that could not run alone was refused at intake.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from samewise.counters import Counters
from samewise.errors import InvariantBroken, QueueFull
from samewise.follow_up import FrameToFollow
from samewise.kv.prefix import PrefixIndex
from samewise.schedule.drafts import (
    append_tokens,
    burst_room,
    clear_draft,
    draft_room,
    extend_draft,
    max_tree_nodes,
)
from samewise.schedule.followed import frame_to_follow
from samewise.schedule.limits import Limits
from samewise.schedule.order import frame_due, serving_order, share_places, widest_frame
from samewise.schedule.owners import Owners, short_frame, without_crowds, without_slow_grammars
from samewise.schedule.paging import Paging
from samewise.schedule.plan import ask_of, continued, must_land, span_of
from samewise.schedule.registry import Registry
from samewise.schedule.suspects import Suspects
from samewise.types import Ask, Delta, Finish, Guide, Proposal, Received, Request, Sequence, Span, Verdict


@dataclass(slots=True)
class Scheduler:
    """Owns every Sequence and, through Paging, every page number."""

    limits: Limits
    counters: Counters = field(default_factory=Counters)
    registry: Registry = field(default_factory=Registry)
    frame_seconds: Callable[[int], float] = lambda _: 0.0  # of so many rows, as measured; 0.0: not known
    _paging: Paging = field(init=False)
    _waiting: list[Sequence] = field(default_factory=list)  # by place
    _running: dict[int, Sequence] = field(default_factory=dict)  # by admission
    _new_sequences: deque[Sequence] = field(default_factory=deque)  # admitted, not reported yet
    _step: int = 0
    _num_unverified: int = 0  # running or waiting requests with verify=False
    _preempted: bool = False  # whether a sequence was preempted since `_order` was called
    _suspects: Suspects = field(default_factory=Suspects)
    _owners: Owners = field(default_factory=Owners)
    _served: list[tuple[Sequence, int]] = field(default_factory=list)  # by the last `spans`; when before
    _moves: list[tuple[int, int]] = field(default_factory=list)  # see `take_moves`

    def __post_init__(self) -> None:
        self._paging = Paging(self.limits)

    # ---- requests

    def refuse_if_full(self) -> None:
        """Raise QueueFull if no further request may wait."""
        max_queued = self.limits.max_queued
        if max_queued is not None and len(self._waiting) >= max_queued:
            raise QueueFull(
                f"{len(self._waiting)} requests are waiting and max_queued is {max_queued}; "
                "try again later or raise max_queued"
            )

    def add(self, request: Request, guide: Guide | None = None) -> None:
        """Queue a checked request, with a guide if it has a grammar."""
        self.refuse_if_full()
        self.counters.requests += 1
        self._num_unverified += not request.verify
        self.counters.prompt_tokens += len(request.prompt)
        first = request.first_scored
        seq = Sequence(
            request,
            [*request.prompt, *request.output],
            min(len(request.prompt) + request.max_tokens, self.limits.max_model_len),
            score_next=None if first is None else first + request.num_scores,
            guide=guide,
            guide_moved=bool(request.output),
        )
        insort(self._waiting, seq, key=_place)
        self.registry.add(seq)

    def abort(self, request_id: int) -> Delta | None:
        """Drop a request, running or waiting. None if it has ended already."""
        self.registry.drop(request_id)
        seq = self._remove(request_id)
        if seq is None:
            return None
        seq.finish = Finish.ABORT
        self.counters.aborted += 1
        return Delta(request_id, (), (), (), Finish.ABORT)

    def end(self, request_id: int) -> None:
        """Finish a request whose text is complete (a stop string was found), without a further delta."""
        self.registry.drop(request_id)
        if self._remove(request_id) is not None:
            self.counters.finished += 1

    def preempt(self, request_id: int) -> bool:
        """Release a running sequence's pages and queue it again. False if it is not running."""
        seq = self._running.get(request_id)
        if seq is None:
            return False
        self._preempt(seq)
        return True

    # ---- one step, in the order of the loop

    def admit(self) -> None:
        """Move waiting requests to running while there is room, in order of priority and arrival."""
        self._step += 1
        if not (self._suspects and self._admit_suspect()):
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        if not self._waiting or len(self._running) >= self.limits.max_num_seqs:
            return
        self._waiting = share_places(self._waiting)
        held_back: list[Sequence] = []
        while self._waiting and len(self._running) < self.limits.max_num_seqs:
            seq = self._waiting.pop(0)
            if self._waits_for_leader(seq):
                held_back.append(seq)
            elif not self._start(seq):
                held_back.append(seq)
                break
        self._waiting[:0] = held_back

    def asks(self, *, verified: bool) -> list[Ask]:
        """Sequences past their prompt that could use guesses: the verified ones, or the unverified ones.

        A sequence whose draft is complete and waits for its frame is not among them.
        """
        if not verified and not self._num_unverified:
            return []
        asks: list[Ask] = []
        max_nodes = max_tree_nodes(self.limits, len(self._running)) if verified else 0
        for seq in list(self._running.values()):
            request = seq.request
            if request.verify is not verified or seq.prefilling:
                continue
            if verified and not request.speculate:
                continue
            if request.id in self._running and (seq.drafting or not seq.draft):
                room = draft_room(seq, self.limits) if verified else burst_room(seq, self.limits)
                nodes = min(max_nodes - len(seq.draft), self._paging.draft_room(seq, room))
                end = len(seq.tokens) + len(seq.draft) + max(room, nodes)
                # Drafts may use free pages; they never preempt a sequence. An unverified request needs its
                # pages to go on, so it may.
                if room > 0 and (self._paging.grow(seq, end) if verified else self._grow(seq, end)):
                    asks.append(ask_of(seq, room, nodes))
        return [ask for ask in asks if ask.seq_id in self._running]

    def extend(self, proposals: list[Proposal]) -> None:
        """Append guesses to drafts. Invalid guesses are dropped: proposers are not trusted.

        A draft that no proposal extends is complete, and is verified with the next frame.
        """
        for seq in self._running.values():
            seq.drafting = False
        for proposal in proposals:
            running = self._running.get(proposal.seq_id)
            if running is not None and not running.prefilling and running.request.verify:
                extend_draft(running, proposal, self.limits)

    def spans(self) -> list[Span]:
        """The next frame, at most `max_rows` rows. Empty when no verification is due yet."""
        if not frame_due(self._running.values(), self._step, self.limits):
            return []
        left = max_rows = self._widest()
        spans: list[Span] = []
        self._served = []
        for seq in self._order(max_rows):
            if left == 0:
                break
            known = len(seq.tokens) - seq.kv_len
            if seq.drafting or (known == 1 and not seq.request.verify):
                continue
            if spans and seq.draft and left < known + len(seq.draft):
                continue  # a draft cut short would be wasted in part; it goes first next time
            rows = self._rows_with_pages(seq, min(left, known + len(seq.draft)))
            if rows:
                spans.append(span_of(seq, rows, known))
                self._serve(seq)
                left -= rows
        if self._preempted:  # a sequence that has a span already may have been preempted for an older one
            spans = [span for span in spans if span.seq_id in self._running]
            left = max_rows - sum(len(span.inputs) for span in spans)
        if spans:
            left = self._use_free_rows(spans, left)
            self._count_frame(max_rows - left)
        return spans

    def plan_again(self, spans: list[Span]) -> list[Span] | None:
        """The frame in place of these spans, which will not run, where a request with an owner came since.

        None: the frame stays as it is.
        """
        if self._suspects or not any(seq.request.owner for seq in self._waiting):
            return None
        for seq, last_served in self._served:
            seq.last_served = last_served
        self._count_frame(sum(len(span.inputs) for span in spans), -1)
        self._admit_waiting()
        return self.spans()

    def spans_ahead(self, in_flight: list[Span]) -> list[Span]:
        """The frame after the one in flight, planned before its tokens are known.

        Without guesses a span's outcome is known except for the token itself: its KV will be there, and the
        token of its last row is an input that the next frame takes from the device. If that token ends the
        sequence, the row's result is dropped. Empty where the plan needs the tokens, or preemption.
        """
        if any(must_land(span) for span in in_flight):
            return []
        if not any(seq.request.verify or seq.prefilling for seq in self._running.values()):
            return []  # only unverified sequences are left, and they need no frame
        last_rows: dict[int, tuple[Span | None, int]] = {}
        row = 0
        for span in in_flight:
            row += len(span.inputs)
            last_rows[span.seq_id] = (span, row - 1)
        left = max_rows = self._widest()
        spans: list[Span] = []
        served: list[Sequence] = []
        for seq in self._order(max_rows):
            planned = continued(seq, *last_rows.get(seq.request.id, (None, 0)), left)
            if planned is None:
                continue
            if not self._paging.grow(seq, planned.start + len(planned.inputs)):
                return []
            spans.append(planned)
            served.append(seq)
            left -= len(planned.inputs)
            if left == 0:
                break
        for seq in served:
            seq.last_served = self._step
        if spans:
            self._count_frame(max_rows - left)
        return spans

    def to_follow(self, in_flight: list[Span]) -> FrameToFollow | None:
        """The frame in flight, for a follow-up; None where the next frame needs more than its tokens.

        Requests are admitted here: the follow-up has their first rows.
        """
        if self._suspects or self._num_unverified:
            return None
        self._admit_waiting()
        if len(self._in_turn()) < len(self._running):
            return None
        return frame_to_follow(in_flight, self._running, self._paging, self.limits, self._widest())

    def still_follows(self, frame: FrameToFollow) -> bool:
        """Whether the frame's sequences are still those that run.

        Requests that came since then wait for the frame after it, but for those that have an owner.
        """
        if self._num_unverified or any(seq.request.owner for seq in self._waiting):
            return False
        return self._running.keys() == set(frame.seq_ids)

    def spans_following(self, frame: FrameToFollow) -> list[Span]:
        """The frame after the one that was described, now that its tokens and the next drafts are known."""
        self._step += 1
        spans: list[Span] = []
        running, step = self._running, self._step
        columns = frame.column("next_given"), frame.column("next_rows")
        for seq_id, reading, next_rows in zip(frame.seq_ids, *columns, strict=True):
            seq = running.get(seq_id)
            if seq is not None and (next_rows or not reading):  # else it has ended, or there was no row
                given = len(seq.tokens) - seq.kv_len
                spans.append(span_of(seq, next_rows or 1 + len(seq.draft), given))
                seq.last_served = step
        self._count_frame(sum([len(span.inputs) for span in spans]))
        self.counters.follow_ups += 1
        return spans

    def commit(self, verdicts: list[Verdict]) -> list[Delta]:
        """Make tokens public. The only place where a Delta with tokens is made."""
        deltas: list[Delta] = []
        for verdict in verdicts:
            seq = self._running.get(verdict.seq_id)
            if seq is not None:  # else it was aborted while its frame ran
                deltas.append(self._commit(seq, verdict))
        return [delta for delta in deltas if delta.tokens or delta.scores or delta.finish]

    def take_moves(self) -> list[tuple[int, int]]:
        """(from, to): slots whose KV has to be moved before the next pass, since the last call."""
        moves, self._moves = self._moves, []
        return moves

    def new_sequences(self, max_tokens: int) -> list[Ask]:
        """Sequences admitted since the last call, until they have `max_tokens` tokens in all or more."""
        asks: list[Ask] = []
        while self._new_sequences and max_tokens > 0:
            seq = self._new_sequences.popleft()
            if seq.request.id in self._running:
                asks.append(ask_of(seq, 0))
                max_tokens -= len(seq.tokens) + len(seq.request.prediction)
        return asks

    # ---- after a failure

    def recover(self, received: Mapping[int, Received | None], *, blame: bool) -> list[Delta]:
        """Drop all state but the requests and what was received of them; see Registry.recover.

        With `blame` the sequences that were running when a step failed are suspects: they run one at a time
        until each has a token. Returns the last deltas of requests that end with an error.
        """
        registry = self.registry
        if blame and all(seq.finish is Finish.ERROR for seq in registry.sequences.values()):
            error = sys.exception()
            raise InvariantBroken(f"steps fail without any request to blame: {error!r}") from error
        blamed = {*self._running, *registry.delivery.before} or set(registry.sequences)
        going_on, failed = registry.recover(received, blamed if blame else ())
        self._begin_again(going_on)
        self.counters.recoveries += 1
        self.counters.failed += len(failed)
        return [Delta(seq.request.id, (), (), (), Finish.ERROR) for seq in failed]

    def restart(self, received: Mapping[int, Received | None]) -> None:
        """Drop all pages and drafts, and the prefix cache: other weights will compute what follows.

        Requests go on from what their callers have; `received` as in `recover`.
        """
        self._begin_again(self.registry.recover(received, ())[0])

    def _begin_again(self, sequences: list[Sequence]) -> None:
        self._paging, self._moves = Paging(self.limits), []
        self._running, self._waiting, self._new_sequences = {}, sequences, deque()
        self._suspects = Suspects(seq for seq in sequences if seq.num_failures)
        self._num_unverified = sum(not seq.request.verify for seq in sequences)

    @property
    def testing_suspects(self) -> bool:
        """Whether sequences run one at a time, because a step failed."""
        return bool(self._suspects)

    def _admit_suspect(self) -> bool:
        """Let the oldest suspect without progress run, alone. False: none is left."""
        seq = self._suspects.oldest(self.registry)
        if seq is None:
            return False
        for other in list(self._running.values()):
            if other is not seq:
                self._preempt(other)
        if not self._running:
            self._waiting.remove(seq)
            self._start(seq)
        return True

    # ---- views

    @property
    def index(self) -> PrefixIndex:
        """The prefix cache and the page pool."""
        return self._paging.index

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
        """Requests that hold no pages."""
        return len(self._waiting)

    def is_running(self, request_id: int) -> bool:
        """Whether a request holds pages."""
        return request_id in self._running

    def running_ids(self) -> list[int]:
        """Ids of running requests, oldest first."""
        return sorted(self._running)

    def check(self) -> None:
        """Raise InvariantBroken unless sequences and pages are consistent."""
        self._paging.check(self._running.values(), self._waiting)

    # ---- admission and preemption

    def _waits_for_leader(self, seq: Sequence) -> bool:
        """Whether a request with the same prompt is still reading it: its pages are worth waiting for."""
        leader = self._running.get(seq.request.leader) if seq.request.leader is not None else None
        return (
            leader is not None
            and leader.prefilling
            and self.index.enabled
            and seq.request.first_scored is None
        )

    def _start(self, seq: Sequence) -> bool:
        if not self._paging.start(seq, force=not self._running):
            return False
        if seq.num_cached is None:
            seq.num_cached = seq.kv_len
            self.counters.cached_tokens += seq.kv_len
        if seq.request.verify and seq.request.speculate and draft_room(seq, self.limits) > 0:
            self._new_sequences.append(seq)
        seq.last_served = self._step - 1  # as if just served: sequences already generating go first
        self._running[seq.request.id] = seq
        if seq.guide is not None and seq.guide_moved:  # here, so that the sequence is to blame if it raises
            seq.guide.restore(tuple(seq.tokens[seq.prompt_len :]))
            seq.guide_moved = False
        return True

    def _remove(self, request_id: int) -> Sequence | None:
        """Take a request out, running or waiting."""
        seq = self._running.get(request_id)
        if seq is not None:
            self._retire(seq)
            return seq
        seq = next((s for s in self._waiting if s.request.id == request_id), None)
        if seq is not None:
            self._waiting.remove(seq)
            self._num_unverified -= not seq.request.verify
        return seq

    def _retire(self, seq: Sequence) -> None:
        del self._running[seq.request.id]
        self._owners.left(seq.request.owner, self._step)
        self._paging.release(seq)
        self._num_unverified -= not seq.request.verify

    def _preempt(self, seq: Sequence) -> None:
        del self._running[seq.request.id]
        self._paging.release(seq)
        seq.kv_len = 0
        seq.num_indexed = 0
        clear_draft(seq)
        seq.unverified_kv = False
        self._preempted = True
        self.counters.preempted += 1
        insort(self._waiting, seq, key=_place)

    def _grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Get the sequence pages for this many tokens, preempting sequences after it if need be."""
        while not self._paging.grow(seq, num_tokens):
            last = share_places(self._running.values())[-1]
            if last is seq:
                return False
            self._preempt(last)
        return True

    # ---- frames

    def _widest(self) -> int:
        """Rows of the next frame, at most. Fewer where a crowd is in it and rows are what takes time."""
        running = list(self._running.values())
        max_rows = widest_frame(running, self.limits)
        canonical = self.limits.canonical_rows or self.limits.max_rows
        if canonical < self.limits.max_rows or not self._owners.crowded(running, self._step):
            return max_rows
        stands_back = len(without_crowds(running, self._step)) < len(running)
        return max_rows if stands_back else short_frame(max_rows, self.frame_seconds)

    def _order(self, max_rows: int) -> list[Sequence]:
        """Running sequences in the order they are served."""
        self._preempted = False
        return serving_order(self._in_turn(), self._step, max_rows)

    def _in_turn(self) -> list[Sequence]:
        """Running sequences that may have rows in the next frame."""
        running = list(self._running.values())
        if not self._owners.shared(running, self._step):
            return running
        # A crowd is counted whole: of those whose masks take long, only some are left then.
        return without_slow_grammars(without_crowds(running, self._step))

    def _serve(self, seq: Sequence) -> None:
        """Note that a sequence has rows in the next frame."""
        self._served.append((seq, seq.last_served))
        seq.last_served = self._step

    def _rows_with_pages(self, seq: Sequence, rows: int) -> int:
        """How many of `rows` rows the sequence can get pages for."""
        if seq.request.id not in self._running:
            return 0
        if rows > self._paging.room(seq) and not self._grow(seq, seq.kv_len + rows):
            rows = min(rows, self._paging.room(seq))
        return max(rows, 0)

    def _use_free_rows(self, spans: list[Span], left: int) -> int:
        """Give free rows to unverified requests. Returns how many rows are left."""
        unverified = self._unverified_rows(left) if self._num_unverified else []
        spans += unverified
        return left - len(unverified)

    def _unverified_rows(self, left: int) -> list[Span]:
        """One row for each unverified request, if there are rows and free pages for all of them."""
        unverified = [s for s in self._running.values() if not s.request.verify and not s.prefilling]
        if len(unverified) > left or not all(self._paging.grow(seq, len(seq.tokens)) for seq in unverified):
            return []
        for seq in unverified:
            self._serve(seq)
        return [span_of(seq, 1, 1) for seq in unverified]

    def _count_frame(self, rows: int, num: int = 1) -> None:
        """Count `num` frames of so many rows; -1 where one was counted that will not run."""
        sizes = self.limits.frame_sizes or (self.limits.max_rows,)
        self.counters.frames += num
        self.counters.rows += num * rows
        self.counters.padded_rows += num * (sizes[bisect_left(sizes, rows)] - rows)

    # ---- commit

    def _commit(self, seq: Sequence, verdict: Verdict) -> Delta:
        self.registry.will_commit(seq)
        if verdict.path:
            first = verdict.kv_len - len(verdict.path)
            self._moves += self._paging.moves(seq, first, verdict.path)
        num = append_tokens(seq, verdict.tokens)
        seq.kv_len = min(verdict.kv_len, len(seq.tokens) - 1)
        if verdict.scores and seq.score_next is not None:
            seq.score_next += len(verdict.scores)
        if not verdict.verified:
            seq.unverified_kv = True
            self.counters.unverified_tokens += num
        elif not seq.unverified_kv:
            self._paging.share(seq)
        self.counters.output_tokens += num
        if verdict.guessed:
            self.counters.add_draft(verdict.drafter, verdict.guessed, verdict.accepted)
        clear_draft(seq)
        if seq.finish is not None:
            self.registry.will_end(seq)
            self._retire(seq)
            self.counters.finished += 1
        return Delta(
            verdict.seq_id, verdict.tokens[:num], verdict.logprobs[:num], verdict.tops[:num], seq.finish,
            seq.stop_id, verdict.scores, verdict.score_tops, seq.num_cached or 0, verdict.accepted,
            verdict.guessed, verdict.drafter, int(seq.request.verify and num > 0), verdict.ranks[:num],
            verdict.score_ranks,
        )  # fmt: skip


def _place(seq: Sequence) -> int:
    return seq.place


__all__ = ["Scheduler"]
