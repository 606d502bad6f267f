"""The fused kernels of a CUDA layer: the modules' results, and a row's bits at every number of rows.

On a CUDA device, or in Triton's interpreter.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import CUDA, triton_kernel

from samewise.execute.numerics import as_bits
from samewise.execute.pack import pack_frame
from samewise.execute.runner import Runner
from samewise.kernels.linear import triton as linears
from samewise.model import fused_cuda_layer
from samewise.model.fp8 import Fp8Linear
from samewise.model.linear import order_linears, stack_siblings
from samewise.model.surgery import copy_modules, replace_child
from samewise.testing import tiny
from samewise.types import LayerSet, Sampling, Span

DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu) if CUDA else "cpu"]
FAMILIES = {"llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {"sliding_window": 12}}
SIZES = (1, 4, 24)


def make_runner(
    family: str, device: str, dtype: torch.dtype, *, fuse: bool = True, **overrides: Any
) -> Runner:
    """A runner over a tiny model with ordered linears."""
    loaded = tiny(family, dtype=dtype, num_hidden_layers=2, **FAMILIES[family], **overrides)
    loaded.model.to(device)
    stack_siblings(loaded.model)
    order_linears(loaded.model)
    return Runner(
        loaded.model, loaded.arch, triton_kernel(np.random.default_rng(0)), num_pages=24, sizes=SIZES,
        max_rows=24, max_model_len=64, dtype=dtype, device=torch.device(device), compile=False, fuse=fuse,
    )  # fmt: skip


def span(tokens: list[int], start: int, first_page: int) -> Span:
    """Tokens of a sequence that begins at a page."""
    pages = array("i", range(first_page, first_page + 4))
    return Span(0, start, tuple(tokens), len(tokens), pages, Sampling(), tokens, len(tokens))


def read_in_pieces(runner: Runner, text: list[int], pieces: list[int], first_page: int) -> torch.Tensor:
    """Logits of a text that is read piece by piece."""
    logits, start = [], 0
    for num in pieces:
        spans = [span(text[start : start + num], start, first_page)]
        logits.append(runner.frame(pack_frame(spans, runner.frame_staging(num)))[:num].cpu().clone())
        start += num
    return torch.cat(logits)


@pytest.fixture(autouse=True)
def _fused_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter too, layers are fused as on CUDA; there few large tiles take the least time."""
    monkeypatch.setattr(Runner, "_fusing", property(lambda _: fused_cuda_layer))
    if not CUDA:
        tile = linears.LinearTile(rows=32, columns=512, described=False)
        monkeypatch.setattr(linears, "pick_tile", lambda *_, **__: tile)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_give_what_their_modules_give(family: str, device: str) -> None:
    text = [7 * i % 250 for i in range(20)]
    fused, modules = (make_runner(family, device, torch.float32, fuse=fuse) for fuse in (True, False))
    assert fused.fused
    assert not modules.fused
    ours, theirs = (read_in_pieces(runner, text, [20], 1) for runner in (fused, modules))
    assert torch.allclose(ours, theirs, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("qwen3", torch.bfloat16),
        ("qwen2", torch.float16),
        ("qwen2", torch.float32),
    ],
)
def test_bits_do_not_depend_on_the_number_of_rows(family: str, dtype: torch.dtype, device: str) -> None:
    runner, rng = make_runner(family, device, dtype), random.Random(1)
    assert runner.fused
    text = [rng.randrange(250) for _ in range(22)]
    expected = read_in_pieces(runner, text, [22], 1)
    for pieces in ([1] * 4 + [18], [3, 4, 1, 14], [20, 2]):
        got = read_in_pieces(runner, text, pieces, rng.randrange(1, 20))
        assert torch.equal(as_bits(got), as_bits(expected)), pieces


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("some", [("q_proj", "up_proj"), ("q_proj", "k_proj", "v_proj", "down_proj")])
def test_drafts_with_float8_linears_run_fused_too(some: tuple[str, ...], device: str) -> None:
    """Which linears are float8 is decided by their shapes' times: any of them may be."""
    runner = make_runner("qwen2", device, torch.bfloat16)
    model = copy_modules(runner.model)
    for path, module in list(model.named_modules()):
        if path.rpartition(".")[2] in some:
            parent, _, name = path.rpartition(".")
            replace_child(model.get_submodule(parent), name, Fp8Linear(module))
    path = runner.fast_path(model)
    text = [7 * i % 250 for i in range(16)]
    exact = read_in_pieces(runner, text, [16], 1)
    inputs = runner.staging(16)
    rounded = runner.fast_eager(pack_frame([span(text, 0, 1)], inputs), path)[:16].cpu()
    assert not torch.equal(rounded, exact)
    assert float((rounded - exact).abs().max()) < 0.5 * float(exact.abs().max())


