"""Law 3 over every size of a frame: how many rows a frame has changes no bit.

Operators that feel the number of rows are run at a number that gives the canonical bits, whoever they are:
linears, norms, norms over heads. Where nothing helps, the size is not used.
"""

import functools
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from lawbook import CASES, Case, jitter, play, text
from torch import nn

from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.errors import BadParameter
from samewise.model.linear import FrameLinear
from samewise.model.row_pieces import in_pieces
from samewise.testing import tiny, tiny_engine
from samewise.types import Sampling

ROWS = 16
MANY = [Case(f"one-of-many-{i}", text(3 + i % 40, i), most=6) for i in range(70)]


LISTS = ((), (1,), (2, 4), (1, 2, 4, 8), (4,), (1, 16))


def test_any_list_of_sizes_gives_the_bits_of_one(setup, truth):
    """Sizes below the canonical one, and up to sixteen times above it."""
    for sizes in LISTS[3:4] if setup.compile else LISTS:  # every size is compiled
        if setup.device == "cpu" and setup.linear == "auto":
            rows = tuple(n for n in sizes if n <= setup.frame_rows)  # native linears go up to it only
        else:
            rows = tuple(n if n < 4 else n * setup.frame_rows for n in sizes)
        engine = replace(setup, sizes=(*rows, setup.frame_rows)).engine(num_pages=400)
        assert play(engine, CASES) == truth, sizes


def test_more_live_sequences_than_the_canonical_rows_share_a_frame(setup):
    """Also while drafts ride along, which fill what is left of it."""
    wide = replace(setup, sizes=None)
    widest = wide.engine().runner.widest
    for make in (None, jitter):
        engine = wide.engine(make, num_pages=900, max_num_seqs=80)
        heard = play(engine, MANY)
        alone = wide.engine(num_pages=900)
        assert [heard[i] for i in (0, 33, 69)] == [play(alone, [MANY[i]])[0] for i in (0, 33, 69)]
        if widest > setup.frame_rows and widest >= len(MANY) and make is None:
            counts = engine.scheduler.counters
            assert counts.rows / counts.frames > setup.frame_rows


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"frame_sizes": [16, 40]}, "40 is above frame_rows=16 and no multiple of it; give 32 or 48"),
        ({"frame_sizes": [128], "linear": "native"}, "at most frame_rows=16 rows"),
    ],
)
def test_sizes_that_cannot_be_are_refused(settings, told):
    with pytest.raises(BadParameter, match=told):
        tiny_engine(frame_rows=16, **({"linear": "torch"} | settings))


COUNT = """
from torch._dynamo.utils import counters
from samewise.testing import tiny_engine

settings = {"linear": "torch", "compile": True, "proposer": "none", "frame_sizes": [4, 16]}
tiny_engine(frame_rows=16, overrides={"num_hidden_layers": 5}, **settings)
print(counters["stats"]["unique_graphs"])
"""


def test_one_compiled_layer_serves_all_layers():
    """Per size of a frame one graph, however many layers there are: seen in a process of its own.

    The second of two: what the first found out about norms, which takes graphs too, it remembers.
    """
    for _ in range(2):
        ran = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["2"]


# ---- operators that feel the number of rows


class NormBySize(nn.Module):
    """A norm that sums in another order for another number of rows."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self._eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = x.pow(2)
        if x.shape[1] != ROWS:
            squares = squares.flip(-1).cumsum(-1)[..., -1:] / x.shape[-1]
        else:
            squares = squares.mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(squares + self._eps))


class ActivationBySize(nn.Module):
    """An activation that feels it too: no row-wise operator the engine knows how to run otherwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x) * (1.0 if x.shape[1] in (ROWS, 64) else 1.0001)


def engine_over(change: Any, **settings: Any) -> Engine:
    loaded = tiny("qwen3")
    for layer in loaded.model.model.layers:
        change(layer)
    config = EngineConfig(
        model="tiny",
        kv_memory=2**22,
        device="cpu",
        linear="torch",
        proposer="none",
        max_num_seqs=80,
        **settings,
    )
    return Engine(loaded, config)


def by_norm(layer: nn.Module) -> None:
    layer.input_layernorm = NormBySize(layer.input_layernorm)


def by_head_norm(layer: nn.Module) -> None:
    layer.self_attn.q_norm = NormBySize(layer.self_attn.q_norm)


def by_activation(layer: nn.Module) -> None:
    layer.mlp.act_fn = ActivationBySize()


def same_at_every_size(change: Any) -> Engine:
    narrow = engine_over(change, frame_sizes=[ROWS])
    truth = play(narrow, MANY[:20])
    elastic = engine_over(change)
    assert play(elastic, MANY[:20]) == truth
    assert play(engine_over(change), MANY)[:20] == truth
    return elastic


@pytest.mark.parametrize("change", [by_norm, by_head_norm], ids=["norm", "norm over heads"])
def test_norms_that_feel_the_number_of_rows(change, one_thread):
    engine = same_at_every_size(change)
    assert engine.runner.sizes == (1, 2, 8, 16, 64)
    assert [size for size, how in engine.sizes.items() if how.startswith("norms of ")] == [1, 2, 8, 64]


def test_an_operator_without_a_remedy_costs_the_size_and_not_the_bits(one_thread):
    engine = same_at_every_size(by_activation)
    assert engine.runner.sizes == (16, 64)
    assert engine.sizes[1].startswith("not used")


def test_linears_that_feel_the_number_of_rows(one_thread):
    def change(layer: nn.Module) -> None:
        layer.mlp.down_proj = _Sized.around(layer.mlp.down_proj)

    engine = same_at_every_size(change)
    assert engine.runner.sizes == (1, 2, 8, 16, 64)
    (down,) = [op for op in engine.operators if op.name.endswith("down_proj")]
    assert down.pieces == {1: 16, 2: 16, 8: 16, 16: 16, 64: 16}


class _Sized(FrameLinear):
    """A linear of a library that sums in two parts unless it is given sixteen rows."""

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return in_pieces(
            functools.partial(self._sum, weight=weight), x, self.pieces.get(x.shape[1], x.shape[1])
        )

    @staticmethod
    def _sum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == ROWS:
            return x @ weight.T
        half = weight.shape[1] // 2
        return x[..., :half] @ weight[:, :half].T + x[..., half:] @ weight[:, half:].T


def test_scores_of_prompts_come_from_any_row_of_a_wide_frame(one_thread):
    """A prompt whose every token is scored wants the whole head; one that is only read wants none of it."""
    scored = [Case("scored", text(120, 5), Sampling(), 3, prompt_logprobs=1), *MANY[:30]]
    elastic, narrow = (engine_over(lambda _: None, **kw) for kw in ({}, {"frame_sizes": [ROWS]}))
    assert play(elastic, scored) == play(narrow, scored)
