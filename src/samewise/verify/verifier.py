"""The verifier: runs frames over spans and judges them. The only source of verified tokens.

`launch` starts a frame and returns at once where the device allows it, so that the host can turn the previous
frame's tokens into text meanwhile; `verdicts` waits and judges.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from samewise.execute.logit_edits import send
from samewise.execute.pack import pack_frame
from samewise.execute.runner import Runner
from samewise.execute.sampling import Sampler, divided
from samewise.execute.sampling_rows import LogitRows, SamplingRow, rows_of_spans
from samewise.execute.staging import PassInputs
from samewise.follow_up import FollowUp, FrameOutputs
from samewise.kernels.graph import CapturedGraph
from samewise.types import Candidates, Sampling, Span, TopLogprobs, Truth, Verdict
from samewise.verify.judge import judge

Ints = np.ndarray[Any, np.dtype[np.int32]]


class FrameResult(NamedTuple):
    """What a frame sampled and scored. On CUDA the host tensor is valid once the copy to it is done."""

    packed: torch.Tensor  # [R, 2 + NUM_CANDIDATES] int32 on the host: see `Runner.frame_outputs`
    shown: dict[int, tuple[int, TopLogprobs]]  # rank of the token, and alternatives, by row
    scores: list[float]  # of all targets, in the order of spans
    score_tops: list[TopLogprobs]
    score_ranks: list[int | None]


class StartedFrame(NamedTuple):
    """A frame whose logits are being computed; of these rows, None: of all."""

    inputs: PassInputs
    keep: list[int] | None
    logits: torch.Tensor


class FrameInFlight:
    """A launched frame. Nothing it holds is public before `verdicts`."""

    def __init__(self, verifier: Verifier, spans: list[Span], started: StartedFrame | None = None) -> None:
        self.spans = spans
        self._verifier = verifier
        self.launched = 0.0  # when the device began, by the engine's clock
        self.landed = 0.0  # when its outputs had arrived, if that was before `verdicts`
        self.waited = 0.0  # seconds the host waited for the device
        self._done: torch.cuda.Event | None = None
        self._result = self._run(started) if verifier.ahead else None
        self.num_rows = sum([len(span.inputs) for span in spans])
        self.prefill = any(span.given > 1 for span in spans)  # whether it reads a prompt

    @property
    def begun(self) -> bool:
        """Whether the device was given the frame. Until then it may be dropped."""
        return self._result is not None

    def _run(self, started: StartedFrame | None = None) -> FrameResult:
        result = self._verifier.run(self.spans, started)
        if self._verifier.cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()
        return result

    def _wait(self) -> FrameResult:
        result = self._result or self._run()
        if self._done is not None:
            began = time.perf_counter()
            self._done.synchronize()
            self.waited += time.perf_counter() - began
            self._done = None
        return result

    def outputs(self) -> FrameOutputs:
        """Wait for the frame; where its outputs lie, until the frame after the next is launched."""
        packed = self._wait().packed
        return FrameOutputs(packed.data_ptr(), packed.shape[1], 2 if self._verifier.with_candidates else 0)

    def verdicts(self) -> list[Verdict]:
        """Wait for the frame and judge every span: one verdict per sequence."""
        result = self._wait()
        packed = result.packed.numpy()
        tokens = packed[:, 0].tolist()
        logprobs = packed[:, 1].view(np.float32).tolist()
        candidates = packed[:, 2:] if self._verifier.with_candidates else None
        return _judge_all(self.spans, tokens, logprobs, result, candidates)


class Verifier:
    """Runs frames over one runner.

    `with_candidates`: verdicts carry the most probable next tokens of their rows, for proposers.
    `ahead`: a frame starts when it is launched, so that another may be launched behind it before its tokens
    are known to the host. Otherwise it runs when its verdicts are asked for. No bit depends on it.
    """

    @torch.inference_mode()
    def __init__(self, runner: Runner, sampler: Sampler, *, ahead: bool) -> None:
        self.runner, self.sampler, self._with_candidates = runner, sampler, False
        self.cuda = runner.device.type == "cuda"
        self.ahead = ahead
        # Two, in turn: one frame's results may be read while the next one's are copied.
        shape = runner.frame_outputs.shape
        self._hosts = [torch.empty(shape, dtype=torch.int32, pin_memory=self.cuda) for _ in range(2)]
        # On CUDA a frame's logits always lie in the same buffer, so greedy sampling of them is captured too.
        self._greedy: dict[tuple[int, bool], CapturedGraph[None]] = {}
        self._capture()

    @property
    def with_candidates(self) -> bool:
        """Whether verdicts carry candidates."""
        return self._with_candidates

    @with_candidates.setter
    def with_candidates(self, wanted: bool) -> None:
        if wanted != self._with_candidates:
            self._with_candidates = wanted
            self._capture()

    @torch.inference_mode()
    def _capture(self) -> None:
        for inputs in self.empty_frames() if self.cuda else ():
            self._greedy[_shape_key(inputs)] = self._capture_greedy(inputs)

    def empty_frames(self) -> Iterator[PassInputs]:
        """A frame without spans of every size, with logits of all rows and, where possible, of some."""
        for size in self.runner.sizes:
            staging = self.runner.staging(size)
            yield pack_frame([], staging)
            if staging.num_kept:
                yield pack_frame([], staging, list(range(staging.num_kept)))

    def _capture_greedy(self, inputs: PassInputs) -> CapturedGraph[None]:
        logits, keep = self.runner.frame(inputs), inputs.keep
        return CapturedGraph(lambda: self._sample(logits, [], keep), self.runner.device)

    def launch(self, spans: list[Span], started: StartedFrame | None = None) -> FrameInFlight:
        """A frame over these spans, which may have been started already."""
        return FrameInFlight(self, spans, started)

    @torch.inference_mode()
    def start(self, follow_up: FollowUp) -> StartedFrame:
        """Start a frame that is given as numbers; `launch` has its rows sampled."""
        inputs, keep = self.runner.stage_follow_up(follow_up)
        return StartedFrame(inputs, keep, self.runner.frame(inputs))

    def _start(self, spans: list[Span]) -> StartedFrame:
        runner = self.runner
        inputs, keep = runner.stage_frame(spans, _rows_to_sample(spans) if runner.elastic else None)
        return StartedFrame(inputs, keep, runner.frame(inputs))

    @torch.inference_mode()
    def run(self, spans: list[Span], started: StartedFrame | None = None) -> FrameResult:
        """One frame: logits, sampled tokens, top log-probabilities and scores of targets."""
        runner = self.runner
        inputs, keep, raw = started or self._start(spans)
        logit_rows: LogitRows = (
            range(raw.shape[0]) if keep is None else {row: i for i, row in enumerate(keep)}
        )
        greedy = self._greedy.get(_shape_key(inputs))
        sampled = rows_of_spans(spans, logit_rows)
        shown_rows = _shown_rows(spans)
        has_targets = any(span.targets for span in spans)
        if greedy is not None and not sampled:
            greedy()
        logits = raw.float() if sampled or shown_rows or has_targets or greedy is None else raw
        if sampled or greedy is None:
            self._sample(logits, sampled, inputs.keep)
        scored = self._score(logits, spans, logit_rows) if has_targets else ([], [], [])
        shown = {}
        if shown_rows:
            shown = self._show(self.sampler.with_processed(logits, sampled), shown_rows, logit_rows)
        # All in one copy: joining several on the host would have to wait for them.
        host = self._hosts[0][: inputs.num_rows]
        self._hosts.reverse()
        host.copy_(runner.frame_outputs[: inputs.num_rows], non_blocking=True)
        return FrameResult(host, shown, *scored)

    def _sample(
        self, logits: torch.Tensor, rows: list[SamplingRow], keep: torch.Tensor | None = None
    ) -> None:
        """Sample every row into the runner's `frame_outputs`, where the next frame may read its inputs."""
        if logits.shape[0] == 0:
            return
        output = self.sampler.sample(logits, rows)
        at: slice | torch.Tensor = slice(output.tokens.shape[0]) if keep is None else keep
        self.runner.frame_outputs[at, 0] = output.tokens.to(torch.int32)
        self.runner.frame_outputs[at, 1] = output.logprobs.view(torch.int32)
        if self._with_candidates:
            self.runner.frame_outputs[at, 2:] = self.sampler.candidates(logits)

    def _show(
        self, logits: torch.Tensor, shown: list[tuple[int, Sampling]], logit_rows: LogitRows
    ) -> dict[int, tuple[int, TopLogprobs]]:
        """Rank of the sampled token, and alternatives, of rows whose log-probabilities are shown."""
        rows = [row for row, _ in shown]
        at = [logit_rows[row] for row in rows]
        where = send(np.array(rows), self.runner.device)
        ranks = self.sampler.ranks(logits, at, self.runner.frame_outputs[where, 0])
        tops = self.sampler.alternatives(logits, at, [sampling for _, sampling in shown])
        return dict(zip(rows, zip(ranks, tops, strict=True), strict=True))

    def _score(
        self, logits: torch.Tensor, spans: list[Span], logit_rows: LogitRows
    ) -> tuple[list[float], list[TopLogprobs], list[int | None]]:
        """Log-probabilities of all targets; their rows' top log-probabilities, and ranks, where asked for."""
        rows: list[int] = []
        targets: list[int] = []
        nums: list[int | None] = []
        divisors: list[float] = []
        first = 0
        for span in spans:
            if span.targets:
                begin = first + span.target_row
                rows += [logit_rows[row] for row in range(begin, begin + len(span.targets))]
                targets += span.targets
                nums += [span.target_tops] * len(span.targets)
                divisors += [span.sampling.divisor] * len(span.targets)
            first += len(span.inputs)
        if not rows:
            return [], [], []
        scores: list[float] = self.sampler.score(logits, rows, targets, divisors).tolist()
        with_tops = [(i, num) for i, num in enumerate(nums) if num]
        shown, selected = logits, [rows[i] for i, _ in with_tops]
        if any(divisors[i] != 1.0 for i, _ in with_tops):
            shown = divided(logits[selected], [divisors[i] for i, _ in with_tops])
            selected = list(range(len(selected)))
        tops = self.sampler.top(shown, selected, [num for _, num in with_tops])
        in_order = iter(tops)
        ranked = [i for i, num in enumerate(nums) if num is not None]
        tokens = torch.tensor([targets[i] for i in ranked])
        ranks = iter(self.sampler.ranks(logits, [rows[i] for i in ranked], tokens))
        return (
            scores,
            [next(in_order) if num else () for num in nums],
            [None if num is None else next(ranks) for num in nums],
        )

    # ── start-up: see `sampler_trial` ────────────────────────────────────────────────────────────

    def sample_block(
        self, block: torch.Tensor, inputs: PassInputs, *, sampled_row: int | None = None
    ) -> torch.Tensor:
        """Outputs [R, 2] on the CPU for a block of logits in place of a frame's own, one row for each.

        `sampled_row`: its token is drawn; all others are greedy, and on CUDA then take another way.
        """
        runner, keep, greedy = self.runner, inputs.keep, self._greedy.get(_shape_key(inputs))
        if greedy is None:
            raw = block
        else:  # the captured graph reads the frame's own logits buffer
            raw = runner.frame(inputs)
            raw.copy_(block)
        if greedy is None or sampled_row is not None:
            drawn = Sampling(temperature=1.0)
            rows = [] if sampled_row is None else [SamplingRow(sampled_row, drawn, (), (), 1)]
            self._sample(raw.float(), rows, keep)
        else:
            greedy()
        at = slice(len(block)) if keep is None else keep
        return runner.frame_outputs[at, :2].cpu()


