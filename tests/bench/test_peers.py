"""Peers: which are started, and llama.cpp's server in its own process (here with a module that plays it)."""

import itertools
import os
import signal
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_files import write_gguf
from rich.console import Console

from samewise.bench import engines, first_token, peers, run
from samewise.bench.measurement import Measurement
from samewise.bench.options import BenchOptions
from samewise.config import EngineConfig
from samewise.errors import BadParameter
from samewise.model.source import Source
from samewise.testing import byte_tokenizer, tiny_model

SERVER = """
import threading

class Part:
    pass

class CommonParams:
    def __init__(self):
        self.model, self.cpuparams, self.cpuparams_batch = Part(), Part(), Part()

def get_system_info():
    return "a  |  b"

class Server:
    def __init__(self, params):
        if "broken" in params.model.path:
            raise ValueError("no such file: " + params.model.path)
        print("chatter on stdout")
        self.params, self.together = params, threading.Barrier(params.n_parallel)

    def handle_completions(self, body):
        self.together.wait(20)  # all requests of a run are there at once
        tokens = body["max_tokens"] if body["ignore_eos"] else len(body["prompt"])
        wrong = body["cache_prompt"] or self.params.cache_prompt or body["temperature"]
        threads, n_ctx = self.params.cpuparams.n_threads, self.params.n_ctx
        timings = {"prompt_ms": 1000 * threads, "predicted_per_token_ms": n_ctx}
        return {"usage": {"completion_tokens": -1 if wrong else tokens}, "timings": timings}
"""


class FailingPeer(peers.Peer):
    """A peer that answers `num` times."""

    name, about = "failing", "dies"

    def __init__(self, num):
        self.num_left, self.num_closed = num, 0

    def run(self, prompts, max_tokens):
        self.num_left -= 1
        if self.num_left < 0:
            raise RuntimeError("its process ended: killed")
        return Measurement(len(prompts) * max_tokens, 1.0)

    def close(self):
        self.num_closed += 1


@pytest.fixture
def common(tmp_path):
    return peers.Common(
        path=tmp_path, gguf=tmp_path / "own.gguf", dtype=torch.float32, device=torch.device("cpu"),
        eos_ids=frozenset({2}), num_live=3, max_len=300, ignore_eos=False,
    )  # fmt: skip


