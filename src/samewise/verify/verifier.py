"""The replay: spans → verdicts. The only source of truth.

`launch` starts a frame and returns at once where the device allows it, so the host can turn the last
frame's tokens into text meanwhile; `verdicts` waits and judges.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from samewise.errors import GuaranteeLost
from samewise.execute.pack import pack_frame
from samewise.execute.runner import Runner
from samewise.execute.sampling import Sampler
from samewise.execute.sampling_rows import SamplingRow, rows_of_spans
from samewise.execute.staging import Batch
from samewise.kernels.graph import Captured
from samewise.types import Sampling, Span, TopLogprobs, Truth, Verdict
from samewise.verify.judge import judge, winning_branches

Places = range | dict[int, int]  # a frame's row → its row among the logits there are


class _Found(NamedTuple):
    """A frame's answers, still on the device where they can be."""

    packed: torch.Tensor  # [R, 2] int32: tokens, and the bits of their log-probabilities
    tops: dict[int, TopLogprobs]  # by row
    scores: list[float]  # of all targets, in the order of spans
    score_tops: list[TopLogprobs]


class FrameInFlight:
    """A frame on its way. Nothing it holds is public before `verdicts`."""

    def __init__(self, verifier: Verifier, spans: list[Span]) -> None:
        self.spans = spans
        self._verifier = verifier
        self.waited = 0.0  # seconds the host stood waiting for the device
        self._landed: torch.cuda.Event | None = None
        self._found = self._run() if verifier.ahead else None

    def _run(self) -> _Found:
        found = self._verifier.run(self.spans)
        if self._verifier.cuda:
            self._landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._landed.record()
        return found

    def verdicts(self) -> list[Verdict]:
        """Wait for the frame and judge every span."""
        found = self._found or self._run()
        if self._landed is not None:
            began = time.perf_counter()
            self._landed.synchronize()
            self.waited = time.perf_counter() - began
        answers = found.packed.numpy()
        tokens = answers[:, 0].tolist()
        logprobs = answers[:, 1].view(np.float32).tolist()
        verdicts = _judge_all(self.spans, tokens, logprobs, found)
        return winning_branches(verdicts) if len({v.seq_id for v in verdicts}) < len(verdicts) else verdicts


