"""Replace a model's weights in place, and know whether the weights in memory are the certified ones."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from samewise.errors import BadParameter, GuaranteeLost
from samewise.model.folder import read_tensors
from samewise.model.linear import FrameLinear, pack_linears
from samewise.model.load import count_writes, num_updates, tracked_tensors

NamedTensors = Iterable[tuple[str, torch.Tensor]]

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""The model's tensors, each with its new value."""


@dataclass(frozen=True, slots=True)
class CheckedUpdate:
    """New weights that fit the model. `pairs` of tensors that come one by one can be iterated over once."""

    pairs: Pairs


WeightUpdate = Mapping[str, torch.Tensor] | NamedTensors | str | os.PathLike[str] | CheckedUpdate
"""New weights: tensors by their name in the state dict, as (name, tensor) one after the other, or a folder of
safetensors that holds all of them. A tensor that is the model's own memory is not copied."""


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

    @property
    def certified(self) -> bool:
        """Whether a contract was made for the last update: none failed, and no other engine made one."""
        return self._version == num_updates(self._model)

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
        if not self.certified:
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


def read_update(update: WeightUpdate, model: nn.Module) -> CheckedUpdate:
    """Check new weights; changes nothing. Raises BadParameter for the first tensor that does not fit.

    Of tensors that come one after the other the first is read here, the others as they are iterated over.
    """
    if isinstance(update, CheckedUpdate):
        return update
    own: dict[str, torch.Tensor] = dict(model.named_buffers())
    own |= dict(model.named_parameters(remove_duplicate=False))
    if isinstance(update, str | os.PathLike):
        tensors: NamedTensors = read_tensors(Path(update)).items()
        _refuse_partial(Path(update), [name for name, _ in tensors], model)
    else:
        # An empty mapping certifies what is in memory.
        tensors = (update or own).items() if isinstance(update, Mapping) else update
    fitted = _fitted(tensors, own)
    if isinstance(update, str | os.PathLike | Mapping | Sequence):
        return CheckedUpdate(list(fitted))
    first = next(fitted, None)
    return CheckedUpdate([] if first is None else chain([first], fitted))


def _refuse_partial(folder: Path, names: list[str], model: nn.Module) -> None:
    """Raise BadParameter unless a folder holds every parameter, tied ones under one of their names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = {parameters[name] for name in names if name in parameters}
    missing = [name for name, parameter in model.named_parameters() if parameter not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadParameter(
            f"update_weights: {folder} lacks {missing[0]}{more}; write all weights, or give single "
            "tensors by their names",
            param="update",
        )


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
        if not _is_finite(tensor, own[name].dtype):
            raise BadParameter(
                f"update_weights: {name} holds values that are no finite numbers in {own[name].dtype}; has "
                "training diverged?",
                param="update",
            )
        yield own[name], tensor


def _is_finite(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether every value is a finite number, also in another format. Reads the tensor once."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    values = tensor.detach() if tensor.dtype.itemsize > 1 else tensor.detach().float()
    extremes = torch.stack(torch.aminmax(values))  # NaN if there is one
    return bool(extremes.to(dtype).isfinite().all())


def _is_same_memory(own: torch.Tensor, new: torch.Tensor) -> bool:
    return (own.data_ptr(), own.dtype, own.device, own.stride()) == (
        new.data_ptr(), new.dtype, new.device, new.stride(),
    )  # fmt: skip


@torch.no_grad()
def apply_update(update: CheckedUpdate, model: nn.Module, *, native: bool) -> None:
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
    for own, new in update.pairs:
        if not _is_same_memory(own, new):
            (own.data if own in copies else own).copy_(new)
    if native:
        pack_linears(model)


__all__ = [
    "PIECE",
    "CertifiedWeights",
    "CheckedUpdate",
    "NamedTensors",
    "Pairs",
    "WeightUpdate",
    "apply_update",
    "read_update",
]
