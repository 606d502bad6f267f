"""Other systems on the same weights: transformers' generate, vLLM and llama.cpp, where they are installed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from samewise.bench.measurement import Measurement, Prompts
from samewise.errors import BadParameter

PACKAGES = {
    "transformers": ("transformers",),
    "llama.cpp": ("xllamacpp", "llama_cpp"),  # the first one that is installed
    "vllm": ("vllm",),
}
"""By peer, the packages that bring it."""
REMEDIES = {
    "transformers": "pip install transformers",
    "llama.cpp": "pip install xllamacpp",
    "vllm": "pip install vllm",
}
LLAMA_SERVER = "samewise.bench.llama_server"
"""The module that runs in a process of its own."""
ANSWER_SECONDS = 900.0
"""After which a peer's process counts as hung: several times what the slowest run takes on two cores."""
CLOSE_SECONDS = 10.0
"""Which a process has to end by itself before it is killed."""


@dataclass(frozen=True, slots=True)
class Common:
    """What every peer is given: the model's files, and how many requests and tokens to expect."""

    path: Path  # folder of safetensors
    gguf: Path | None  # the file that the folder was converted from
    dtype: torch.dtype
    device: torch.device
    eos_ids: frozenset[int]
    num_live: int  # requests at once, at most
    max_len: int  # tokens of a prompt with its answer, at most
    ignore_eos: bool


class Peer:
    """A backend that is another system."""

    name: str
    about: str

    def run(self, prompts: Prompts, max_tokens: int) -> Measurement:
        """Answer and measure."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what the peer holds outside of this process. May be called again."""


class LivePeers:
    """The peers that answer. One that fails is closed and left out from then on."""

    def __init__(self, peers: Sequence[Peer], tell: Callable[[str], None]) -> None:
        self._peers, self._tell = list(peers), tell

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers))

    def __contains__(self, peer: object) -> bool:
        return peer in self._peers

    def run(self, peer: Peer, prompts: Prompts, max_tokens: int) -> Measurement | None:
        """Its measurement; None where it failed, now or before."""
        if peer not in self._peers:
            return None
        try:
            return peer.run(prompts, max_tokens)
        except Exception as error:
            self._peers.remove(peer)
            self._tell(f"{peer.name} failed ({error}); it is left out, with what was measured of it")
            peer.close()
            return None


class Transformers(Peer):
    """transformers' own generate, with its own attention, on the same weights."""

    name = "transformers"

    def __init__(self, common: Common) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(common.path, dtype=common.dtype, local_files_only=True)
        self._model, self._eos = model.to(common.device).eval(), common.eos_ids
        self._pad, self._ignore_eos = min(self._eos, default=0), common.ignore_eos
        self.about = f"transformers {version('transformers')}, {_short(common.dtype)}"

    @torch.inference_mode()
    def run(self, prompts: Prompts, max_tokens: int) -> Measurement:
        """One left-padded batch."""
        longest = max(map(len, prompts))
        device = self._model.device
        rows = [[self._pad] * (longest - len(p)) + list(p) for p in prompts]
        mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
        ids = torch.tensor(rows, device=device)
        began = time.perf_counter()
        output = self._model.generate(
            input_ids=ids, attention_mask=torch.tensor(mask, device=device), do_sample=False,
            max_new_tokens=max_tokens, min_new_tokens=max_tokens if self._ignore_eos else None,
            eos_token_id=sorted(self._eos) or None, pad_token_id=self._pad,
        )  # fmt: skip
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        return Measurement(sum(self._length(row) for row in output[:, longest:].tolist()), seconds)

    def _length(self, row: list[int]) -> int:
        """Tokens up to and including the first end-of-text; what follows is padding."""
        ends = [i for i, token in enumerate(row) if token in self._eos]
        return ends[0] + 1 if ends else len(row)


class VLLM(Peer):
    """vLLM."""

    name = "vllm"

    def __init__(self, common: Common) -> None:
        from vllm import LLM

        dtype = _short(common.dtype)
        self._llm, self._ignore_eos = (
            LLM(common.path, dtype=dtype, enable_prefix_caching=False),
            common.ignore_eos,
        )
        self.about = f"vllm {version('vllm')}, {dtype}"

    def run(self, prompts: Prompts, max_tokens: int) -> Measurement:
        """All prompts in one call."""
        from vllm import SamplingParams as Params

        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = Params(temperature=0, max_tokens=max_tokens, ignore_eos=self._ignore_eos)
        began = time.perf_counter()
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return Measurement(sum(len(output.outputs[0].token_ids) for output in outputs), seconds)