class Verifier:
    """Runs frames over one runner.

    `ahead`: a frame starts when it is launched, so that another may be launched behind it before its
    answers are known. Otherwise it runs when its verdicts are asked for. No bit depends on it.
    """

    @torch.inference_mode()
    def __init__(self, runner: Runner, sampler: Sampler, *, ahead: bool) -> None:
        self._runner, self._sampler = runner, sampler
        self.cuda = runner.device.type == "cuda"
        self.ahead = ahead
        # Two, in turn: one frame's answers may be read while the next one's arrive.
        shape = (runner.widest, 2)
        self._hosts = [torch.empty(shape, dtype=torch.int32, pin_memory=self.cuda) for _ in range(2)]
        # A frame's logits always lie in the same buffer, so its plain choices can be captured too.
        self._plain: dict[tuple[int, bool], Captured[None]] = {}
        for batch in self._kinds() if self.cuda else ():
            self._plain[_kind(batch)] = self._capture(batch)

    def _kinds(self) -> Iterator[Batch]:
        """An empty frame of every size, with the whole head and with less of it."""
        for size in self._runner.sizes:
            staging = self._runner.staging(size)
            yield pack_frame([], staging)
            if staging.num_kept:
                yield pack_frame([], staging, list(range(staging.num_kept)))

    def _capture(self, batch: Batch) -> Captured[None]:
        raw, keep = self._runner.frame(batch), batch.keep
        return Captured(lambda: self._choose(raw, [], keep), self._runner.device)

    @torch.inference_mode()
    def prove(self) -> None:
        """Raise GuaranteeLost unless every way to a choice gives a row the same bits, wherever it stands.

        A frame whose rows are all greedy takes a shorter way than one with a sampled row in it, scoring takes
        a third, and each is taken at every size: company must not show in the answer.
        """
        runner = self._runner
        rows = runner.frame_rows
        generator = torch.Generator(runner.device).manual_seed(0)
        shape = (rows, runner.arch.vocab)
        block = torch.randn(shape, generator=generator, device=runner.device, dtype=torch.float32) * 4
        block = block.to(runner.dtype)
        truth = self._proof(block, pack_frame([], runner.staging(rows)))
        others = [self._proof(block, batch) for batch in self._kinds()] if self.cuda else []
        if truth is None or any(other is None for other in others):
            same = False
        else:
            same = all(other is not None and torch.equal(other, truth[: len(other)]) for other in others)
        if not same:
            raise GuaranteeLost(
                "the sampler gives a row other bits in other company or at another place; "
                "the engine will not start. Try another device or dtype"
            )

    def _proof(self, block: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        """What is chosen for the rows of a block, as many as fit, in a frame like this; None if it varies."""
        runner, keep = self._runner, batch.keep
        plain = self._plain.get(_kind(batch))
        head = batch.num_rows if keep is None else len(keep)
        if plain is None:  # any tensor will do
            raw = torch.empty(head, runner.arch.vocab, dtype=runner.dtype, device=runner.device)
        else:  # the captured choices read a frame's own
            raw = runner.frame(batch)
        rows = min(head, block.shape[0])
        draws = [SamplingRow(0, Sampling(temperature=1.0), (), (), 1)]
        found = []
        for shift, company in ((0, []), (0, draws), (head // 2, []), (head - 1, draws)):
            raw.copy_(block[torch.arange(head, device=block.device) % block.shape[0]].roll(shift, 0))
            if company or plain is None:
                self._choose(raw.float(), company, keep)
            else:
                plain()
            found.append(runner.picks[:head].roll(-shift, 0).cpu())
        tokens: list[int] = found[0][:, 0].tolist()
        raw.copy_(raw.roll(-(head - 1), 0))
        scores = self._sampler.score(raw.float(), list(range(head)), tokens).cpu().view(torch.int32)
        # The sampled row itself may choose otherwise: it stands at row 0 here and at 1 after the roll.
        same = all(torch.equal(other[2:], found[0][2:]) for other in found)
        return found[0][:rows] if same and torch.equal(scores, found[0][:, 1]) else None

    def launch(self, spans: list[Span]) -> FrameInFlight:
        """A frame over these spans."""
        return FrameInFlight(self, spans)

    @torch.inference_mode()
    def run(self, spans: list[Span]) -> _Found:
        """One frame: logits, choices, and whatever else was asked about its rows."""
        sampler, runner = self._sampler, self._runner
        runner.store.copy([span.copy for span in spans if span.copy is not None])
        batch, keep = runner.load(spans, _wanted(spans) if runner.elastic else None)
        raw = runner.frame(batch)
        place = range(raw.shape[0]) if keep is None else {row: i for i, row in enumerate(keep)}
        plain = self._plain.get(_kind(batch))
        draws = rows_of_spans(spans, place)
        rows, nums = _top_rows(spans)
        targeted = any(span.targets for span in spans)
        if plain is not None and not draws:
            plain()
        logits = raw.float() if draws or rows or targeted or plain is None else raw
        if draws or plain is None:
            self._choose(logits, draws, batch.keep)
        scores, score_tops = self._score(logits, spans, place) if targeted else ([], [])
        found = sampler.top(logits, [place[row] for row in rows], nums) if rows else []
        # Both in one piece: anything else would have to be put together here, and waited for.
        host = self._hosts[0][: batch.num_rows]
        self._hosts.reverse()
        host.copy_(runner.picks[: batch.num_rows], non_blocking=True)
        return _Found(host, dict(zip(rows, found, strict=True)), scores, score_tops)

    def _choose(self, logits: torch.Tensor, draws: list[SamplingRow], keep: torch.Tensor | None = None) -> None:
        """Every row's token, left where the next frame can take its inputs from."""
        if logits.shape[0] == 0:
            return
        picks = self._sampler.sample(logits, draws)
        rows: slice | torch.Tensor = slice(picks.tokens.shape[0]) if keep is None else keep
        self._runner.picks[rows, 0] = picks.tokens.to(torch.int32)
        self._runner.picks[rows, 1] = picks.logprobs.view(torch.int32)

    def _score(
        self, logits: torch.Tensor, spans: list[Span], place: Places
    ) -> tuple[list[float], list[TopLogprobs]]:
        rows: list[int] = []
        targets: list[int] = []
        nums: list[int] = []
        first = 0
        for span in spans:
            if span.targets:
                begin = first + span.target_row
                rows += [place[row] for row in range(begin, begin + len(span.targets))]
                targets += span.targets
                nums += [span.target_tops] * len(span.targets)
            first += len(span.inputs)
        if not rows:
            return [], []
        scores: list[float] = self._sampler.score(logits, rows, targets).tolist()
        wants = [(row, num) for row, num in zip(rows, nums, strict=True) if num]
        found = iter(self._sampler.top(logits, [r for r, _ in wants], [n for _, n in wants]) if wants else [])
        return scores, [next(found) if num else () for num in nums]


def _kind(batch: Batch) -> tuple[int, bool]:
    """What a captured choice depends on: how many rows there are, and whether the head sees all of them."""
    return batch.num_rows, batch.keep is not None


def _wanted(spans: list[Span]) -> list[int]:
    """Rows whose logits anybody will look at."""
    rows: list[int] = []
    first = 0
    for span in spans:
        length, begin = len(span.inputs), span.given - 1
        if span.targets:
            begin = min(begin, span.target_row)
        rows += range(first + begin, first + length)
        first += length
    return rows


def _top_rows(spans: list[Span]) -> tuple[list[int], list[int]]:
    """Rows whose alternatives were asked for, and how many."""
    rows: list[int] = []
    nums: list[int] = []
    first = 0
    for span in spans:
        num = span.sampling.top_logprobs
        if num:
            wanted = range(first + span.given - 1, first + len(span.inputs))
            rows += wanted
            nums += [num] * len(wanted)
        first += len(span.inputs)
    return rows, nums


def _judge_all(spans: list[Span], tokens: list[int], logprobs: list[float], found: _Found) -> list[Verdict]:
    verdicts: list[Verdict] = []
    first, scored = 0, 0
    for span in spans:
        end = first + len(span.inputs)
        begin = first + span.given - 1
        if span.sampling.top_logprobs is None and not span.targets:
            truth = Truth(tuple(tokens[begin:end]), tuple(logprobs[begin:end]))
        else:
            upto = scored + len(span.targets)
            truth = Truth(
                tuple(tokens[begin:end]),
                tuple(logprobs[begin:end]),
                _tops(span, range(begin, end), found),
                tuple(found.scores[scored:upto]),
                tuple(found.score_tops[scored:upto]),
            )
            scored = upto
        verdicts.append(judge(span, truth))
        first = end
    return verdicts


def _tops(span: Span, rows: range, found: _Found) -> tuple[TopLogprobs, ...]:
    if span.sampling.top_logprobs is None:
        return ()
    return tuple(found.tops.get(row, ()) for row in rows)


__all__ = ["FrameInFlight", "Verifier"]
