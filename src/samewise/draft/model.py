"""The proposer `model`, SpecDec's drafter: a small model with weights, runner and KV pages of its own.

It has the target model's vocabulary. It reads each sequence in pieces, a bounded number of rows per step, so
a long prompt does not delay the engine's step; it drafts for a sequence once it has read it to the end. A
draft is a chain of passes for all sequences at once: the first reads what was committed since the last one,
each further pass takes its tokens from the pass before. On CUDA a pass is launched while the one before it
runs, and finds its tokens on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samewise.draft.base import Drafter
from samewise.draft.cost_model import FrameCosts
from samewise.draft.model_pacing import Draft, ModelPacing, Pauses
from samewise.draft.model_passes import RankedPasses
from samewise.draft.model_reader import Reader
from samewise.draft.tuning import DEFAULTS, Tuning
from samewise.execute.pack import pack_fast, pack_frame
from samewise.execute.runner import Runner
from samewise.execute.sampling import Sampler
from samewise.execute.sampling_rows import rows_of_asks
from samewise.types import Ask, Proposal, Span, Verdict


class DraftModel(Drafter):
    """Drafts by regular decoding of the draft model. Owns the draft model's pages.

    `max_rows`: of a pass. `ahead`: a pass is launched before the choices of the one before it are known.
    `standalone`: not used by `auto`, so it pauses by itself where drafts do not pay.
    """

    name = "model"

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        num_pages: int,
        max_len: int,
        frames: FrameCosts,
        clock: Callable[[], float],
        *,
        max_rows: int,
        ahead: bool = False,
        standalone: bool = True,
        tuning: Tuning = DEFAULTS,
    ) -> None:
        cuda, model = runner.device.type == "cuda", tuning.model
        self._read_rows = model.cuda_read_rows if cuda else model.cpu_read_rows
        self._pass_rows = max_rows
        self._runner, self._passes = runner, RankedPasses(runner, sampler, max_rows, model)
        self._max_ahead = int(ahead)
        self._reader = Reader(num_pages, max_len)
        self._pacing = ModelPacing(frames, clock, tuning)
        self._pauses = Pauses(frames, clock, tuning) if standalone else None
        self._num_read_passes = self._num_renewals = self._last_passes = 0

    @property
    def quiet(self) -> bool:
        """True during a pause, once all drafts are verified."""
        return self._pauses is not None and self._pauses.pausing and not self._pacing.has_drafts

    @property
    def revision(self) -> int:
        """How often the model that is drafted for was replaced."""
        return max(0, self._num_renewals - 1)

    # ---- drafts

    def propose(self, asks: list[Ask]) -> list[Proposal]:
        """Drafts for every sequence that is read to its end in this step, as far as they pay."""
        asks = [ask for ask in asks if ask.room > 0]
        if not asks:
            return []
        if self._pauses is not None:
            self._pauses.begin([ask.seq_id for ask in asks])
            if self._pauses.pausing:
                return []
        self._pacing.begin(len(asks))
        self._last_passes = 0
        plan = self._reader.plan(asks, self._read_rows, self._pass_rows)
        self._read(plan.early)
        if not plan.ended:
            return []
        drafts = [self._new_draft(ask) for ask in plan.ended]
        self._chain(plan.last, drafts)
        if not plan.early:
            self._last_passes = max(len(draft.choices) for draft in drafts)
        return self._pacing.proposals(drafts, self.name)

    def passes_of(self, proposals: list[Proposal]) -> int:  # noqa: ARG002 - some drafts were cut
        """Passes of the last chain; 0 where prompts were read before it."""
        return self._last_passes

    def _new_draft(self, ask: Ask) -> Draft:
        wanted = min(ask.room, ask.max_nodes) if ask.max_nodes else ask.room
        return Draft(ask, *self._reader.pages_for_draft(ask, wanted))

    def _chain(self, spans: list[Span], drafts: list[Draft]) -> None:
        """Passes while another one pays."""
        edited = any(draft.ask.sampling.edited for draft in drafts)  # edits need all tokens before a row
        max_ahead = 0 if edited else self._max_ahead
        rows = self._launch_first(spans, drafts)
        under_way = [drafts]  # of each pass: its drafts, in the order of their rows
        while under_way:
            if len(under_way) <= max_ahead:
                rows = self._go_on(drafts, under_way, rows)
            self._pacing.add(under_way.pop(0), self._passes.take())
            if not under_way:
                rows = self._go_on(drafts, under_way, rows)
        for draft in drafts:  # the last token of a chain was no input
            self._reader.note_drafted(draft.ask, [choice.token for choice in draft.choices[:-1]])

    def _go_on(
        self, drafts: list[Draft], under_way: list[list[Draft]], rows: dict[int, int]
    ) -> dict[int, int]:
        """Launch another pass if it pays. Returns the rows of the last pass by sequence."""
        ahead = len(under_way)
        longest = max(len(draft.choices) for draft in drafts)
        live = [
            draft
            for draft in drafts
            if len(draft.choices) == longest and longest + ahead < draft.max_tokens and not draft.ended
        ]
        if not live or not self._pacing.worth_another(drafts, live, ahead):
            return rows
        under_way.append(live)
        return self._launch_next(live, ahead, rows)

    def _launch_first(self, spans: list[Span], drafts: list[Draft]) -> dict[int, int]:
        """The pass that reads sequences to their end. Returns the row of each one's last token."""
        staging = self._runner.fast_staging(sum(len(span.inputs) for span in spans))
        rows: list[int] = []
        row = -1
        for span in spans:
            row += len(span.inputs)
            rows.append(row)
        sampled = [one._replace(row=rows[one.row]) for one in rows_of_asks([draft.ask for draft in drafts])]
        self._passes.launch(pack_frame(spans, staging), rows, sampled)
        self._reader.note_read(spans)
        return {draft.ask.seq_id: row for draft, row in zip(drafts, rows, strict=True)}

    def _launch_next(self, drafts: list[Draft], ahead: int, rows: dict[int, int]) -> dict[int, int]:
        """A pass with one row per draft; `rows`: where the pass before left the tokens not known here."""
        asks = [
            draft.ask._replace(
                draft=[*draft.ask.draft, *(choice.token for choice in draft.choices)], pages=draft.pages
            )
            for draft in drafts
        ]
        sources = [rows[ask.seq_id] for ask in asks] if ahead else None
        inputs = pack_fast(asks, self._runner.fast_staging(len(asks)), sources, ahead)
        self._passes.launch(inputs, list(range(len(asks))), rows_of_asks(asks, ahead))
        return {ask.seq_id: row for row, ask in enumerate(asks)}

    # ---- reading

    def meet(self, asks: list[Ask]) -> None:
        """Read new prompts while the device is busy with the frame before, where drafts are wanted anyway."""
        if self._pauses is None or self._pauses.pausing:
            return
        self._pauses.interrupt()
        self._read(self._reader.plan_prompts(asks, self._read_rows, self._pass_rows))

    def _read(self, passes: list[list[Span]]) -> None:
        for spans in passes:
            staging = self._runner.fast_staging(sum(len(span.inputs) for span in spans))
            self._passes.read(pack_frame(spans, staging))
            self._reader.note_read(spans)
            self._num_read_passes += 1

    # ---- the engine's calls

    def observe(self, verdicts: list[Verdict]) -> None:
        """Learn how good the drafts were."""
        for verdict in verdicts:
            self._pacing.observe(verdict)
        if self._pauses is not None:
            self._pauses.observe(verdicts)

    def forget(self, seq_id: int) -> None:
        """Free the sequence's pages."""
        self._reader.forget(seq_id)
        self._pacing.forget(seq_id)
        if self._pauses is not None:
            self._pauses.interrupt()

    def recover(self) -> None:
        """Drop all sequences and take all pages back."""
        self._passes.recover()
        self._reader.recover()
        self._pacing.recover()
        if self._pauses is not None:
            self._pauses.recover()

    def warm(self, max_num_seqs: int) -> None:  # noqa: ARG002 - all sizes that may come
        """On CUDA: compile and capture the passes now, not while the first requests wait."""
        self._passes.warm()

    def renew(self, contract_id: str) -> None:  # noqa: ARG002 - any replacement of weights counts
        """Measure anew after the target model's weights were replaced."""
        if self._num_renewals:
            self._pacing.reset()
            if self._pauses is not None:
                self._pauses.recover()
        self._num_renewals += 1

    def stats(self) -> dict[str, dict[str, Any]]:
        """Passes, seconds, chain lengths and acceptance; without `auto` also pauses."""
        report = self._pacing.report() | {"read_passes": self._num_read_passes}
        if self._pauses is not None:
            report |= {"pauses": self._pauses.total, "speedup": self._pauses.speedup}
        return {self.name: report}


__all__ = ["DraftModel"]
