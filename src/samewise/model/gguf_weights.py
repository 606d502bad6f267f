"""Unpack the tensors of a GGUF file to float32 and write them as one safetensors file.

transformers says under which name and in which layout a tensor of the file belongs into a model. Tensors are
unpacked and written by several threads, so that memory holds a few of them at a time.
"""

import json
import os
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from samewise.errors import UnsupportedModel
from samewise.model.gguf_file import GGUFFile, PackedTensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class _Limits:
    """Set by hand. How found: unpacking 33 million weights of six quantized types on two cores."""

    chunk: int = 1 << 18  # weights unpacked at once: 1 MiB of results; smaller ones wait for the interpreter
    threads: int = 16  # beyond these the writes to one file wait for each other


LIMITS = _Limits()


class Layout:
    """Names and shapes of a file's tensors in transformers' model, worked out without unpacking any."""

    def __init__(self, file: GGUFFile, config: "PretrainedConfig", fields: Mapping[str, Any]) -> None:
        """`fields` are the file's own settings under transformers' names, which some layouts depend on."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        kind = TENSOR_PROCESSORS.get(file.fields["general.architecture"], TensorProcessor)
        self._processor: TensorProcessor = kind(config=dict(fields))
        self._names: dict[str, str] = get_gguf_hf_weights_map(model, self._processor)
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shape of each tensor by its name in the model."""
        for packed in file.tensors:
            zeros = np.broadcast_to(np.float32(0), packed.shape)
            self.shapes |= {name: weights.shape for name, weights in self.place(packed, zeros).items()}
        _check(file, config, model, self.shapes)

    def place(self, packed: PackedTensor, weights: np.ndarray) -> dict[str, np.ndarray]:
        """The model's tensors made from one of the file: one, or none where the model has no place for it."""
        made: dict[str, Any] = {}
        with np.errstate(divide="ignore"):
            result = self._processor.process(
                weights=weights,
                name=packed.name,
                tensor_key_mapping=self._names,
                parsed_parameters={"tensors": made},
            )
        if result.name in self._names:
            made[self._names[result.name]] = result.weights
        return {name: np.asarray(tensor) for name, tensor in made.items()}


def _check(
    file: GGUFFile, config: "PretrainedConfig", model: Any, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Refuse a file whose tensors are not exactly the model's."""
    if len(shapes) != len(file.tensors):
        raise UnsupportedModel(
            f"{file.path}: {len(file.tensors) - len(shapes)} of its tensors (scaled RoPE tables, say) have "
            f"no place in transformers' {config.model_type}; use the model's safetensors checkpoint",
            param="model",
        )
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        for name in set(model.all_tied_weights_keys) - set(shapes):
            del expected[name]
    names = expected.keys() | shapes.keys()
    if wrong := sorted(name for name in names if expected.get(name) != shapes.get(name)):
        raise UnsupportedModel(
            f"{file.path}: tensors missing or of another shape than {config.model_type}'s: {wrong[:5]}",
            param="model",
        )


def unpack(packed: PackedTensor) -> np.ndarray:
    """The weights of a tensor in float32, as the file's format defines them."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(packed.type)
    block, num_bytes = GGML_QUANT_SIZES[kind]
    step = LIMITS.chunk // block * num_bytes
    out = np.empty(packed.num_elements, np.float32)
    for start in range(0, len(packed.data), step):
        # One row per call: `gguf` would cut it into groups of 16 rows and spend its time between them.
        part = dequantize(packed.data[None, start : start + step], kind).reshape(-1)
        first = start // num_bytes * block
        out[first : first + len(part)] = part
    return out.reshape(packed.shape)


def write_weights(path: Path, file: GGUFFile, layout: Layout) -> None:
    """Write every tensor of `file` to the safetensors file `path`. Shows progress on a terminal."""
    from tqdm import tqdm

    header, offsets = _safetensors_header(layout.shapes)
    total = sum(prod(shape) for shape in layout.shapes.values()) * FLOAT32_BYTES
    threads = min(LIMITS.threads, os.cpu_count() or 1)
    with (
        path.open("wb", buffering=0) as out,
        ThreadPoolExecutor(threads) as pool,
        tqdm(total=total, desc="unpacking", unit="B", unit_scale=True, disable=None) as bar,
    ):
        _write_at(out.fileno(), header, 0)

        def write(packed: PackedTensor) -> int:
            for name, weights in layout.place(packed, unpack(packed)).items():
                data = np.ascontiguousarray(weights, np.float32).reshape(-1).view(np.uint8).data
                _write_at(out.fileno(), data, offsets[name])
            return packed.num_elements * FLOAT32_BYTES

        largest_first = sorted(file.tensors, key=lambda t: -t.num_elements)
        jobs = [pool.submit(write, packed) for packed in largest_first]
        try:
            for job in as_completed(jobs):
                bar.update(job.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _safetensors_header(shapes: dict[str, tuple[int, ...]]) -> tuple[bytes, dict[str, int]]:
    """The head of a safetensors file of float32 tensors, and where in the file each one begins."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in sorted(shapes.items()):
        start, end = end, end + prod(shape) * FLOAT32_BYTES
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    starts = {n: base + e["data_offsets"][0] for n, e in entries.items() if n != "__metadata__"}
    return struct.pack("<Q", len(text)) + text, starts


def _write_at(file: int, data: "bytes | memoryview", offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


__all__ = ["Layout", "unpack", "write_weights"]
