"""The engine's forward pass over a trainer's weights: log-probabilities with the bits of generation.

Prompts and answers are read in frames, as `LLM.score` reads them: every row's bits are a function of its own
sequence, whatever stands beside it. The trainer's tensors are shared where they can be; packed copies are
made again whenever the weights have changed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from transformers import PreTrainedModel

from samewise import machine
from samewise.config import EngineConfig
from samewise.draft.tuning import Tuning
from samewise.engine.assemble import Assembly, assemble
from samewise.errors import BadParameter, GuaranteeLost, PromptTooLong
from samewise.execute.load import Loaded
from samewise.execute.logit_edits import send
from samewise.execute.runner import kv_page_bytes
from samewise.execute.sampling import divided
from samewise.kernels.attention.base import PAGE
from samewise.model.arch import Arch
from samewise.model.linear import pack_linears
from samewise.params import GREEDY_BELOW, SamplingParams
from samewise.rl.alias import alias_model, architecture, refuse_other_models, weights_of
from samewise.rl.batch import Block, Run, TokenBatch
from samewise.rl.gradients import GradientModel, Products
from samewise.rl.state import TensorState, state_of
from samewise.types import Sampling, Span
from samewise.values import is_integer
from samewise.verify.frame_sizes import recheck_frame_sizes

if TYPE_CHECKING:
    from samewise.llm.llm import LLM

KV_TOKENS = 16_384
"""Tokens of KV that a TrainingForward keeps by default, or the longest context if that is shorter."""

KEPT_SHARE = 1 / 16
"""Of a card's memory, for products that the backward pass need not compute again. Set by hand: 8.8 GB of an
H200's hold those of 3,400 tokens of an 8B model, and of three times as many of a 1.5B model."""

FILLED = 0.75
"""Share of a frame that tokens have to fill, or they are read in smaller ones. Set by hand: padding costs as
much as tokens do, and each frame reads the weights once."""

ENTROPY_ROWS = 512
"""Rows whose entropy is computed at once: 100 MB in float32 at 50,000 tokens."""

CUDA_SIZES = (128, 512, 1024, 2048)
"""Rows of frames on CUDA. Each is tried again when the weights have changed, so they are few."""

SHARED_SETTINGS = ("attention", "linear", "compile", "frame_rows", "max_model_len")
"""Settings that bits depend on: those of the engine whose bits are wanted."""


class Scores(NamedTuple):
    """Of a batch [B, T], or of its last K columns. 0 where there is no token, or none before it."""

    logprobs: torch.Tensor  # float32, with gradients
    entropy: torch.Tensor | None  # of the distribution each token was drawn from, in nats; no gradients


class _Frame(NamedTuple):
    """Spans of a frame, and where each of its rows lies among those of the batch's blocks."""

    spans: list[Span]
    places: list[int]


