"""Model files for tests: tiny GGUF files, and a look at the files left in a cache folder."""

import numpy as np
import pytest

VOCAB, HIDDEN, HEADS, KV_HEADS, LAYERS, INNER = 64, 64, 4, 2, 2, 96


def write_gguf(path, *, tied=True, skip=(), extra=(), pre="smollm"):
    """A tiny random llama with a byte-level vocabulary, its MLPs in 4 bits.

    `skip` leaves tensors out; `extra` adds others by name and shape.
    """
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    tokens = [
        "<|unk|>",
        "<|start|>",
        "<|end|>",
        *"abcdefghijklmnopqrstuvwxyz0123456789ĠĊ.,!?",
        "ab",
        "abc",
        "<|eot|>",
    ]
    tokens += [f"<extra{i}>" for i in range(VOCAB - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (VOCAB - 3)])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(tokens.index("<|eot|>"))
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": (kv, HIDDEN),
            f"blk.{i}.attn_v.weight": (kv, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate.weight": (INNER, HIDDEN),
            f"blk.{i}.ffn_up.weight": (INNER, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, INNER),
        }
    shapes |= dict(extra)
    rng = np.random.default_rng(0)
    q4 = gguf.GGMLQuantizationType.Q4_1
    for name, shape in shapes.items():
        if name in skip:
            continue
        values = rng.standard_normal(shape, dtype=np.float32)
        if "ffn" in name and len(shape) == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, q4), raw_dtype=q4)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=False)
    writer.close()
    return path


def leftovers(folder):
    """Names of the files beside `folder`, except locks."""
    return sorted(path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock"))
