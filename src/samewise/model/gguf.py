"""Convert one GGUF file to a safetensors folder that transformers loads like any other.

Weights are unpacked to float32 exactly as the file defines them. A file that cannot be converted without loss
is refused. Names, caches and downloads are handled elsewhere.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.errors import MachineError, UnsupportedModel

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig

DTYPES = {"F32": "float32", "F16": "float16"}  # other types are bfloat16, or quantized from it
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}
SPLITS_DIGITS = {"gpt-2": False, "smollm": True}  # the byte-level vocabularies built here, by `ggml.pre`
CONTROL, USER_DEFINED = 3, 4  # token types in `ggml.token_type`


def convert(gguf: Path, reader: "GGUFReader", folder: Path) -> None:
    """Write config, weights, tokenizer and generation config of `gguf`, as read by `read`, into `folder`.

    The same file gives the same bytes with every supported version of transformers. Raises UnsupportedModel
    for a file that transformers cannot express, OSError or SafetensorError for a full disk.
    """
    config = _config(gguf, reader)
    tensors = _tensors(gguf, reader, config)
    _write_config(folder, config, reader)
    _write_generation_config(folder, config, reader)
    _write_tokenizer(folder, gguf, config, reader)
    _write_weights(folder, tensors)


def unpacked_bytes(reader: "GGUFReader") -> int:
    """Bytes of disk `convert` needs: 4 per weight, and 32 MiB for the tokenizer and the rest."""
    return sum(int(tensor.n_elements) for tensor in reader.tensors) * 4 + (32 << 20)


def read(gguf: Path) -> "GGUFReader":
    """The file's metadata and its tensors, still packed. Takes seconds for a large vocabulary."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise MachineError(
            f"reading {gguf} needs the package 'gguf', which is not installed; run: pip install gguf"
        ) from None
    try:
        return GGUFReader(gguf)
    except (ValueError, IndexError) as error:
        raise UnsupportedModel(
            f"{gguf} is not a readable GGUF file ({error}); download it again", param="model"
        ) from error


def _field(reader: "GGUFReader", name: str) -> Any:
    """The value of a metadata field; None if the file does not have it."""
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _config(gguf: Path, reader: "GGUFReader") -> "PretrainedConfig":
    from transformers import AutoConfig

    if _field(reader, "split.count") not in {None, 0, 1}:
        raise UnsupportedModel(
            f"{gguf} is one part of several; join them first: llama-gguf-split --merge", param="model"
        )
    try:
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    except (ValueError, KeyError, NotImplementedError) as error:
        arch = _field(reader, "general.architecture")
        raise UnsupportedModel(
            f"{gguf}: transformers cannot read GGUF files of architecture {arch!r} ({error}); "
            "use the model's safetensors checkpoint",
            param="model",
        ) from error
    scaling = _field(reader, f"{_field(reader, 'general.architecture')}.rope.scaling.type")
    if (
        scaling not in {None, "none"}
        and (config.rope_parameters or {}).get("rope_type", "default") == "default"
    ):
        raise UnsupportedModel(
            f"{gguf}: its RoPE scaling {scaling!r} would be lost; use the model's safetensors checkpoint",
            param="model",
        )
    return config


def _tensors(gguf: Path, reader: "GGUFReader", config: "PretrainedConfig") -> "dict[str, torch.Tensor]":
    """Every tensor of the file under its transformers name, in float32: exactly the model's."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Not from_pretrained: newer versions of transformers may keep the blocks packed and fetch kernels.
    tensors: dict[str, torch.Tensor] = load_gguf_checkpoint(
        str(gguf), return_tensors=True, model_to_load=model
    )["tensors"]
    if len(tensors) != len(reader.tensors):
        raise UnsupportedModel(
            f"{gguf}: {len(reader.tensors) - len(tensors)} of its tensors (scaled RoPE tables, say) have no "
            f"place in transformers' {config.model_type}; use the model's safetensors checkpoint",
            param="model",
        )
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        for name in set(model.all_tied_weights_keys) - set(tensors):
            del expected[name]
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    names = expected.keys() | shapes.keys()
    if wrong := sorted(name for name in names if expected.get(name) != shapes.get(name)):
        raise UnsupportedModel(
            f"{gguf}: tensors missing or of another shape than {config.model_type}'s: {wrong[:5]}",
            param="model",
        )
    return {name: tensor.to(torch.float32).contiguous() for name, tensor in sorted(tensors.items())}


def _dtype(reader: "GGUFReader") -> str:
    """The checkpoint's dtype, which `dtype="auto"` uses on CUDA: that of most weights in the file."""
    sizes: Counter[str] = Counter()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    return DTYPES.get(sizes.most_common(1)[0][0], "bfloat16")


def _write_config(folder: Path, config: "PretrainedConfig", reader: "GGUFReader") -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields = {k: v for k, v in config.to_diff_dict().items() if k != "transformers_version" and k[0] != "_"}
    fields["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    fields["dtype"] = _dtype(reader)
    _write_json(folder / "config.json", fields)


def _write_generation_config(folder: Path, config: "PretrainedConfig", reader: "GGUFReader") -> None:
    ends = [_field(reader, f"tokenizer.ggml.{key}") for key in END_KEYS]
    own = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ids = list(dict.fromkeys(int(end) for end in (*ends, *own) if end is not None))
    fields = {
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }
    _write_json(folder / "generation_config.json", {k: v for k, v in fields.items() if v is not None})


def _write_tokenizer(folder: Path, gguf: Path, config: "PretrainedConfig", reader: "GGUFReader") -> None:
    from transformers import AutoTokenizer

    if (
        _field(reader, "tokenizer.ggml.model") == "gpt2"
        and _field(reader, "tokenizer.ggml.pre") in SPLITS_DIGITS
    ):
        backend = _byte_level(reader, split_digits=SPLITS_DIGITS[_field(reader, "tokenizer.ggml.pre")])
    else:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        backend = tokenizer.backend_tokenizer
    backend.save(str(folder / "tokenizer.json"))
    fields = {
        "clean_up_tokenization_spaces": False,
        "model_max_length": getattr(config, "max_position_embeddings", None),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    # By id, from the file: transformers 5.17 returns the start token as the end token.
    tokens = _field(reader, "tokenizer.ggml.tokens")
    for name, key in SPECIAL_KEYS.items():
        if (index := _field(reader, f"tokenizer.ggml.{key}")) is not None:
            fields[name] = tokens[index]
    _write_json(folder / "tokenizer_config.json", fields)
    if template := _field(reader, "tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _byte_level(reader: "GGUFReader", *, split_digits: bool) -> "Tokenizer":
    """A byte-level BPE from the file's tokens and merges.

    transformers chooses a tokenizer by architecture instead, differently in every version, and without the
    digit splitting of some models, which decides how spaces before a number are cut.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words]) if split_digits else words
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, _field(reader, "tokenizer.ggml.token_type"), strict=True)
    added = [(token, kind) for token, kind in kinds if kind in {CONTROL, USER_DEFINED}]
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in added if k == CONTROL]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in added if k == USER_DEFINED])
    if _field(reader, "tokenizer.ggml.add_bos_token"):
        bos = _field(reader, "tokenizer.ggml.bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _write_weights(folder: Path, tensors: "dict[str, torch.Tensor]") -> None:
    from safetensors.torch import save_file

    print(f"samewise: writing {len(tensors)} tensors", file=sys.stderr)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


__all__ = ["convert", "read", "unpacked_bytes"]
