"""Compiling modules with Inductor: whole graph, static shapes, nothing chosen by timing."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from samewise.execute.numerics import inductor_options
from samewise.model.arch import Arch, layer_list
from samewise.model.row_pieces import is_norm
from samewise.model.surgery import with_layers, with_module


def allow_compiling() -> AbstractContextManager[Any]:
    """A context in which modules may be compiled, any number of times.

    dynamo counts compilations of every engine of the process and falls back to eager at a limit. Here the
    limit is high, and reaching it is an error.
    """
    import torch._dynamo.config as dynamo  # takes seconds to import

    limits: dict[str, Any] = {"recompile_limit": 2**16, "accumulated_recompile_limit": 2**16}
    context: AbstractContextManager[Any] = dynamo.patch(fail_on_recompile_limit_hit=True, **limits)
    return context


def forbid_compiling() -> AbstractContextManager[Any]:
    """A context in which compiling again is an error: shapes are fixed, and each was compiled before.

    Guards only have to tell layers apart (windows, positions), so most of their checks are skipped.
    """
    stance: AbstractContextManager[Any] = torch.compiler.set_stance(
        "fail_on_recompile", skip_guard_eval_unsafe=True
    )
    return stance


class LayerCompiler:
    """Compiles the modules of one model, each once. Owned by a Runner."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compiled: dict[nn.Module, Any] = {}

    def compile(self, module: nn.Module) -> Any:
        """The compiled module; the code itself is generated when it is first called."""
        if module not in self._compiled:
            from samewise.execute.passes.dedupe import DEDUPE  # imports the compiler
            from samewise.execute.passes.row_sums import ROW_SUMS

            # The same pass objects each time: layers compiled with equal options share their code.
            options = inductor_options() | {"post_grad_custom_pre_pass": DEDUPE}
            if self._device.type == "cuda":
                options["post_grad_custom_post_pass"] = ROW_SUMS
            self._compiled[module] = torch.compile(module, fullgraph=True, dynamic=False, options=options)
        return self._compiled[module]

    def compiled_if_known(self, module: nn.Module) -> Any:
        """The compiled module if it was compiled before, else the module."""
        return self._compiled.get(module, module)

    def compile_model(self, model: nn.Module, arch: Arch) -> nn.Module:
        """A copy of the model whose layers are compiled, and on CUDA also the norms outside of them."""
        name, layers = layer_list(model, arch)
        compiled = with_layers(model, name, [self.compile(layer) for layer in layers])
        if self._device.type == "cuda":
            norms = [(path, module) for path, module in model.named_modules() if is_norm(module)]
            for path, norm in norms:
                if not path.startswith(f"{name}."):
                    compiled = with_module(compiled, path, self.compile(norm))
        return compiled


__all__ = ["LayerCompiler", "allow_compiling", "forbid_compiling"]