@pytest.fixture
def fake_xllamacpp(tmp_path, monkeypatch):
    (tmp_path / "xllamacpp.py").write_text(SERVER)
    (tmp_path / "xllamacpp-1.5.dist-info").mkdir()
    (tmp_path / "xllamacpp-1.5.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: xllamacpp\nVersion: 1.5\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(peers, "installed", lambda package: package == "xllamacpp")


@pytest.mark.usefixtures("fake_xllamacpp")
def test_llama_cpp_answers_all_prompts_at_once_in_another_process(common):
    server = peers.start("llama.cpp", common)
    try:
        assert (server.name, server.about) == ("llama.cpp", "xllamacpp 1.5: a | b")
        measured = server.run([[5], [6, 7], [8]], 9)
        assert (measured.tokens, measured.first_token) == (4, torch.get_num_threads())
        assert measured.per_token == pytest.approx(1e-3 * 3 * 512)  # 300 tokens a slot, in whole steps of 256
        assert "xllamacpp" not in sys.modules
        environment = Path(f"/proc/{server._process.pid}/environ")
        assert not environment.exists() or b"OMP_WAIT_POLICY" not in environment.read_bytes()
    finally:
        server.close()
    assert server._process.returncode == 0


@pytest.mark.usefixtures("fake_xllamacpp")
def test_llama_cpp_is_told_to_ignore_ends(common):
    server = peers.start("llama.cpp", replace(common, ignore_eos=True))
    try:
        assert server.run([[5], [6, 7], [8]], 9).tokens == 27
    finally:
        server.close()


@pytest.mark.usefixtures("fake_xllamacpp")
def test_a_server_that_does_not_start_says_why(common, tmp_path):
    with pytest.raises(RuntimeError, match=r"no such file: .*broken.gguf"):
        peers.start("llama.cpp", replace(common, gguf=tmp_path / "broken.gguf"))


@pytest.mark.usefixtures("fake_xllamacpp")
def test_a_server_that_hangs_is_killed(common, monkeypatch):
    server = peers.start("llama.cpp", common)
    monkeypatch.setattr(peers, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(peers, "CLOSE_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match=r"no answer in 0.2 s"):
        server.run([[5]], 9)  # it waits for three requests
    server.close()
    server.close()
    assert server._process.returncode == -signal.SIGKILL


@pytest.mark.usefixtures("fake_xllamacpp")
def test_a_server_that_does_not_end_when_it_is_closed_is_killed(common, monkeypatch):
    server = peers.start("llama.cpp", common)
    monkeypatch.setattr(peers, "CLOSE_SECONDS", 0.2)
    os.kill(server._process.pid, signal.SIGSTOP)
    server.close()
    assert server._process.returncode == -signal.SIGKILL


class CountingLlama:
    """llama-cpp-python's `Llama`, as far as it is used: endless tokens 5, 6, 7, …, each counted."""

    def __init__(self, *_, **__):
        self.num_decoded = 0

    def reset(self):
        """Before every prompt."""

    def generate(self, prompt, temp):
        assert temp == 0.0
        for token in itertools.count(prompt[0]):
            self.num_decoded += 1
            yield token


@pytest.mark.parametrize(("ignore_eos", "num"), [(True, 8), (False, 6)])
def test_llama_cpp_python_computes_no_token_beyond_those_that_are_counted(
    common, monkeypatch, ignore_eos, num
):
    module = types.ModuleType("llama_cpp")
    module.Llama = CountingLlama
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setattr(peers, "version", lambda _: "1.5")
    peer = peers.LlamaOneByOne(replace(common, eos_ids=frozenset({6}), ignore_eos=ignore_eos))
    assert peer.run([[5], [7]], 4).tokens == num  # the second prompt meets no end
    assert peer._llama.num_decoded == num


def test_the_llama_cpp_that_is_installed_reads_the_gguf_file(common, tmp_path):
    pytest.importorskip("xllamacpp")
    file = write_gguf(tmp_path / "tiny.gguf", tied=False)
    server = peers.start("llama.cpp", replace(common, gguf=file, num_live=2, ignore_eos=True))
    try:
        assert server.run([[5, 6], [7]], 4).tokens == 8
    finally:
        server.close()


def test_a_peer_that_is_named_must_be_there(common, monkeypatch):
    monkeypatch.setattr(peers, "installed", lambda _: False)
    with pytest.raises(BadParameter, match="xllamacpp nor llama_cpp is not installed; pip install xllamacpp"):
        peers.start("llama.cpp", common)
    assert not peers.can_run("llama.cpp", common)


@pytest.mark.parametrize("changed", [{"gguf": None}, {"device": torch.device("meta")}])
def test_llama_cpp_needs_a_gguf_file_and_a_cpu(common, monkeypatch, changed):
    monkeypatch.setattr(peers, "installed", lambda _: True)
    assert peers.can_run("llama.cpp", common)
    assert not peers.can_run("llama.cpp", replace(common, **changed))
    with pytest.raises(BadParameter, match="a model that is built in or a GGUF file"):
        peers.start("llama.cpp", replace(common, **changed))


def test_xllamacpp_goes_before_llama_cpp_python(common, monkeypatch):
    monkeypatch.setattr(
        peers, "CLASSES", {"xllamacpp": lambda _: "server", "llama_cpp": lambda _: "one by one"}
    )
    for there, expected in (({"xllamacpp", "llama_cpp"}, "server"), ({"llama_cpp"}, "one by one")):
        monkeypatch.setattr(peers, "installed", there.__contains__)
        assert peers.start("llama.cpp", common) == expected


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model(num_hidden_layers=1).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    config = EngineConfig(model=str(path), device="cpu", kv_memory="8MiB", max_model_len=512, proposer="none")
    return engines.engine_backends(run.load(config), config, ["none"])[0], config


def _started(engine, monkeypatch, **options):
    """What `samewise bench` starts on a model whose GGUF file is known, and what it prints."""

    def fails(_):
        raise RuntimeError("no room")

    made, config = engine
    source = Source("own", "gguf", Path(config.model), gguf=Path(config.model) / "own.gguf")
    monkeypatch.setattr(run, "resolve", lambda *_, **__: source)
    monkeypatch.setattr(peers, "installed", lambda package: package != "xllamacpp")
    monkeypatch.setattr(
        peers, "CLASSES", {"transformers": lambda one: one, "llama_cpp": lambda one: one, "vllm": fails}
    )
    console = Console(width=200)
    with console.capture() as captured:
        made = list(run._peers(console, made.engine, config, BenchOptions(**options), {"t": [[1, 2, 3]]}))
    return source, made, captured.get()


def test_peers_that_are_installed_are_started_and_those_that_fail_are_named(engine, monkeypatch):
    source, made, text = _started(engine, monkeypatch, batches=(1, 4), max_tokens=10, first_token=20)
    assert [(one.gguf, one.num_live, one.max_len) for one in made] == [(source.gguf, 4, 30)] * 2
    assert "vllm is installed but does not start (no room); left out" in text


@pytest.mark.parametrize(("names", "num"), [((), 0), (("llama.cpp",), 1)])
def test_peers_are_those_that_were_named(engine, monkeypatch, names, num):
    assert len(_started(engine, monkeypatch, peers=names)[1]) == num


@pytest.mark.parametrize("num", [0, 1, 2, 5])
def test_a_peer_that_fails_is_left_out_and_the_others_are_measured(engine, num):
    """In the warm-up, at its first run, in the middle of a group, in a later repeat."""
    ours = [engine[0]]
    failing, other, told = FailingPeer(num), FailingPeer(1000), []
    other.name = "other"
    live, console = peers.LivePeers([failing, other], told.append), Console(width=200)
    options = BenchOptions(batches=(1,), repeats=3, max_tokens=2, first_token=8)
    prompts = {"one": [[1, 2, 3], [4, 5]], "two": [[6, 7]]}
    with console.capture():
        cells = run._measure(console, ours, live, prompts, options)
        tokens = run._first_tokens(console, ours, live, prompts, options)
    assert {(cell.backend, cell.task, len(cell.runs)) for cell in cells} == {
        (name, task, 3) for name in ("none", "other") for task in prompts
    }
    assert [one.backend if hasattr(one, "backend") else one["contender"] for one in tokens] == [
        "other",
        "none",
    ]
    assert told == [
        "failing failed (its process ended: killed); it is left out, with what was measured of it"
    ]
    assert (failing.num_closed, other.num_closed, list(live)) == (1, 0, [other])


def test_a_peer_that_fails_at_a_long_prompt_has_no_first_token():
    failing, other, told = FailingPeer(1), FailingPeer(9), []
    other.name = "other"
    live = peers.LivePeers([failing, other], told.append)
    found = first_token.measure([failing, other], [[1, 2]], 4, 2, live.run)
    assert [one.backend for one in found] == ["other"]
    assert len(told) == 1
