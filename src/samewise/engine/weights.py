"""Replace a model's weights in place, and know whether the weights in memory are the certified ones."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from samewise.errors import BadParameter, GuaranteeLost
from samewise.model.folder import read_tensors
from samewise.model.linear import FrameLinear, pack_linears
from samewise.model.load import count_writes, num_updates, tracked_tensors

NamedTensors = Iterable[tuple[str, torch.Tensor]]

WeightUpdate = Mapping[str, torch.Tensor] | NamedTensors | str | os.PathLike[str]
"""New weights: tensors by their name in the state dict, as (name, tensor) one after the other, or a folder of
safetensors. A tensor that is the model's own memory is not copied."""

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""The model's tensors, each with its new value."""


PIECE = 32
"""Tensors looked at in one step, about 3 µs; all 272 of a model with 30 layers would take 20 µs."""


class CertifiedWeights:
    """The state of the shared weights that an engine's contract was made for. Owned by the Engine.

    Replacements are counted on the model itself, which several engines may share. Writes of others are seen
    by torch's own counters, except those through `.data` or raw memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        tensors = tracked_tensors(model)
        self._pieces = [tensors[start : start + PIECE] for start in range(0, len(tensors), PIECE)]
        self._version: int | None  # number of updates of the certified weights; None: they are revoked
        self._next = 0  # the piece that the next step looks at
        self.certify()

    def check(self) -> None:
        """Raise GuaranteeLost unless the weights in memory are the certified ones. For every new request."""
        for index in range(len(self._pieces)):
            self._check_piece(index)
        self._check_version()

    def check_some(self) -> None:
        """The same for some of the tensors, for every step: a change is seen after a few steps."""
        self._check_version()
        if self._pieces:
            self._next = (self._next + 1) % len(self._pieces)
            self._check_piece(self._next)

    def revoke(self) -> None:
        """From now until `certify`, the engine refuses to serve: no answer may name the old contract."""
        self._version = None
        self._model.samewise_weights_version = num_updates(self._model) + 1  # type: ignore[assignment]

    def certify(self) -> None:
        """The weights in memory were certified."""
        self._version = num_updates(self._model)
        self._writes = [count_writes(piece) for piece in self._pieces]

    def _check_version(self) -> None:
        if self._version != num_updates(self._model):
            raise GuaranteeLost(
                "the weights are not the certified ones: an update failed, or another engine over the same "
                "model changed them; call update_weights() again or build a new engine"
            )

    def _check_piece(self, index: int) -> None:
        if count_writes(self._pieces[index]) != self._writes[index]:
            self._check_version()  # an update is named as one
            raise GuaranteeLost(
                "the weights are not the certified ones: a tensor of the model was written in place; "
                "give new weights to update_weights(), or call update_weights({}) to certify those in memory"
            )


def read_update(update: WeightUpdate, model: nn.Module) -> Pairs:
    """(the model's tensor, its new value) of every tensor. Raises BadParameter unless every one fits.

    Tensors that come one after the other are read, and checked, as the result is iterated over.
    """
    own: dict[str, torch.Tensor] = dict(model.named_buffers())
    own |= dict(model.named_parameters(remove_duplicate=False))
    if not isinstance(update, str | os.PathLike | Mapping):
        return _fitted(update, own)
    tensors = update if isinstance(update, Mapping) else read_tensors(Path(update))
    return list(_fitted(tensors.items(), own))


def _fitted(
    tensors: NamedTensors, own: Mapping[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for name, tensor in tensors:
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
        yield own[name], tensor


def _is_same_memory(own: torch.Tensor, new: torch.Tensor) -> bool:
    return (own.data_ptr(), own.dtype, own.device, own.stride()) == (
        new.data_ptr(), new.dtype, new.device, new.stride(),
    )  # fmt: skip


@torch.no_grad()
def apply_update(update: Pairs, model: nn.Module, *, native: bool) -> None:
    """Copy the new values in, and pack native linears again.

    Weights that were stacked are copies, but share the count of writes with a trainer's, which are not
    written.
    """
    copies = {
        parameter
        for module in model.modules()
        if isinstance(module, FrameLinear) and module.stacked is not None
        for parameter in module.parameters()
    }
    for own, new in update:
        if not _is_same_memory(own, new):
            (own.data if own in copies else own).copy_(new)
    if native:
        pack_linears(model)


__all__ = [
    "PIECE",
    "CertifiedWeights",
    "NamedTensors",
    "Pairs",
    "WeightUpdate",
    "apply_update",
    "read_update",
]
