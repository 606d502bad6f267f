"""transformers is the model zoo: its modules, its weights, its configs, our attention.

A model is first *surveyed*: built without weights and run once with an attention function that only
takes notes. What it notes (heads, sizes, windows, every argument attention is given) is what the
engine relies on, so a feature nobody implemented is refused by name instead of being ignored.

Then it is loaded, every attention module gets its *seat* (the kernel and the layer's KV pages), and
every linear is wrapped once. Nothing is patched while running: context comes in as arguments.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from samewise.errors import UnsupportedModel
from samewise.model.attention import Kernel, LayerKV, Rows
from samewise.model.fit import Pieces, in_pieces
from samewise.model.linear import Packed, multiply, pack
from samewise.model.refuse import refuse
from samewise.model.rope import pin_rope
from samewise.model.weights import Source, weight_files

ATTENTION = "samewise"
SURVEY = "samewise_survey"
SURVEY_VERSION = "2"  # raised when a survey notes or refuses anything new
UNDERSTOOD = frozenset({
    "rows", "notes", "sliding_window", "position_ids", "position_embeddings", "use_cache", "dropout",
    "cache_position", "past_key_values", "output_attentions", "is_causal", "logits_to_keep", "return_dict",
})  # fmt: skip
"""Arguments attention may be given that are handled, or cannot matter without a cache or a mask."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where an attention module finds its kernel and its pages."""

    kernel: Kernel
    kv: LayerKV
    facts: AttentionFacts


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What one attention module was seen to do."""

    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True, slots=True)
class Arch:
    """What the engine relies on about a model."""

    model_type: str
    layers: tuple[AttentionFacts, ...]
    vocab: int
    max_positions: int
    checkpoint_dtype: torch.dtype

    def to_json(self) -> dict[str, Any]:
        """As plain data, to be remembered."""
        plain = asdict(self)
        return plain | {"checkpoint_dtype": str(self.checkpoint_dtype).removeprefix("torch.")}

    @classmethod
    def from_json(cls, plain: object) -> Arch | None:
        """The other way; None for what is not an Arch (a damaged memory is no memory)."""
        try:
            fields = dict(plain)  # type: ignore[call-overload]
            layers = tuple(AttentionFacts(**layer) for layer in fields.pop("layers"))
            dtype = getattr(torch, fields.pop("checkpoint_dtype"))
            return cls(layers=layers, checkpoint_dtype=dtype, **fields)
        except (TypeError, ValueError, KeyError, AttributeError):
            return None


def attend(
    module: nn.Module,
    query: torch.Tensor,  # [1, Hq, R, D]
    key: torch.Tensor,  # [1, Hkv, R, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - transformers' signature; masks are switched off
    scaling: float,
    dropout: float = 0.0,  # noqa: ARG001 - likewise
    *,
    rows: Rows,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature → canonical attention over the module's seat."""
    seat: Seat = module.seat  # type: ignore[assignment]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = seat.kernel(q, k, v, seat.kv, rows, scale=scaling, window=sliding_window)
    return out.unsqueeze(0), None


