"""Logits, the tokens before and noise -> the next token and its log-probability.

One rule for greedy and sampled: argmax(processed logits / temperature + Gumbel(seed, index, position,
token id)); temperature 0 is plain argmax; equal scores go to the lowest id. Processing, in order:
repetition, frequency and presence penalties, logit bias, allowed ids, grammar, bad words, min_tokens;
then, on logits divided by temperature, min-p, top-k and top-p. Log-probabilities are the model's own,
before any of this.

The frame rule: what a row gets depends on its own logits and its own `Draw`, bit for bit, never on
its place or its company. Two ways to keep it:

- CPU: the vector and tail paths of exp and log differ, and where one ends depends on the flat offset. So
  they only ever see a tensor of V elements made for one row. Exact operations (argmax, comparisons,
  sums of integers, single additions and divisions) may see anything.
- CUDA: exp and log are the same function of every element, in any block [R, V]. Sums are sums of integers,
  so no order of summation shows (`scan`).

Probability masses are exp(logit - max) as integers, 2**s times the real thing, s so large as int64
allows for V of them. Sums are then exact, and tokens of equal logits stay or go together.

If the bars leave nothing to choose from, the last ones give way: min_tokens first, then bad words.
Allowed ids and grammars always hold, even where the model itself says -inf.

Stateless: a Sampler keeps nothing from call to call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samewise.kernels import noise
from samewise.types import Sampling, TopLogprobs

_LOWEST = -3.4028234663852886e38  # the lowest finite float32
_COLDEST = 1e-5  # below this a temperature would underflow float32 arithmetic

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]


class Draw(NamedTuple):
    """What one row's choice depends on beyond its logits."""

    row: int
    sampling: Sampling
    prompt: Sequence[int]  # counted by the repetition penalty
    output: Sequence[int]  # counted by all penalties: committed, then guessed
    position: int  # absolute position of the token being chosen
    mask: bytes | None = None  # what a grammar lets come here: a bit per token id, lowest first


class Picks(NamedTuple):
    """A token for every row, and the model's own log-probability of it, before processing."""

    tokens: Tensor  # [R] int64
    logprobs: Tensor  # [R] float32


class _Scale(NamedTuple):
    """A row's largest logit and the log of the sum of exp(logit - largest)."""

    top: Tensor  # [R] float32
    log_sum: Tensor  # [R] float32


