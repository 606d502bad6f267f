"""Convert one GGUF file to a safetensors folder that transformers loads like any other.

Weights are unpacked to float32 exactly as the file defines them. A file that cannot be converted without loss
is refused. Names, caches and downloads are handled elsewhere.
"""

import json
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.errors import MachineError, UnsupportedModel
from samewise.model.gguf_file import GGUFFile, read_header, write_outline
from samewise.model.gguf_weights import Layout, write_weights

if TYPE_CHECKING:
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
LONG_FIELDS = {f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores", "token_type")}
WRITTEN_BY = "5.0.0"
"""The version of transformers named in config.json, the same whichever is installed. Without one transformers
takes every tokenizer of more than 100,000 tokens for an old Mistral one and warns of its pattern."""
CONTROL, USER_DEFINED = 3, 4  # token types in `ggml.token_type`


@dataclass(frozen=True)
class Words:
    """How a byte-level vocabulary cuts text before merging, and whether it composes characters first."""

    pattern: str | None = None  # None: GPT-2's own
    split_digits: bool = False
    compose: bool = False  # Unicode NFC


WORDS = {
    "gpt-2": Words(),
    "smollm": Words(split_digits=True),
    "qwen2": Words(
        pattern=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
        compose=True,
    ),
}
"""The byte-level vocabularies built here, by `tokenizer.ggml.pre`."""


def convert(gguf: Path, file: GGUFFile, folder: Path) -> None:
    """Write config, weights, tokenizer and generation config of `gguf`, as read by `read`, into `folder`.

    The same file gives the same bytes with every supported version of transformers. Raises UnsupportedModel
    for a file that transformers cannot express, OSError for a full disk.
    """
    outline = folder / "outline.gguf"
    _write_outline(outline, file)
    config = _config(outline, file)
    layout = Layout(file, config, _own_fields(outline))
    outline.unlink()
    _write_config(folder, config, file)
    _write_generation_config(folder, config, file)
    _write_tokenizer(folder, gguf, config, file)
    write_weights(folder / "model.safetensors", file, layout)


def unpacked_bytes(file: GGUFFile) -> int:
    """Bytes of disk `convert` needs: 4 per weight, and 32 MiB for the tokenizer and the rest."""
    return sum(tensor.num_elements for tensor in file.tensors) * 4 + (32 << 20)


def read(gguf: Path) -> GGUFFile:
    """The file's metadata and its tensors, still packed."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        raise MachineError(
            f"reading {gguf} needs the package 'gguf', which is not installed; run: pip install gguf"
        ) from None

    def num_bytes(kind: int, shape: tuple[int, ...]) -> int:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        return int(prod(shape) // block * size)

    try:
        return read_header(gguf, num_bytes)
    except ValueError as error:
        raise UnsupportedModel(
            f"{gguf} is not a readable GGUF file ({error}); download it again", param="model"
        ) from error


def _write_outline(outline: Path, file: GGUFFile) -> None:
    """The file without its vocabulary and weights: transformers reads it for the config in no time."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

    arch = file.fields.get("general.architecture")
    # Of an architecture without the key `vocab_size` transformers counts the tokens instead.
    counted = "vocab_size" not in GGUF_TO_TRANSFORMERS_MAPPING["config"].get(arch, {})
    write_outline(
        outline,
        file,
        skip=LONG_FIELDS - ({"tokenizer.ggml.tokens"} if counted else set()),
        numbers={} if counted else {f"{arch}.vocab_size": len(file.fields.get("tokenizer.ggml.tokens", ()))},
    )


def _own_fields(outline: Path) -> dict[str, Any]:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    fields: dict[str, Any] = load_gguf_checkpoint(str(outline))["config"]
    return fields


def _config(outline: Path, file: GGUFFile) -> "PretrainedConfig":
    from transformers import AutoConfig

    if file.fields.get("split.count") not in {None, 0, 1}:
        raise UnsupportedModel(
            f"{file.path} is one part of several; join them first: llama-gguf-split --merge", param="model"
        )
    arch = file.fields.get("general.architecture")
    try:
        config = AutoConfig.from_pretrained(outline.parent, gguf_file=outline.name, local_files_only=True)
    except (ValueError, KeyError, IndexError, NotImplementedError) as error:
        raise UnsupportedModel(
            f"{file.path}: transformers cannot read GGUF files of architecture {arch!r} ({error}); "
            "use the model's safetensors checkpoint",
            param="model",
        ) from error
    scaling = file.fields.get(f"{arch}.rope.scaling.type")
    if (
        scaling not in {None, "none"}
        and (config.rope_parameters or {}).get("rope_type", "default") == "default"
    ):
        raise UnsupportedModel(
            f"{file.path}: its RoPE scaling {scaling!r} would be lost; "
            "use the model's safetensors checkpoint",
            param="model",
        )
    return config


def _dtype(file: GGUFFile) -> str:
    """The checkpoint's dtype, which `dtype="auto"` uses on CUDA: that of most weights in the file."""
    from gguf import GGMLQuantizationType

    sizes: Counter[int] = Counter()
    for tensor in file.tensors:
        sizes[tensor.type] += tensor.num_elements
    return DTYPES.get(GGMLQuantizationType(sizes.most_common(1)[0][0]).name, "bfloat16")


def _write_config(folder: Path, config: "PretrainedConfig", file: GGUFFile) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields = {k: v for k, v in config.to_diff_dict().items() if k != "transformers_version" and k[0] != "_"}
    fields["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    fields["dtype"] = _dtype(file)
    fields["transformers_version"] = WRITTEN_BY
    _write_json(folder / "config.json", fields)


def _write_generation_config(folder: Path, config: "PretrainedConfig", file: GGUFFile) -> None:
    ends = [file.fields.get(f"tokenizer.ggml.{key}") for key in END_KEYS]
    own = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ids = list(dict.fromkeys(int(end) for end in (*ends, *own) if end is not None))
    fields = {
        "bos_token_id": file.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
        "pad_token_id": file.fields.get("tokenizer.ggml.padding_token_id"),
    }
    _write_json(folder / "generation_config.json", {k: v for k, v in fields.items() if v is not None})


def _write_tokenizer(folder: Path, gguf: Path, config: "PretrainedConfig", file: GGUFFile) -> None:
    from transformers import AutoTokenizer

    words = WORDS.get(file.fields.get("tokenizer.ggml.pre", ""))
    if file.fields.get("tokenizer.ggml.model") == "gpt2" and words is not None:
        backend = _byte_level(file, words)
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
    tokens = file.fields["tokenizer.ggml.tokens"]
    for name, key in SPECIAL_KEYS.items():
        if (index := file.fields.get(f"tokenizer.ggml.{key}")) is not None:
            fields[name] = tokens[index]
    _write_json(folder / "tokenizer_config.json", fields)
    if template := file.fields.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _byte_level(file: GGUFFile, words: Words) -> "Tokenizer":
    """A byte-level BPE from the file's tokens and merges.

    transformers chooses a tokenizer by architecture instead, differently in every version, and without the
    digit splitting of some models, which decides how spaces before a number are cut, or the composition of
    characters of others.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )

    tokens: list[str] = file.fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in file.fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    if words.compose:
        tokenizer.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if words.split_digits else []
    if words.pattern is not None:
        cuts.append(pre_tokenizers.Split(Regex(words.pattern), "isolated"))
    by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words.pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, by_byte]) if cuts else by_byte
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, file.fields["tokenizer.ggml.token_type"], strict=True)
    added = [(token, kind) for token, kind in kinds if kind in {CONTROL, USER_DEFINED}]
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in added if k == CONTROL]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in added if k == USER_DEFINED])
    if file.fields.get("tokenizer.ggml.add_bos_token"):
        bos = file.fields["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


__all__ = ["Words", "convert", "read", "unpacked_bytes"]
