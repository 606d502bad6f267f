"""Replace a model's weights in place, and know whether the weights in memory are the certified ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from samewise.errors import BadParameter, GuaranteeLost
from samewise.model.folder import read_tensors
from samewise.model.linear import pack_linears

WeightUpdate = Mapping[str, torch.Tensor] | str | os.PathLike[str]
"""New weights: tensors by their name in the state dict, or a folder of safetensors."""


class CertifiedWeights:
    """The version of the shared weights that an engine's contract was made for. Owned by the Engine.

    The version counts replacements. It is kept on the model itself, which several engines may share.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._version: int | None = self._current

    def check(self) -> None:
        """Raise GuaranteeLost unless the weights in memory are the certified ones."""
        if self._version != self._current:
            raise GuaranteeLost(
                "the weights are not the certified ones: an update failed, or another engine over the same "
                "model changed them; call update_weights() again or build a new engine"
            )

    def revoke(self) -> None:
        """From now until `certify`, the engine refuses to serve: no answer may name the old contract."""
        self._version = None
        self._model.samewise_weights_version = self._current + 1  # type: ignore[assignment]

    def certify(self) -> None:
        """The weights in memory were certified."""
        self._version = self._current

    @property
    def _current(self) -> int:
        return int(getattr(self._model, "samewise_weights_version", 0))


def read_update(update: WeightUpdate, model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(the model's tensor, its new value) by name. Raises BadParameter unless every tensor fits."""
    tensors = update if isinstance(update, Mapping) else read_tensors(Path(update))
    own: dict[str, torch.Tensor] = dict(model.named_buffers())
    own |= dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in tensors.items():
        if name not in own:
            raise BadParameter(
                f"update_weights: the model has no tensor {name!r}; names are those of its state dict",
                param="update",
            )
        if tensor.shape != own[name].shape:
            raise BadParameter(
                f"update_weights: {name} has shape {tuple(tensor.shape)}, "
                f"the model's has {tuple(own[name].shape)}",
                param="update",
            )
    return {name: (own[name], tensor) for name, tensor in tensors.items()}


@torch.no_grad()
def apply_update(
    update: Mapping[str, tuple[torch.Tensor, torch.Tensor]], model: nn.Module, *, native: bool
) -> None:
    """Copy the new values in, and pack native linears again."""
    for own, new in update.values():
        own.copy_(new)
    if native:
        pack_linears(model)


__all__ = ["CertifiedWeights", "WeightUpdate", "apply_update", "read_update"]