class Sampler:
    """Choose, score and rank."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._device = device
        self._by_row = device.type == "cpu"

    def pick(self, logits: Tensor, draws: Sequence[Draw]) -> Picks:
        """A token for every row of [R, V] float32; rows without a Draw get the plain argmax.

        With no draws at all the block may be as the model made it, in 16 bits: the answer is the same.
        """
        busy = [draw for draw in draws if not draw.sampling.plain]
        if self._by_row:
            return self._pick_by_row(logits, busy)
        tokens, top, log_sum = self._measure(logits)
        if not busy:
            return Picks(tokens, log_sum.neg())  # what the largest logit comes to
        tokens = self._pick_block(logits, busy)
        chosen = logits.gather(1, tokens[:, None])[:, 0].float()
        return Picks(tokens, chosen - top - log_sum)

    def score(self, logits: Tensor, rows: Sequence[int], targets: Sequence[int]) -> Tensor:
        """Log-probability of targets[i] under row rows[i]: float32, the bits `pick` gives for that token."""
        if not rows:
            return torch.empty(0, dtype=torch.float32, device=logits.device)
        scale = self._scale(logits, rows)
        where = self._send(np.array([rows, targets]))
        return logits[where[0], where[1]] - scale.top - scale.log_sum

    def top(self, logits: Tensor, rows: Sequence[int], nums: Sequence[int]) -> list[TopLogprobs]:
        """The nums[i] likeliest tokens of row rows[i] (-1: all), by falling value, then by rising id."""
        counts = [self._vocab if num < 0 else min(num, self._vocab) for num in nums]
        most = max(counts, default=0)
        if most == 0:
            return [() for _ in counts]
        scale = self._scale(logits, rows)
        picked = logits[self._send(np.array(rows))]
        values = picked - scale.top[:, None] - scale.log_sum[:, None]
        # topk orders equal values as it likes; so take every value that could belong, and order those.
        floor = values.topk(most).values[:, -1:]
        row, token = (values >= floor).nonzero().unbind(1)
        found = values[row, token].cpu().numpy()
        row_of, token_of = row.cpu().numpy(), token.cpu().numpy()
        ends = np.searchsorted(row_of, np.arange(len(rows) + 1))
        return [
            _ranked(token_of[ends[i] : ends[i + 1]], found[ends[i] : ends[i + 1]], count)
            for i, count in enumerate(counts)
        ]

    def rivals(self, logits: Tensor, draws: Sequence[Draw], num: int) -> tuple[Tensor, Tensor]:
        """The `num` best choices of every row and how surely each is it: [R, num] ids and shares.

        For guesses alone: no bit of it is promised. A share is the softmax of what is compared to choose:
        the model's probability when greedy, the margin of scaled logits plus noise when sampled.
        """
        busy = [draw for draw in draws if not draw.sampling.plain]
        if self._by_row:
            scores = logits.clone() if busy else logits
            for draw in busy:
                scores[draw.row] = self._row_scores(logits[draw.row : draw.row + 1], draw)
        else:
            scores = self._block_scores(logits, busy) if busy else logits
        best, ids = scores.topk(num)
        return ids, (best - scores.logsumexp(-1, keepdim=True)).exp().nan_to_num(0.0)

    # ── by row: the CPU's way ────────────────────────────────────────────────────────────────────

    def _pick_by_row(self, logits: Tensor, busy: Sequence[Draw]) -> Picks:
        rows = range(logits.shape[0])
        block = logits.numpy()
        # NumPy promises the first of equal maxima, and is several times faster than torch at this.
        tokens = block.argmax(-1)
        scale = self._scale(logits, rows, tokens)
        for draw in busy:
            tokens[draw.row] = self._pick_row(logits[draw.row : draw.row + 1], draw)
        chosen = torch.from_numpy(block[np.arange(len(rows)), tokens])
        return Picks(torch.from_numpy(tokens), chosen - scale.top - scale.log_sum)

    def _pick_row(self, row: Tensor, draw: Draw) -> int:
        """[1, V] -> the token chosen."""
        return int(self._row_scores(row, draw).numpy().argmax())

    def _row_scores(self, row: Tensor, draw: Draw) -> Tensor:
        """[1, V] -> what is compared, [V]."""
        sampling = draw.sampling
        if draw.sampling.edited:
            row = self._edited(row, [draw._replace(row=0)])
        if sampling.temperature == 0.0:
            return row[0]
        gap = (row.amax() - row[0]).div_(max(sampling.temperature, _COLDEST))
        if sampling.filtered:
            gap.masked_fill_(gap > _reach(gap, sampling), math.inf)
        return noise.gumbel(torch.tensor([_key(draw)]), self._vocab)[0].sub_(gap)

    # ── by block: everyone else's ────────────────────────────────────────────────────────────────

    def _pick_block(self, logits: Tensor, busy: Sequence[Draw]) -> Tensor:
        """[R, V] -> [R] tokens. Whatever a row did not ask for leaves its bits as they are."""
        from samewise.kernels import sampling as scan

        return scan.choose(*self._prepared(logits, busy))

    def _block_scores(self, logits: Tensor, busy: Sequence[Draw]) -> Tensor:
        """[R, V] -> what is compared, [R, V]."""
        return _compared(*self._prepared(logits, busy))

    def _prepared(self, logits: Tensor, busy: Sequence[Draw]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits after edits and filters, and the temperature and noise key of every row."""
        edited = [draw for draw in busy if draw.sampling.edited]
        if edited:
            logits = self._edited(logits, edited)
        num_rows = logits.shape[0]
        if filtered := [draw for draw in busy if draw.sampling.filtered]:
            logits = self._filtered(logits, filtered)
        rows = [draw.row for draw in busy]
        temperature = np.zeros((num_rows, 1), dtype=np.float32)
        temperature[rows, 0] = [_warmth(draw.sampling) for draw in busy]
        keys = np.zeros((num_rows, 2), dtype=np.int64)
        keys[rows] = [_key(draw) for draw in busy]
        return logits, self._send(temperature), self._send(keys)

    def _filtered(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        """A copy of [R, V] with min-p, top-k and top-p applied to the draws' rows."""
        rows = self._send(np.array([draw.row for draw in draws]))
        temperature = np.array([[_warmth(draw.sampling)] for draw in draws], dtype=np.float32)
        far = np.array([[_min_p_gap(draw.sampling)] for draw in draws], dtype=np.float32)
        most = np.array([[draw.sampling.top_k or self._vocab] for draw in draws])
        share = np.array([[draw.sampling.top_p] for draw in draws])
        some = logits[rows]
        gap = _gap(some, self._send(temperature))
        reach = _reaches(gap, self._send(far), self._send(most), self._send(share))
        return logits.index_copy(0, rows, some.masked_fill_(gap > reach, -math.inf))

    def _measure(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[R, V], also in 16 bits → argmax, largest logit, log of the sum of exp above it, each [R]."""
        from samewise.kernels import sampling as scan  # needs triton, which only CUDA has

        return scan.measure(logits, _mass_bits(logits))

    def _send(self, array: npt.NDArray[Any]) -> Tensor:
        """To the device, without waiting for what the device is doing."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    # ── both ways ────────────────────────────────────────────────────────────────────────────────

    def _scale(self, logits: Tensor, rows: Sequence[int], best: Ids | None = None) -> _Scale:
        """Of the given rows, in that order. `best` are their argmaxes where known."""
        if not self._by_row:
            _, top, log_sum = self._measure(logits)
            where = self._send(np.array(rows))
            return _Scale(top[where], log_sum[where])
        scratch = torch.empty(self._vocab)
        measured: dict[int, tuple[float, float]] = {}
        for i, row in enumerate(rows):
            if row not in measured:
                token = None if best is None else int(best[i])
                measured[row] = _measure_row(logits[row], scratch, token)
        pairs = torch.tensor([measured[row] for row in rows], dtype=torch.float32)
        return _Scale(pairs[:, 0], pairs[:, 1])

    def _edited(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        """A copy of [R, V] with the draws' penalties, bias and bars in their rows. Exact at any shape."""
        logits = logits.clone(memory_format=torch.contiguous_format)
        flat = logits.view(-1)
        if (edit := self._collect(draws, _repetitions)) is not None:
            at, penalty = edit
            old = flat[at]
            flat[at] = torch.where(old > 0, old / penalty, old * penalty)
        for kind in (_occurrences, _biases):
            if (edit := self._collect(draws, kind)) is not None:
                at, amount = edit
                flat[at] += amount
        fenced = [draw for draw in draws if draw.sampling.allowed_token_ids is not None]
        masked = [(draw.row, draw.mask) for draw in draws if draw.mask is not None]
        barred = [draw for draw in draws if _may_bar(draw)]
        if rows := sorted({draw.row for draw in (*fenced, *barred)} | {row for row, _ in masked}):
            # What the model rules out must still beat what is barred, or the allowed ids might not hold.
            where = self._send(np.array(rows))
            logits.index_copy_(0, where, logits[where].clamp_(min=_LOWEST))
        if (edit := self._collect(fenced, _allowed)) is not None:
            kept = flat[edit[0]]
            logits.index_fill_(0, self._send(np.array([draw.row for draw in fenced])), -math.inf)
            flat[edit[0]] = kept
        if masked:
            where = self._send(np.array([row for row, _ in masked]))
            outside = self._outside([mask for _, mask in masked])
            logits.index_copy_(0, where, logits[where].masked_fill_(outside, -math.inf))
        if (edit := self._collect(barred, self._bars)) is not None:
            flat[edit[0]] = -math.inf
        return logits

    def _collect(
        self, draws: Sequence[Draw], kind: Callable[[Draw], tuple[Ids, Values] | None]
    ) -> tuple[Tensor, Tensor] | None:
        """One kind of edit of all draws: flat places in the block, and a value for each."""
        found = [(draw.row, edit) for draw in draws if (edit := kind(draw)) is not None]
        if not found:
            return None
        inside = [(row, ids, values, ids < self._vocab) for row, (ids, values) in found]
        places = np.concatenate([ids[ok] + row * self._vocab for row, ids, _, ok in inside])
        amounts = np.concatenate([values[ok] for _, _, values, ok in inside])
        return self._send(places), self._send(amounts)

    def _outside(self, masks: Sequence[bytes]) -> Tensor:
        """[K, V] bool: the ids the masks leave out. Bits travel packed and are spread where they are used."""
        width = -(-self._vocab // 8)
        packed = np.frombuffer(b"".join(_fitted(mask, width) for mask in masks), dtype=np.uint8)
        packed = packed.reshape(len(masks), width)
        if self._by_row:
            return torch.from_numpy(_unpack(packed, self._vocab) == 0)
        places = torch.arange(8, dtype=torch.uint8, device=self._device)
        bits = (self._send(packed.copy())[:, :, None] >> places) & 1
        return bits.view(len(masks), width * 8)[:, : self._vocab] == 0

    def _bars(self, draw: Draw) -> tuple[Ids, Values] | None:
        """Ids that may not be chosen here; the kinds that would leave nothing are passed over."""
        left = self._pool(draw)
        barred: list[Ids] = []
        for kind in (_bad_endings(draw), _early_stops(draw)):
            ids = np.array([token for token in kind if token < self._vocab], dtype=np.int64)
            rest = left.copy()
            rest[ids] = False
            if len(ids) and rest.any():
                left = rest
                barred.append(ids)
        return _edit(np.unique(np.concatenate(barred))) if barred else None

    def _pool(self, draw: Draw) -> npt.NDArray[np.bool_]:
        """[V]: what allowed ids and the grammar leave to choose from."""
        allowed, pool = draw.sampling.allowed_token_ids, np.ones(self._vocab, dtype=np.bool_)
        if allowed is not None:
            pool[:] = False
            pool[[token for token in allowed if token < self._vocab]] = True
        if draw.mask is not None:
            packed = np.frombuffer(_fitted(draw.mask, -(-self._vocab // 8)), dtype=np.uint8)
            pool &= _unpack(packed, self._vocab) == 1
        return pool


# ── what a draw asks for, on the host ────────────────────────────────────────────────────────────


def _edit(ids: npt.ArrayLike, values: npt.ArrayLike = 0.0) -> tuple[Ids, Values]:
    places = np.asarray(ids, dtype=np.int64)
    return places, np.broadcast_to(np.asarray(values, dtype=np.float32), places.shape)


def _repetitions(draw: Draw) -> tuple[Ids, Values] | None:
    penalty = draw.sampling.repetition_penalty
    if penalty == 1.0:
        return None
    # A token may be there twice: both read its old logit and write the same new one.
    past = [np.asarray(tokens, dtype=np.int64) for tokens in (draw.prompt, draw.output)]
    return _edit(np.concatenate(past), penalty)


def _occurrences(draw: Draw) -> tuple[Ids, Values] | None:
    frequency, presence = draw.sampling.frequency_penalty, draw.sampling.presence_penalty
    if (frequency == 0.0 and presence == 0.0) or not draw.output:
        return None
    counts = Counter(draw.output)
    return _edit(list(counts), [-(count * frequency + presence) for count in counts.values()])


def _biases(draw: Draw) -> tuple[Ids, Values] | None:
    bias = dict(draw.sampling.logit_bias)
    return _edit(list(bias), list(bias.values())) if bias else None


def _allowed(draw: Draw) -> tuple[Ids, Values] | None:
    allowed = draw.sampling.allowed_token_ids
    return None if allowed is None else _edit(sorted(set(allowed)))


def _may_bar(draw: Draw) -> bool:
    return bool(draw.sampling.bad_words) or len(draw.output) < draw.sampling.min_tokens


def _bad_endings(draw: Draw) -> Iterator[int]:
    """Last tokens of bad words whose other tokens are the last ones before this position."""
    words = draw.sampling.bad_words
    reach = max((len(word) - 1 for word in words), default=0)
    recent = (*draw.prompt[-reach:], *draw.output[-reach:]) if reach else ()
    for word in words:
        *before, last = word
        if not before or recent[-len(before) :] == tuple(before):
            yield last


def _fitted(mask: bytes, width: int) -> bytes:
    """A mask as wide as the model's vocabulary, whatever the tokenizer's is."""
    return mask[:width].ljust(width, b"\0")


def _unpack(packed: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.uint8]:
    return np.unpackbits(packed, axis=-1, count=count, bitorder="little")


def _early_stops(draw: Draw) -> Sequence[int]:
    """Tokens that would end the sequence too soon."""
    return sorted(draw.sampling.stop_ids) if len(draw.output) < draw.sampling.min_tokens else ()


def _key(draw: Draw) -> tuple[int, int]:
    return noise.key(draw.sampling.seed, draw.sampling.index, draw.position)


def _warmth(sampling: Sampling) -> float:
    return max(sampling.temperature, _COLDEST) if sampling.temperature > 0.0 else 0.0


def _min_p_gap(sampling: Sampling) -> float:
    """p >= min_p * p_max, said of logits: how far below the largest a token may lie."""
    return -math.log(min(sampling.min_p, 1.0)) if sampling.min_p > 0.0 else math.inf


def _ranked(ids: Ids, values: Values, count: int) -> TopLogprobs:
    order = np.lexsort((ids, -values))[:count]
    return tuple(zip(ids[order].tolist(), values[order].tolist(), strict=True))


# ── one row, on CPU ──────────────────────────────────────────────────────────────────────────────


def _measure_row(row: Tensor, scratch: Tensor, best: int | None) -> tuple[float, float]:
    """Largest logit and log-sum-exp above it. `scratch` is [V] and aligned, so exp and sum see one shape."""
    top = row.amax() if best is None else row[best]
    return top.item(), math.log(torch.sub(row, top, out=scratch).exp_().sum().item())


def _reach(gap: Tensor, sampling: Sampling) -> float:
    """How far below the best token ([V] gaps >= 0) one may lie and still be kept."""
    vocab = gap.shape[0]
    far = float(np.float32(_min_p_gap(sampling)))
    if not 0 < sampling.top_k < vocab and sampling.top_p >= 1.0:
        return far
    near = np.sort(gap.numpy())
    kept = max(1, int(np.searchsorted(near, np.float32(far), side="right")))
    if 0 < sampling.top_k < kept:
        kept = int(np.searchsorted(near, near[sampling.top_k - 1], side="right"))
    if sampling.top_p < 1.0:
        above = _mass(torch.from_numpy(near)).numpy()[:kept].cumsum()
        limit = max(1, math.ceil(float(above[-1]) * sampling.top_p))
        kept = min(kept, int(np.searchsorted(above, limit)) + 1)
    return float(near[kept - 1])


# ── blocks ───────────────────────────────────────────────────────────────────────────────────────


def _mass(gap: Tensor) -> Tensor:
    """exp(-gap) as int64, times a power of two such that a sum over the last dimension cannot overflow."""
    return (gap.neg().exp_() * 2.0 ** _mass_bits(gap)).to(torch.int64)


def _mass_bits(row: Tensor) -> int:
    return 62 - row.shape[-1].bit_length()


def _gap(logits: Tensor, temperature: Tensor) -> Tensor:
    """How far below its row's best each scaled logit lies: never negative, so no temperature overflows it."""
    return (logits.amax(-1, keepdim=True) - logits) / torch.where(temperature > 0, temperature, 1.0)


def _compared(logits: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
    """Plain logits where temperature [R, 1] is 0, else scaled logits plus noise."""
    noisy = noise.gumbel(keys, logits.shape[-1]) - _gap(logits, temperature)
    return torch.where(temperature > 0, noisy, logits)


def _reaches(gap: Tensor, far: Tensor, most: Tensor, share: Tensor) -> Tensor:
    """`_reach` for rows [K, V], with its limits as columns [K, 1]; a share of 1 or more is no limit.

    Exact but for the exponential, which off CPU is the same function of every element at any shape: so
    only the rows that need it pay for sorting.
    """
    near = gap.sort(-1).values
    kept = (near <= far).sum(-1, keepdim=True).clamp_(min=1)
    kept = (near <= near.gather(1, torch.minimum(kept, most) - 1)).sum(-1, keepdim=True).clamp_(min=1)
    above = _mass(near).cumsum(-1)
    limit = (above.gather(1, kept - 1).to(torch.float64) * share).ceil().to(torch.int64).clamp_(min=1)
    last = torch.where(share < 1.0, (above < limit).sum(-1, keepdim=True), kept - 1)
    return near.gather(1, torch.minimum(last, kept - 1))


__all__ = ["Draw", "Picks", "Sampler"]
