"""Law 3 over frame sizes: the number of rows of a frame changes no bit.

An operator whose bits depend on the number of rows (linears, norms, norms over heads) is run at a number
that gives the canonical bits. Where no number does, the frame size is not used.
"""

import functools
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from law_helpers import CASES, Case, random_prompt, run_cases, run_references
from law_proposers import jitter
from torch import nn

from samewise.config import EngineConfig
from samewise.engine import Engine
from samewise.errors import BadParameter
from samewise.model.linear import FrameLinear
from samewise.model.row_pieces import in_pieces
from samewise.testing import tiny, tiny_engine

ROWS = 16
MANY = [Case(f"one-of-many-{i}", random_prompt(3 + i % 40, i), max_tokens=6) for i in range(70)]
SIZES = ((), (1,), (2, 4), (1, 2, 4, 8), (4,), (1, 16))  # of 4 and above: multiples of the canonical rows


def test_any_list_of_frame_sizes_gives_the_same_bits(setup, references):
    """Sizes below the canonical one, and up to sixteen times above it."""
    for sizes in SIZES[3:4] if setup.compile else SIZES:  # every size is compiled
        if setup.device == "cpu" and setup.linear == "auto":
            rows = tuple(n for n in sizes if n <= setup.frame_rows)  # the limit of native linears
        else:
            rows = tuple(n if n < 4 else n * setup.frame_rows for n in sizes)
        engine = replace(setup, sizes=(*rows, setup.frame_rows)).engine(num_pages=400)
        assert run_cases(engine, CASES) == references, sizes


@pytest.mark.parametrize("make", [None, jitter], ids=["none", "jitter"])
def test_more_sequences_than_canonical_rows_share_a_frame(setup, make):
    """Drafts fill the rows that are left."""
    wide = replace(setup, sizes=None)
    engine = wide.engine(make, num_pages=900, max_num_seqs=80)
    chosen = (0, 33, 69)
    outputs = run_cases(engine, MANY)
    assert [outputs[i] for i in chosen] == run_references(wide, [MANY[i] for i in chosen])
    widest = engine.runner.widest
    if widest > setup.frame_rows and widest >= len(MANY) and make is None:
        counters = engine.scheduler.counters
        assert counters.rows / counters.frames > setup.frame_rows


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"frame_sizes": [16, 40]}, "40 is above frame_rows=16 and no multiple of it; give 32 or 48"),
        ({"frame_sizes": [128], "linear": "native"}, "at most frame_rows=16 rows"),
    ],
)
def test_impossible_frame_sizes_are_refused(settings, message):
    with pytest.raises(BadParameter, match=message):
        tiny_engine(frame_rows=16, **({"linear": "torch"} | settings))


COUNT_GRAPHS = """
from torch._dynamo.utils import counters
from samewise.testing import tiny_engine

settings = {"linear": "torch", "compile": True, "proposer": "none", "frame_sizes": [4, 16]}
tiny_engine(frame_rows=16, overrides={"num_hidden_layers": 5}, **settings)
print(counters["stats"]["unique_graphs"])
"""


@pytest.mark.slow
def test_one_compiled_layer_per_frame_size_serves_all_layers():
    """Counted in a second process: the first one also compiles graphs to try norms and caches the result."""
    for _ in range(2):
        result = subprocess.run(
            [sys.executable, "-c", COUNT_GRAPHS], capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == ["2"]


# -- operators whose bits depend on the number of rows ------------------------------------------------


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
    """An activation that depends on the number of rows: the engine cannot run it at another number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x) * (1.0 if x.shape[1] in (ROWS, 64) else 1.0001)


class LinearBySize(FrameLinear):
    """A linear that sums in two parts unless it is given sixteen rows."""

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


def replace_norm(layer: nn.Module) -> None:
    layer.input_layernorm = NormBySize(layer.input_layernorm)


def replace_head_norm(layer: nn.Module) -> None:
    layer.self_attn.q_norm = NormBySize(layer.self_attn.q_norm)


def replace_activation(layer: nn.Module) -> None:
    layer.mlp.act_fn = ActivationBySize()


def replace_linear(layer: nn.Module) -> None:
    layer.mlp.down_proj = LinearBySize.from_linear(layer.mlp.down_proj)


def keep_layer(layer: nn.Module) -> None:
    pass


def engine_with(change: Any, **settings: Any) -> Engine:
    """An engine over a tiny model of which each layer was changed."""
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


def check_every_size(change: Any) -> Engine:
    """Compare an engine of one frame size with one of several, and return the latter."""
    expected = run_cases(engine_with(change, frame_sizes=[ROWS]), MANY[:20])
    elastic = engine_with(change)
    assert run_cases(elastic, MANY[:20]) == expected
    assert run_cases(engine_with(change), MANY)[:20] == expected
    return elastic


@pytest.mark.parametrize("change", [replace_norm, replace_head_norm], ids=["norm", "norm over heads"])
def test_norms_that_depend_on_the_number_of_rows_run_at_the_canonical_number(change, one_thread):
    engine = check_every_size(change)
    assert engine.runner.sizes == (1, 2, 8, 16, 64)
    assert [size for size, use in engine.parts.sizes.items() if use.norm_widths] == [1, 2, 8, 64]


def test_a_frame_size_at_which_an_operator_differs_is_not_used(one_thread):
    engine = check_every_size(replace_activation)
    assert engine.runner.sizes == (16, 64)
    assert not engine.parts.sizes[1].used


def test_linears_that_depend_on_the_number_of_rows_run_at_the_canonical_number(one_thread):
    engine = check_every_size(replace_linear)
    assert engine.runner.sizes == (1, 2, 8, 16, 64)
    (down,) = [op for op in engine.parts.operators if op.name.endswith("down_proj")]
    assert down.pieces == {1: 16, 2: 16, 8: 16, 16: 16, 64: 16}


def test_prompt_logprobs_are_the_same_in_a_wide_frame(one_thread):
    """A scored prompt needs logits for all its rows, other prompts for none but the last."""
    cases = [Case("scored", random_prompt(120, 5), max_tokens=3, prompt_logprobs=1), *MANY[:30]]
    elastic, narrow = engine_with(keep_layer), engine_with(keep_layer, frame_sizes=[ROWS])
    assert run_cases(elastic, cases) == run_cases(narrow, cases)