class TrainingForward:
    """Log-probabilities of one model in training.

    `like`: the engine whose bits are wanted; its settings are taken over. Without it they are the default
    ones, changed by `settings` (keywords of EngineConfig). `kv_tokens` limits the length of a sequence.
    `kept_bytes`: memory for products of the forward pass that the backward pass then need not compute again;
    by default on CUDA a sixteenth of the card's. One thread uses it at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        like: LLM | None = None,
        kv_tokens: int | None = None,
        kept_bytes: int | None = None,
        **settings: Any,
    ) -> None:
        machine.pin_environment()
        refuse_other_models(model)
        self._own = dict(weights_of(model))
        self._model = ref(model)
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.kept_bytes = _kept_bytes(self.device, kept_bytes)
        arch = architecture(model)
        taken = {} if like is None else {name: getattr(like.engine.config, name) for name in SHARED_SETTINGS}
        if like is not None:
            _refuse_unlike(like, self.dtype, self.device)
        config = _config(arch, self.dtype, self.device, kv_tokens, taken | settings)
        loaded = Loaded(alias_model(model), arch, {})
        # Tensors made in inference mode could not be written by a refresh.
        with torch.inference_mode(mode=False), torch.no_grad():
            self._parts: Assembly = assemble(loaded, config, Tuning(), ahead=False)
            self._gradients = GradientModel(
                model,
                arch,
                self._parts.limits.max_model_len,
                few_operators=bool(self._parts.runner.kept_products),
            )
        self._tensors = dict(weights_of(self._parts.runner.model))
        self._state: list[TensorState] = []
        self._num_layers, self._width = len(arch.layers), model.get_input_embeddings().weight.shape[1]
        self.num_refreshes = 0
        """How often the packed weights were made again."""

    # ---- weights

    def refresh(self) -> bool:
        """Follow the trainer's weights, if they have changed since the last call. Done by every forward."""
        if (replaced := self.replaced()) is not None:
            raise GuaranteeLost(
                f"the model's {replaced} is another tensor than when this TrainingForward was made; "
                "make a new one"
            )
        state = state_of(list(self._own.values()))
        if state == self._state:
            return False
        runner = self._parts.runner
        with torch.inference_mode(mode=False), torch.no_grad(), self._parts.process.pinned():
            for name, tensor in self._own.items():
                alias = self._tensors.get(name)
                if alias is not None and alias.data_ptr() != tensor.data_ptr():
                    alias.data.copy_(tensor)  # a copy, but it shares the trainer's count of writes
            if self._parts.linears == "native":
                pack_linears(runner.model)
            if not runner.portable:
                recheck_frame_sizes(runner, self._parts.limits.max_model_len)
        self._state = state
        self.num_refreshes += 1
        return True

    def replaced(self) -> str | None:
        """The name of a parameter that the model has as another object by now, if there is one.

        Where a parameter's content is written, or its `.data` is replaced, it stays the same object.
        """
        model = self._model()
        named = () if model is None else model.named_parameters()
        return next((name for name, parameter in named if self._own.get(name) is not parameter), None)

    # ---- values and gradients

    def logprobs(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """The log-probabilities alone: see `score`."""
        return self.score(input_ids, **options).logprobs

    def score(
        self,
        input_ids: torch.Tensor,  # [B, T]
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        *,
        temperature: float = 1.0,
        logits_to_keep: int | None = None,
        entropy: bool = False,
    ) -> Scores:
        """Log-probability of every token given those before it in its sequence, [B, T].

        The bits of `LLM.score` at the same temperature: those of generation with `logprobs_mode`
        "raw_logprobs" at temperature 1, with "processed_logprobs" at others, without filters and penalties.
        Padding may stand on either side; `position_ids` that return to 0 mark packed sequences. With
        `logits_to_keep` only the last columns are computed and returned.
        """
        temperature = SamplingParams(temperature=temperature).temperature
        temperature = 1.0 if temperature < GREEDY_BELOW else temperature
        batch = TokenBatch.of(input_ids, attention_mask, position_ids)
        self._refuse_misfit(batch)
        if logits_to_keep is not None and not (is_integer(logits_to_keep) and logits_to_keep >= 0):
            raise BadParameter(
                f"logits_to_keep={logits_to_keep!r}: give the number of last columns, or None for all",
                param="logits_to_keep",
            )
        num_columns = input_ids.shape[1]
        first = 0 if logits_to_keep is None else max(0, num_columns - logits_to_keep)
        inside, places = batch.targets(first)
        shape = (input_ids.shape[0], num_columns - first)
        zeros = torch.zeros(shape, dtype=torch.float32, device=self.device)
        graph = torch.is_grad_enabled() and self._gradients.trains
        if not inside:
            values = self._gradients.without_targets(zeros) if graph else zeros
            return Scores(values, zeros.clone() if entropy else None)
        self.refresh()
        read = self._read(batch, inside, temperature, entropy=entropy, keep=graph)
        values = read.logprobs
        if graph:
            values = self._with_gradients(batch, inside, read, temperature)
        at = tuple(
            send(np.array(axis), self.device)
            for axis in zip(*((row, column - first) for row, column in places), strict=True)
        )
        entropies = None if read.entropy is None else zeros.index_put(at, read.entropy)
        return Scores(zeros.index_put(at, values), entropies)

    def _with_gradients(
        self, batch: TokenBatch, inside: list[tuple[int, int]], read: _Read, temperature: float
    ) -> torch.Tensor:
        hidden: list[torch.Tensor] = []
        tokens: list[torch.Tensor] = []
        blocks = batch.blocks()
        for block in blocks:
            ids = batch.padded(block, self.device)

            def of_block(x: torch.Tensor, block: Block = block, ids: torch.Tensor = ids) -> torch.Tensor:
                return x[block.first : block.end].view(*ids.shape, x.shape[1])

            activations = [of_block(x) for x in read.activations]
            products = [{paths: of_block(x) for paths, x in kept.items()} for kept in read.products]
            hidden.append(self._gradients.hidden(ids, activations, products).flatten(0, 1))
            tokens.append(ids.flatten())
        begins = _begins(blocks)
        at = send(np.array([begins[number] + index for number, index in inside]), self.device)
        rows, targets = _joined(hidden)[at - 1], _joined(tokens)[at]
        return self._gradients.logprobs(read.logprobs, rows, targets, temperature)

    def _refuse_misfit(self, batch: TokenBatch) -> None:
        limits = self._parts.limits
        room = min(limits.max_model_len, (limits.num_pages - 1) * PAGE)
        longest = max((len(run.tokens) for run in batch.runs), default=0)
        if longest > room:
            raise PromptTooLong(
                f"a sequence has {longest} tokens, and there is room for {room}; give kv_tokens={longest}, "
                f"at most max_model_len={limits.max_model_len}",
                param="input_ids",
            )
        vocab = limits.vocab
        for run in batch.runs:
            if odd := [token for token in run.tokens if not 0 <= token < vocab]:
                raise BadParameter(
                    f"input_ids holds {odd[0]}; token ids of this model are 0 to {vocab - 1}",
                    param="input_ids",
                )

    # ---- frames

    def _read(
        self,
        batch: TokenBatch,
        inside: list[tuple[int, int]],
        temperature: float,
        *,
        entropy: bool,
        keep: bool,
    ) -> _Read:
        """Read every sequence in frames; `keep`: also what the backward pass starts from."""
        runs, blocks = batch.runs, batch.blocks()
        trace = self._new_trace(blocks[-1].end) if keep else None
        first_target = [len(run.tokens) for run in runs]
        for number, index in inside:
            first_target[number] = min(first_target[number], index)
        logprobs: list[torch.Tensor] = []
        entropies: list[torch.Tensor] = []
        with self._parts.process.pinned():
            for frame in self._frames(runs, first_target, _begins(blocks)):
                found = self._run(frame, trace, temperature, entropy=entropy)
                logprobs.append(found[0])
                entropies.append(found[1])
        order = torch.empty(0) if not entropy else torch.cat(entropies)
        trace = trace or _Trace([], [])
        return _Read(torch.cat(logprobs), order if entropy else None, *trace)

    def _new_trace(self, num_rows: int) -> _Trace:
        """Of zeros: padding has to be finite numbers."""
        first = self._num_layers - self._num_kept_layers(num_rows)
        paths = self._parts.runner.kept_products

        def zeros(width: int) -> torch.Tensor:
            return torch.zeros(num_rows, width, dtype=self.dtype, device=self.device)

        return _Trace(
            [zeros(self._width) for _ in range(self._num_layers + 1)],
            [
                {linears: zeros(self._gradients.width_of(linears)) for linears in paths if layer >= first}
                for layer in range(self._num_layers)
            ],
        )

    def _num_kept_layers(self, num_rows: int) -> int:
        """How many layers' products are kept: of the last ones, of which the backward pass is done first."""
        widths = sum(self._gradients.width_of(linears) for linears in self._parts.runner.kept_products)
        if not widths:
            return 0
        return min(self._num_layers, self.kept_bytes // (num_rows * widths * int(self.dtype.itemsize)))

    def _frames(
        self, runs: tuple[Run, ...], first_target: list[int], begins: dict[int, int]
    ) -> Iterator[_Frame]:
        """All sequences in frames; sequences of one frame never share a page."""
        limits = self._parts.limits
        group: list[
            tuple[int, array[int]]
        ] = []  # sequences that the KV cache holds together, and their pages
        page = 1
        for number, run in enumerate(runs):
            num_pages = -(-len(run.tokens) // PAGE)
            if page + num_pages > limits.num_pages:
                yield from self._frames_of(group, runs, first_target, begins)
                group, page = [], 1
            group.append((number, array("i", range(page, page + num_pages))))
            page += num_pages
        yield from self._frames_of(group, runs, first_target, begins)

    def _frames_of(
        self,
        group: list[tuple[int, array[int]]],
        runs: tuple[Run, ...],
        first_target: list[int],
        begins: dict[int, int],
    ) -> Iterator[_Frame]:
        """Sequences with pages of their own, in frames as wide as they fill."""
        left = sum(len(runs[number].tokens) for number, _ in group)
        sizes = self._parts.runner.sizes
        room = rows_of_next_frame(left, sizes)
        spans: list[Span] = []
        places: list[int] = []
        for number, pages in group:
            tokens, start = runs[number].tokens, 0
            while start < len(tokens):
                rows = min(len(tokens) - start, room - len(places))
                spans.append(_span(number, tokens, pages, start, rows, first_target[number]))
                places += range(begins[number] + start, begins[number] + start + rows)
                start += rows
                if len(places) == room:
                    yield _Frame(spans, places)
                    spans, places = [], []
                    left -= room
                    room = rows_of_next_frame(left, sizes)

    @torch.inference_mode()
    def _run(
        self, frame: _Frame, trace: _Trace | None, temperature: float, *, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the frame's targets and, if wanted, entropies, in the order of spans."""
        runner, sampler = self._parts.runner, self._parts.sampler
        rows: list[int] = []
        targets: list[int] = []
        first = 0
        for span in frame.spans:
            begin = first + span.target_row
            rows += range(begin, begin + len(span.targets))
            targets += span.targets
            first += len(span.inputs)
        inputs, keep = runner.stage_frame(frame.spans, rows if runner.elastic else None)
        if trace is None:
            logits = runner.frame(inputs)
        else:
            put = _writer(frame.places, self.device)

            def keep_of(layer: int) -> Callable[[tuple[str, ...], torch.Tensor], None] | None:
                kept = trace.products[layer]
                return (lambda linears, y: put(kept[linears], y)) if kept else None

            logits = runner.traced(inputs, lambda layer, x: put(trace.activations[layer], x), keep_of)
        if not rows:
            empty = torch.empty(0, dtype=torch.float32, device=self.device)
            return empty, empty
        where = {row: i for i, row in enumerate(keep)} if keep is not None else None
        rows = [where[row] for row in rows] if where is not None else rows
        logits = logits.float()
        scores = sampler.score(logits, rows, targets, [temperature] * len(rows))
        return scores.clone(), _entropy(logits, rows, temperature) if entropy else scores


class _Read(NamedTuple):
    """What the frames of a batch gave."""

    logprobs: torch.Tensor  # [M], of all targets in order
    entropy: torch.Tensor | None  # [M]
    activations: list[torch.Tensor]  # see _Trace
    products: list[Products]


class _Trace(NamedTuple):
    """What a pass leaves for the backward pass, by row of all blocks."""

    activations: list[torch.Tensor]  # of each layer the input, then the last one's output: [rows, H]
    products: list[Products]  # of each layer; nothing where they are computed again


def rows_of_next_frame(num: int, sizes: tuple[int, ...]) -> int:
    """How many of so many rows the next frame takes, of the sizes there are, smallest first."""
    larger = min((size for size in sizes if size >= num), default=sizes[-1])
    smaller = max((size for size in sizes if size <= num), default=0)
    return min(num, larger) if num >= FILLED * larger or not smaller else smaller


def _writer(places: list[int], device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Writes the first rows of a frame's tensor to their places in another."""
    num, first = len(places), places[0]
    if places == list(range(first, first + num)):
        at: Any = slice(first, first + num)
    else:
        at = send(np.array(places), device)

    def write(to: torch.Tensor, x: torch.Tensor) -> None:
        to[at] = x[:num]

    return write


def _begins(blocks: list[Block]) -> dict[int, int]:
    """Where each sequence begins among the rows of all blocks, by number."""
    return {
        number: block.first + row * block.width for block in blocks for row, number in enumerate(block.runs)
    }


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _span(
    number: int, tokens: tuple[int, ...], pages: array[int], start: int, rows: int, first_target: int
) -> Span:
    """`rows` tokens of a sequence from `start` on. Row i predicts token start + i + 1."""
    begin = max(start, first_target - 1)
    targets = tokens[begin + 1 : start + rows + 1]
    return Span(
        number, start, tokens[start : start + rows], len(tokens) - start, pages, Sampling(), [], len(tokens),
        targets=targets, target_row=begin - start,
    )  # fmt: skip


def _entropy(logits: torch.Tensor, rows: list[int], temperature: float) -> torch.Tensor:
    """Of each row, in nats."""
    parts = []
    for start in range(0, len(rows), ENTROPY_ROWS):
        part = rows[start : start + ENTROPY_ROWS]
        logprobs = divided(logits[part], [temperature] * len(part)).log_softmax(-1)
        parts.append(-(logprobs.exp() * logprobs.clamp(min=-1e30)).sum(-1))
    return torch.cat(parts)


def _kept_bytes(device: torch.device, given: int | None) -> int:
    """The setting, or its default. Not what is free: gradients would have other bits in another run."""
    if given is None:
        on_cuda = device.type == "cuda"
        return int(torch.cuda.get_device_properties(device).total_memory * KEPT_SHARE) if on_cuda else 0
    if not is_integer(given) or given < 0:
        raise BadParameter(
            f"kept_bytes={given!r}: give a number of bytes, 0 to keep nothing", param="kept_bytes"
        )
    return given


def _config(
    arch: Arch, dtype: torch.dtype, device: torch.device, kv_tokens: int | None, settings: dict[str, Any]
) -> EngineConfig:
    """The settings of a forward pass without drafts, with KV for so many tokens."""
    longest = settings.get("max_model_len") or arch.max_positions
    tokens = min(longest, KV_TOKENS if kv_tokens is None else kv_tokens)
    num_pages = -(-tokens // PAGE) + 2
    if device.type == "cuda" and not (settings.get("frame_sizes") or settings.get("frame_rows")):
        settings = settings | {"frame_sizes": CUDA_SIZES}
    fixed = {
        "model": "a model in training", "proposer": "none", "cublas": False, "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_memory": max(4, num_pages) * kv_page_bytes(arch, dtype),
    }  # fmt: skip
    return EngineConfig.of(**settings | fixed)


def _refuse_unlike(llm: LLM, dtype: torch.dtype, device: torch.device) -> None:
    runner = llm.engine.runner
    if (runner.dtype, runner.device.type) != (dtype, device.type):
        raise BadParameter(
            f"the model is in {dtype} on {device.type} and the engine in {runner.dtype} on "
            f"{runner.device.type}; only with the same arithmetic are their bits equal",
            param="like",
        )


_FORWARDS: WeakKeyDictionary[PreTrainedModel, TrainingForward] = WeakKeyDictionary()


def logprobs(model: PreTrainedModel, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Log-probabilities with the engine's bits and ordinary gradients: see `TrainingForward.score`.

    A TrainingForward with default settings is made at the first call and kept as long as the model.
    """
    forward = _FORWARDS.get(model)
    first = next(model.parameters())
    kind = first.device, first.dtype
    if forward is None or (forward.device, forward.dtype) != kind or forward.replaced() is not None:
        forward = _FORWARDS[model] = TrainingForward(model)
    return forward.logprobs(input_ids, **options)


__all__ = ["KV_TOKENS", "SHARED_SETTINGS", "Scores", "TrainingForward", "logprobs", "rows_of_next_frame"]