def _shape_key(inputs: PassInputs) -> tuple[int, bool]:
    """What a captured graph depends on: the number of rows, and whether all their logits are computed."""
    return inputs.num_rows, inputs.keep is not None


def _rows_to_sample(spans: list[Span]) -> list[int]:
    """Rows whose logits are needed: to sample from, or to score targets with."""
    rows: list[int] = []
    first = 0
    for span in spans:
        length, begin = len(span.inputs), span.given - 1
        if span.targets:
            begin = min(begin, span.target_row)
        rows += range(first + begin, first + length)
        first += length
    return rows


def _shown_rows(spans: list[Span]) -> list[tuple[int, Sampling]]:
    """Rows whose log-probabilities are shown, and what is wanted of each."""
    rows: list[tuple[int, Sampling]] = []
    first = 0
    for span in spans:
        if span.sampling.top_logprobs is not None:
            rows += [(row, span.sampling) for row in range(first + span.given - 1, first + len(span.inputs))]
        first += len(span.inputs)
    return rows


def _judge_all(
    spans: list[Span], tokens: list[int], logprobs: list[float], result: FrameResult, ids: Ints | None
) -> list[Verdict]:
    verdicts: list[Verdict] = []
    first = first_score = 0
    for span in spans:
        end = first + len(span.inputs)
        begin = first + span.given - 1
        candidates = None
        if ids is not None and begin < end:
            candidates = Candidates(span.inputs[span.given - 1 :], ids[begin:end])
        if span.sampling.top_logprobs is None and not span.targets:
            truth = Truth(tuple(tokens[begin:end]), tuple(logprobs[begin:end]), candidates=candidates)
        else:
            end_score = first_score + len(span.targets)
            wanted = span.sampling.top_logprobs is not None
            shown = [result.shown[row] for row in range(begin, end)] if wanted else []
            truth = Truth(
                tuple(tokens[begin:end]),
                tuple(logprobs[begin:end]),
                tuple(top for _, top in shown),
                tuple(result.scores[first_score:end_score]),
                tuple(result.score_tops[first_score:end_score]),
                candidates,
                tuple(rank for rank, _ in shown),
                tuple(rank for rank in result.score_ranks[first_score:end_score] if rank is not None),
            )
            first_score = end_score
        verdicts.append(judge(span, truth))
        first = end
    return verdicts


__all__ = ["FrameInFlight", "FrameResult", "StartedFrame", "Verifier"]