@pytest.mark.parametrize("device", DEVICES)
def test_views_without_sublayers_are_fused_too(device: str) -> None:
    runners = [make_runner("qwen2", device, torch.float32, fuse=fuse) for fuse in (True, False)]
    skipped = LayerSet(frozenset({0}), frozenset({1}))
    logits = []
    for runner in runners:
        path = runner.skip_path(runner.views(), skipped)
        inputs = pack_frame([span([5, 6, 7], 0, 1)], runner.fast_staging(4))
        logits.append(runner.fast(inputs, path)[:3].cpu().clone())
    assert torch.allclose(*logits, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: layer.mlp.register_forward_hook(lambda *_: None), "mlp was changed or has hooks"),
        (lambda layer: setattr(layer.self_attn.o_proj, "ordered", False), "a linear is not ordered"),
        (lambda layer: setattr(layer.mlp.up_proj, "stacked", None), "are not stacked"),
        (lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 50.0), None),
    ],
)
def test_a_layer_that_is_another_runs_as_its_modules(change: Any, reason: str | None, device: str) -> None:
    runner = make_runner("llama", device, torch.float32)
    layer = runner.model.model.layers[1]
    assert fused_cuda_layer.unfusable_reason(layer) is None
    change(layer)
    found = fused_cuda_layer.unfusable_reason(layer)
    assert found == reason if reason is None else reason in str(found)


def without_window(self: Any, x: Any, angles: Any, rows: Any, keep: Any) -> Any:
    """Attention over all keys."""
    self._facts = replace(self._facts, window=None)
    return ATTEND(self, x, angles, rows, keep)


def without_weight(self: Any, x: Any, angles: Any, rows: Any, keep: Any) -> Any:
    """Attention that adds a little too much."""
    return x + 1.05 * (ATTEND(self, x, angles, rows, keep) - x)


ATTEND = fused_cuda_layer.FusedForward._attend


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "wrong"), [("llama", without_weight), ("mistral", without_window)])
def test_wrong_attention_is_seen_beside_a_large_mlp(
    family: str, wrong: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is wrong only behind a window, and in 16 bits."""
    runner = make_runner(family, device, torch.float16)
    layer = runner.model.model.layers[0]
    layer.mlp.down_proj.weight.data.mul_(100.0)
    assert fused_cuda_layer.unfusable_reason(layer) is None
    monkeypatch.setattr(fused_cuda_layer.FusedForward, "_attend", wrong)
    assert fused_cuda_layer.unfusable_reason(layer) == "its modules give another result"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float32),
        ("qwen2", torch.float16),
        ("qwen3", torch.float16),
        ("mistral", torch.float16),
        ("llama", torch.bfloat16),
    ],
)
def test_right_layers_are_well_within_the_tolerance(
    family: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a tenth of it; in the interpreter, which truncates bfloat16, within half of it."""
    share = 0.5 if dtype == torch.bfloat16 and not CUDA else 0.1
    tolerance = {key: value * share for key, value in fused_cuda_layer.CHECK_TOLERANCE.items()}
    monkeypatch.setattr(fused_cuda_layer, "CHECK_TOLERANCE", tolerance)
    assert make_runner(family, device, dtype).fused


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_with_another_result_runs_as_its_modules(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner("llama", device, torch.float32)
    norm = type(runner.model.model.layers[0].input_layernorm)
    monkeypatch.setattr(norm, "forward", lambda self, x: 2.0 * x * self.weight)
    assert (
        fused_cuda_layer.unfusable_reason(runner.model.model.layers[0]) == "its modules give another result"
    )