def take_notes(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - transformers' signature
    *,
    notes: list[tuple[nn.Module, AttentionFacts]],
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Stand in for attention during the survey: note what is asked, compute nothing of use."""
    foreign = sorted(k for k, v in kwargs.items() if v is not None and k not in {*UNDERSTOOD, "scaling"})
    if foreign:
        raise UnsupportedModel(f"its attention asks for {', '.join(foreign)}, which is not implemented")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise UnsupportedModel("its attention is not causal")
    if kwargs.get("scaling") is None:
        raise UnsupportedModel("its attention leaves its scale to the kernel")
    _, heads, rows, dim = query.shape
    if key.shape != value.shape or key.shape[-1] != dim or heads % key.shape[1]:
        raise UnsupportedModel(
            f"its attention has query, key and value shapes {tuple(query.shape)}, {tuple(key.shape)}, "
            f"{tuple(value.shape)}; they must share the head size, and heads must come in equal groups"
        )
    notes.append((module, AttentionFacts("", heads, key.shape[1], dim, sliding_window)))
    return query.new_zeros(1, rows, heads, dim), None


AttentionInterface.register(ATTENTION, attend)
AttentionInterface.register(SURVEY, take_notes)


def survey(config: Any, *, trust_remote_code: bool = False) -> Arch:
    """Find out how a model uses attention, without its weights. Refuses what cannot be promised."""
    refuse(config)
    dtype = getattr(config, "dtype", None)  # before a model is made of it, which writes its own there
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=SURVEY, trust_remote_code=trust_remote_code, dtype=torch.float32
        ).eval()
    names = {module: name for name, module in model.named_modules()}
    longest = int(getattr(config, "max_position_embeddings", None) or 2048)
    notes: list[tuple[nn.Module, AttentionFacts]] = []
    with torch.device("meta"), torch.no_grad():
        pin_rope(model, longest)
        ids = torch.zeros(1, 4, dtype=torch.int32)
        try:
            logits = model(input_ids=ids, position_ids=ids, use_cache=False, notes=notes).logits
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{config.model_type}: {error}") from None
        except TypeError as error:
            raise UnsupportedModel(
                f"{config.model_type}: its attention does not go through transformers' "
                f"AttentionInterface ({error})"
            ) from error
    layers = tuple(
        AttentionFacts(names[m], f.num_heads, f.num_kv_heads, f.head_dim, f.window) for m, f in notes
    )
    _refuse_odd_layers(config, layers)
    return Arch(
        config.model_type,
        layers,
        int(logits.shape[-1]),
        longest,
        dtype if isinstance(dtype, torch.dtype) else torch.float32,
    )


def _refuse_odd_layers(config: Any, layers: tuple[AttentionFacts, ...]) -> None:
    kind, expected = config.model_type, config.num_hidden_layers
    if len(layers) != expected or len({f.module for f in layers}) != expected:
        raise UnsupportedModel(
            f"{kind}: {len(layers)} of {expected} layers go through transformers' AttentionInterface; "
            "every layer must, once"
        )
    types = getattr(config, "layer_types", None) or []
    for facts, layer_type in zip(layers, types, strict=False):
        if (layer_type == "sliding_attention") != (facts.window is not None):
            raise UnsupportedModel(
                f"{kind}: {facts.module} is of type {layer_type} "
                f"but its attention is told of window {facts.window}"
            )


class Part(NamedTuple):
    """A linear's place among siblings that share its input: rows [start, stop) of one stacked weight."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    start: int
    stop: int


class Group:
    """One product for linears that are given the same input, each of which takes its own columns of it.

    The first to be asked computes it for all; it is forgotten as soon as everybody has theirs, or somebody
    asks twice or with another input.
    """

    __slots__ = ("_given", "_left", "_product", "bias", "packed", "parts")

    def __init__(self, packed: Packed, bias: torch.Tensor | None, parts: frozenset[int]) -> None:
        self.packed, self.bias, self.parts = packed, bias, parts
        self._given: torch.Tensor | None = None
        self._product: torch.Tensor | None = None
        self._left: set[int] = set()

    def take(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Columns [start, stop) of x W' + b."""
        product = self._product
        if product is None or self._given is not x or start not in self._left:
            product = multiply(x, self.packed, self.bias)
            self._given, self._product, self._left = x, product, set(self.parts)
        self._left.discard(start)
        if not self._left:
            self._given = self._product = None
        return product[..., start:stop]


class FrameLinear(nn.Linear):
    """A linear under the frame rule: it gives the bits of the canonical number of rows.

    The one place where a linear may run in another form than its own: at another number of rows, as a part
    of a wider product where the compiler merges those, or from packed weights that are exactly its own,
    whose bits do not depend on the number of rows. Shares the weights of the linear it replaces.
    """

    pieces: Pieces  # of the product it is a part of, where it is one
    part: Part | None
    packed: Packed | None  # its own, or the one it is a part of
    group: tuple[Group, int, int] | None

    @classmethod
    def around(cls, linear: nn.Linear) -> FrameLinear:
        """The same linear, wrapped; no memory of its own."""
        wrapped = cls.__new__(cls)
        wrapped.__dict__ = linear.__dict__
        wrapped.pieces = {}
        wrapped.part = None
        wrapped.packed = None
        wrapped.group = None
        return wrapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x W' + b: by itself, from packed weights, or cut from the product it is a part of."""
        packed = self.packed
        if packed is not None:
            bias: torch.Tensor | None = self.bias
            start, stop = 0, packed.outputs
            if self.group is not None:
                group, start, stop = self.group
                if not torch.compiler.is_compiling():
                    return group.take(x, start, stop)
                bias = group.bias
            if torch.compiler.is_compiling():
                found: torch.Tensor = torch.ops.samewise.linear(
                    x, list(packed.tensors), bias, packed.form, packed.outputs
                )
                return found[..., start:stop] if self.group is not None else found
            return multiply(x, packed, bias)
        part = self.part
        if part is None or not torch.compiler.is_compiling():
            return self._product(x, self.weight, self.bias)
        return self._product(x, part.weight, part.bias)[..., part.start : part.stop]

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        piece = self.pieces.get(x.shape[1]) if x.dim() == 3 else None
        if piece is None:
            return F.linear(x, weight, bias)
        return in_pieces(lambda part: F.linear(part, weight, bias), x, piece)


ACTIVATIONS = frozenset({"torch.nn.modules.activation", "transformers.activations"})
LANES = 64  # a multiple of the elements any CPU's vector loop takes at once, in any dtype
GRAIN = 32768  # elements below which torch leaves a loop to one thread


class Steady(nn.Module):
    """An activation under the frame rule: on a CPU no element is ever the rest of a vector or a thread's end.

    torch's vector loops and the scalar loops that finish them differ in the last bit, so what an element
    becomes would depend on how many rows there are. Here every row is whole vectors, on one thread.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activation of x [..., R, D]."""
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return self._of(x)
        width = x.shape[-1]
        if width % LANES:
            return self.forward(F.pad(x, (0, -width % LANES)))[..., :width]
        x = x.contiguous()  # another library may take what lies in one piece
        if x.numel() <= GRAIN:
            return self._of(x)
        return torch.cat([self._of(part) for part in torch.split(x, max(1, GRAIN // width), dim=-2)], dim=-2)

    def _of(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y


SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def pack_linears(model: nn.Module, how: Callable[[torch.Tensor], Packed | None] = pack) -> Counter[str]:
    """Let every linear of these modules run from packed weights, siblings from one; the forms taken."""
    forms: Counter[str] = Counter()
    done: set[FrameLinear] = set()
    for module in model.modules():
        for names in SIBLINGS:
            linears = [getattr(module, name, None) for name in names]
            alike = [linear for linear in linears if type(linear) is FrameLinear]
            if len(alike) == len(names) and _alike(alike) and (form := _group(alike, how)):
                forms[form] += 1
                done.update(alike)
    for module in model.modules():
        if type(module) is FrameLinear and module not in done:
            module.packed, module.group = how(module.weight), None
            forms[module.packed.form if module.packed is not None else "torch"] += 1
    return forms


def _alike(linears: list[FrameLinear]) -> bool:
    return len({(linear.in_features, linear.bias is None, linear.weight.dtype) for linear in linears}) == 1


def _group(linears: list[FrameLinear], how: Callable[[torch.Tensor], Packed | None]) -> str:
    """Pack siblings as one; the form it took, or nothing where that would only copy the weights."""
    packed = how(torch.cat([linear.weight.data for linear in linears]))
    if packed is None or packed.form == str(linears[0].weight.dtype).removeprefix("torch."):
        return ""
    biases = [linear.bias.data for linear in linears if linear.bias is not None]
    ends = list(accumulate(linear.out_features for linear in linears))
    starts = [0, *ends[:-1]]
    group = Group(packed, torch.cat(biases) if biases else None, frozenset(starts))
    for linear, start, stop in zip(linears, starts, ends, strict=True):
        linear.packed, linear.group = packed, (group, start, stop)
    return packed.form


def stack_siblings(model: nn.Module) -> None:
    """Let linears that are given the same input share one stacked weight, of which theirs become views.

    Only names that in transformers always share their input, and only linears that look alike. Once:
    another engine over the same modules finds them stacked.
    """
    for module in model.modules():
        for names in SIBLINGS:
            linears = [getattr(module, name, None) for name in names]
            if all(isinstance(linear, FrameLinear) for linear in linears):
                _stack([linear for linear in linears if isinstance(linear, FrameLinear)])


def _stack(linears: list[FrameLinear]) -> None:
    biases = [linear.bias for linear in linears]
    if linears[0].part is not None or not _alike(linears):
        return
    weight = torch.cat([linear.weight.data for linear in linears])
    bias = None if biases[0] is None else torch.cat([bias.data for bias in biases])
    start = 0
    for linear in linears:
        stop = start + linear.out_features
        linear.weight.data = weight[start:stop]
        if bias is not None:
            linear.bias.data = bias[start:stop]
        linear.part = Part(weight, bias, start, stop)
        start = stop


def load(source: Source, config: Any, *, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """The model with its weights on the CPU, linears wrapped, attention ours; seats not yet taken."""
    with _quiet_if_small(source):
        model = AutoModelForCausalLM.from_pretrained(
            source.path,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        )
    return wrap(model)


@contextmanager
def _quiet_if_small(source: Source) -> Iterator[None]:
    """Loading shows progress where it takes long enough to wonder about."""
    size = sum(path.stat().st_size for path in weight_files(source.path))
    if size > 2**31 or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def wrap(model: PreTrainedModel) -> PreTrainedModel:
    """Wrap every linear and every activation once and freeze the model."""
    for module in list(model.modules()):
        if isinstance(module, Steady):
            continue
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, FrameLinear.around(child))
            elif type(child).__module__ in ACTIVATIONS:
                setattr(module, name, Steady(child))
    return model.eval().requires_grad_(requires_grad=False)


def read_config(source: Source, *, trust_remote_code: bool) -> Any:
    """The model's own configuration."""
    return AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code, local_files_only=True)


def seat(model: nn.Module, arch: Arch, kernel: Kernel, store: list[LayerKV]) -> None:
    """Give every attention module its kernel and pages."""
    for facts, kv in zip(arch.layers, store, strict=True):
        model.get_submodule(facts.module).seat = Seat(kernel, kv, facts)  # type: ignore[assignment]


def weights_version(model: nn.Module) -> int:
    """How often the weights under these modules were changed since they were loaded."""
    return int(getattr(model, "_samewise_weights_version", 0))


def touch_weights(model: nn.Module) -> int:
    """The weights were changed; every engine over them will notice."""
    version = weights_version(model) + 1
    model._samewise_weights_version = version  # type: ignore[assignment]
    return version


def twin(model: nn.Module) -> nn.Module:
    """The same model in modules of its own: weights shared, seats, buffers and parts not."""
    made: dict[nn.Module, nn.Module] = {}

    def copied(module: nn.Module) -> nn.Module:
        if module not in made:
            made[module] = fresh = copy.copy(module)
            fresh._parameters = dict(module._parameters)
            fresh._buffers = dict(module._buffers)
            fresh._modules = {name: child and copied(child) for name, child in module._modules.items()}
        return made[module]

    return copied(model)


def layer_list(model: nn.Module, arch: Arch) -> tuple[str, nn.ModuleList]:
    """The decoder layers and the name they stand under: the list that holds the attention modules."""
    first, last = arch.layers[0].module, arch.layers[-1].module
    for name, module in model.named_modules():
        inside = isinstance(module, nn.ModuleList) and len(module) == len(arch.layers)
        if inside and first.startswith(f"{name}.0.") and last.startswith(f"{name}.{len(arch.layers) - 1}."):
            assert isinstance(module, nn.ModuleList)
            return name, module
    raise UnsupportedModel(f"{arch.model_type}: its decoder layers do not stand in one list")


def with_layers(model: nn.Module, name: str, layers: list[nn.Module]) -> nn.Module:
    """The same model over other layers: a shell that shares every weight and changes nothing."""
    return with_module(model, name, nn.ModuleList(layers))


def with_module(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The same model with another module under this name: a shell, likewise."""
    shell = _shallow(model)
    parent, parts = shell, name.split(".")
    for part in parts[:-1]:
        parent._modules[part] = _shallow(parent._modules[part])  # type: ignore[arg-type]
        parent = parent._modules[part]  # type: ignore[assignment]
    parent._modules[parts[-1]] = module
    return shell


def _shallow(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    twin._modules = dict(module._modules)  # a copy shares this dict with its original otherwise
    return twin


__all__ = [
    "ATTENTION",
    "SURVEY_VERSION",
    "Arch",
    "AttentionFacts",
    "FrameLinear",
    "Group",
    "Part",
    "Seat",
    "Steady",
    "attend",
    "layer_list",
    "load",
    "pack_linears",
    "read_config",
    "seat",
    "stack_siblings",
    "survey",
    "take_notes",
    "touch_weights",
    "twin",
    "weights_version",
    "with_layers",
    "with_module",
    "wrap",
]