class LlamaServer(Peer):
    """llama.cpp's own server (xllamacpp) in its own process, a slot per request, batched continuously."""

    name = "llama.cpp"

    def __init__(self, common: Common) -> None:
        self._log, self._ignore_eos = tempfile.TemporaryFile(), common.ignore_eos  # noqa: SIM115 - closed by close()
        # Its threads wait as they would without an engine beside them: passively it is a third as fast.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", LLAMA_SERVER], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, encoding="utf-8",
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        settings = {
            "gguf": str(common.gguf), "num_live": common.num_live, "max_len": common.max_len,
            "num_threads": torch.get_num_threads(),
        }  # fmt: skip
        try:
            self.about = str(self._ask(settings)["about"])
        except RuntimeError:
            self.close()
            raise

    def run(self, prompts: Prompts, max_tokens: int) -> Measurement:
        """A request per prompt, all at once."""
        ids = [list(prompt) for prompt in prompts]
        return Measurement(
            **self._ask({"prompts": ids, "max_tokens": max_tokens, "ignore_eos": self._ignore_eos})
        )

    def close(self) -> None:
        """End the process; kill it if it does not."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _read(self) -> None:
        """Put the process's lines into a queue, which can be waited for with a limit; "" at the end."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a line and read one; RuntimeError if the process ended, with its last words, or hangs."""
        process = self._process
        assert process.stdin is not None
        try:
            print(json.dumps(question), file=process.stdin, flush=True)
            answer = self._lines.get(timeout=ANSWER_SECONDS)
        except BrokenPipeError:
            answer = ""
        except queue.Empty:
            process.kill()
            raise RuntimeError(f"no answer in {ANSWER_SECONDS:g} s") from None
        if not answer:
            process.wait()
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError(f"its process ended: {lines[-1] if lines else f'code {process.returncode}'}")
        parsed: dict[str, Any] = json.loads(answer)
        return parsed


class LlamaOneByOne(Peer):
    """llama.cpp through llama-cpp-python, which has no continuous batching: one prompt after the other."""

    name = "llama.cpp, one by one"

    def __init__(self, common: Common) -> None:
        from llama_cpp import Llama

        threads = torch.get_num_threads()
        self._llama = Llama(
            str(common.gguf), n_ctx=common.max_len, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self._eos = frozenset() if common.ignore_eos else common.eos_ids
        self.about = f"llama-cpp-python {version('llama-cpp-python')}"

    def run(self, prompts: Prompts, max_tokens: int) -> Measurement:
        """One prompt after the other."""
        tokens, began = 0, time.perf_counter()
        for prompt in prompts:
            self._llama.reset()
            generated = self._llama.generate(list(prompt), temp=0.0)
            # The range first: the other way round a token more is computed before it ends.
            for _, token in zip(range(max_tokens), generated, strict=False):
                tokens += 1
                if token in self._eos:
                    break
        return Measurement(tokens, time.perf_counter() - began)


CLASSES: dict[str, Callable[[Common], Peer]] = {
    "transformers": Transformers,
    "vllm": VLLM,
    "xllamacpp": LlamaServer,
    "llama_cpp": LlamaOneByOne,
}
"""By package."""


def start(name: str, common: Common) -> Peer:
    """The peer of this name; BadParameter where it is not installed or cannot read the model."""
    package = _package(name)
    if package is None:
        wanted = " nor ".join(PACKAGES[name])
        raise BadParameter(
            f"peers={name!r}: {wanted} is not installed; {REMEDIES[name]}, or leave it out", param="peers"
        )
    if name == "llama.cpp" and not _reads_gguf(common):
        raise BadParameter(
            f"peers={name!r}: it is compared on the CPU, on a model that is built in or a GGUF file; "
            f"the engine runs on {common.device.type}, the model is {common.gguf or common.path}",
            param="peers",
        )
    return CLASSES[package](common)


def can_run(name: str, common: Common) -> bool:
    """Whether a peer is installed and can read the model; it may still fail to start."""
    return _package(name) is not None and (name != "llama.cpp" or _reads_gguf(common))


def _package(name: str) -> str | None:
    """The package that brings a peer, if one is installed."""
    return next(filter(installed, PACKAGES[name]), None)


def _reads_gguf(common: Common) -> bool:
    return common.gguf is not None and common.device.type == "cpu"


def installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


__all__ = [
    "VLLM",
    "Common",
    "LivePeers",
    "LlamaOneByOne",
    "LlamaServer",
    "Peer",
    "Transformers",
    "can_run",
    "installed",
    "start",
]
