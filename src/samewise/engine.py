"""Build an engine, and step it. The only place that knows every part.

The loop is one sentence: admit, propose, replay, commit. It is turned by half a step, so that
the device never waits for the host: a frame is in flight while the deltas of the one before are turned
into text, and where no guesses are made the next frame is even started before the last one's tokens
are known here, because the device knows them already.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from samewise import machine
from samewise.assemble import (
    FRAME_ROWS,
    Loaded,
    count_pages,
    fingerprint,
    frame_sizes,
    load,
    longest,
    pick_device,
    pick_kernel,
    pick_linear,
)
from samewise.config import EngineConfig
from samewise.contract import Contract
from samewise.errors import BadParameter, BadPrompt, CallerError, GuaranteeLost
from samewise.judge import trust
from samewise.model import linear, zoo
from samewise.model.attention import PAGE
from samewise.model.folder import read_tensors
from samewise.model.rope import pin_rope
from samewise.probe import Report, check_linears, probe
from samewise.propose.base import Nothing, Proposer
from samewise.propose.decode import Decode
from samewise.run import numerics
from samewise.run.runner import Runner
from samewise.sampling import Sampler
from samewise.schedule import Limits, Scheduler
from samewise.types import Delta, Request, Sampling
from samewise.verify import Flight, Verifier

log = logging.getLogger("samewise")

MakeProposer = Callable[["Parts"], Proposer]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a proposer may be built from."""

    runner: Runner
    sampler: Sampler
    vocab: int


PROPOSERS: dict[str, MakeProposer] = {"none": lambda _: Nothing()}


class Engine:
    """Owns the parts and turns the loop. Not thread-safe: one thread owns an engine."""

    def __init__(
        self,
        loaded: Loaded,
        config: EngineConfig,
        *,
        make_proposer: MakeProposer | None = None,
        ahead: bool | None = None,
    ) -> None:
        machine.settle()
        device = pick_device(config.device)
        self.config, self.loaded, self.device = config, loaded, device
        self._switches = numerics.settle(device)
        arch = loaded.arch
        self.max_model_len = longest(config, arch)
        self.linears = pick_linear(config.linear, device)
        self.frame_rows = config.frame_rows or FRAME_ROWS["cuda" if device.type == "cuda" else self.linears]
        kernel = pick_kernel(config.attention, device)
        compiled = device.type == "cuda" if config.compile is None else config.compile
        loaded.model.to(device)
        if compiled and device.type == "cuda":  # on CPU the wider product is no faster
            zoo.stack_siblings(loaded.model)
        model = zoo.twin(loaded.model)  # modules of its own: another engine may run on the same weights
        rope = pin_rope(model, self.max_model_len)
        if self.linears == "native":
            zoo.pack_linears(model)
        operators = check_linears(model, self.frame_rows, self._where() | {"linear": self._linear_name()})
        num_pages = count_pages(config, arch, self.max_model_len, device)
        self.runner = Runner(
            model,
            arch,
            kernel,
            num_pages=num_pages,
            sizes=frame_sizes(self.frame_rows, linears=self.linears, compiled=compiled),
            max_rows=config.max_num_seqs,
            max_model_len=self.max_model_len,
            dtype=next(model.parameters()).dtype,
            device=device,
            compile=compiled,
        )
        self.sampler = Sampler(arch.vocab, device, compile=device.type == "cuda")
        self.sampler.warm(self.frame_rows, next(model.parameters()).dtype)
        self.verifier = Verifier(
            self.runner, self.sampler, ahead=device.type == "cuda" if ahead is None else ahead
        )
        self.fast = Decode(self.runner, self.sampler)
        make = make_proposer or _known_proposer(config.proposer)
        self.proposer = make(Parts(self.runner, self.sampler, arch.vocab))
        self._guessing = not isinstance(self.proposer, Nothing)
        limits = Limits(
            num_pages=num_pages,
            page=PAGE,
            frame_rows=self.frame_rows,
            frame_sizes=self.runner.sizes,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            vocab=arch.vocab,
            max_queued=config.max_queued,
            prefix_caching=config.enable_prefix_caching,
        )
        self.scheduler = Scheduler(limits)
        self._facts = dict(loaded.facts) | {"rope": rope or "as configured"}
        self._operators = operators
        self._flight: Flight | None = None
        self._held: list[Delta] = []  # published, not yet handed out
        self._next_id = 0
        self._stepped = self._waited = 0.0
        self._weights: int | None = zoo.weights_version(loaded.model)
        self._began = time.monotonic()
        self._certify()

    # ---- the loop

    def step(self) -> list[Delta]:
        """Start the next frame and publish what the one in flight found.

        Where the device runs beside the host the next frame starts first, chained to the one in flight;
        where that cannot be, it is planned from what the landed frame said.
        """
        began = time.perf_counter()
        self._refuse_uncertified()
        ahead = self._launch_ahead()
        deltas, self._held = self._held + self._land(), []
        if ahead is None:
            self.scheduler.admit()
            deltas += self._decode_unverified()
            if self._guessing:
                self.scheduler.extend(self.proposer.propose(self.scheduler.asks(verified=True)))
            spans = self.scheduler.spans()
            ahead = self.verifier.launch(spans) if spans else None
        self._flight = ahead
        self._stepped += time.perf_counter() - began
        return deltas

    def _launch_ahead(self) -> Flight | None:
        if self._flight is None or not self.verifier.ahead or self._guessing or self.scheduler.trusting:
            return None
        self.scheduler.admit()
        spans = self.scheduler.spans_ahead(self._flight.spans)
        return self.verifier.launch(spans) if spans else None

    def _land(self) -> list[Delta]:
        if self._flight is None:
            return []
        verdicts = self._flight.verdicts()
        self._waited += self._flight.waited
        self._flight = None
        self.proposer.observe(verdicts)
        return self._publish(self.scheduler.commit(verdicts))

    def _decode_unverified(self) -> list[Delta]:
        asks = self.scheduler.asks(verified=False)
        if not asks:
            return []
        kv_lens = {ask.seq_id: ask.kv_len for ask in asks}
        proposals = self.fast.propose(asks)
        return self._publish(self.scheduler.commit([trust(p, kv_lens[p.seq_id]) for p in proposals]))

    def _publish(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            if delta.finish is not None:
                self.proposer.forget(delta.request_id)
        return deltas

    # ---- requests

    def add(
        self,
        prompt: Iterable[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        verify: bool = True,
        prompt_logprobs: int | None = None,
        score_from: int | None = None,
        salt: bytes = b"",
        leader: int | None = None,
    ) -> int:
        """Queue a request and return its id. Refuses what could never run, and loses nothing by it."""
        self._refuse_uncertified()
        tokens = tuple(prompt)
        self.refuse_unknown(tokens)
        request = Request(
            self._next_id, tokens, sampling, max_tokens, verify, prompt_logprobs, score_from, salt, leader
        )
        self.scheduler.add(request)
        self._next_id += 1
        return request.id

    def refuse_unknown(self, tokens: Iterable[int]) -> None:
        """Raise BadPrompt unless every token is one of this model's."""
        vocab = self.loaded.arch.vocab
        for token in tokens:
            if type(token) is not int or not 0 <= token < vocab:
                raise BadPrompt(f"the prompt holds {token!r}; token ids of this model are 0 to {vocab - 1}")

    def abort(self, request_id: int) -> Delta | None:
        """Drop a request at any moment. None if it is not known any more."""
        delta = self.scheduler.abort(request_id)
        if delta is not None:
            self.proposer.forget(request_id)
        return delta

    def end(self, request_id: int) -> None:
        """The reader has enough of a request: its pages go back, nothing more comes of it."""
        self.scheduler.end(request_id)
        self.proposer.forget(request_id)

    def preempt(self, request_id: int) -> bool:
        """Take a running request's pages away; it will read its tokens again, to the same bits."""
        self._held += self._land()  # what is in flight for it belongs to the pages it has now
        return self.scheduler.preempt(request_id)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return self._flight is None and not self._held and self.scheduler.idle

    def check(self) -> None:
        """Raise InvariantBroken unless every page is accounted for."""
        self.scheduler.check()

    # ---- weights

    def update_weights(self, update: Mapping[str, torch.Tensor] | str | os.PathLike[str]) -> Contract:
        """Replace weights in place, forget all that came of the old ones, and certify anew.

        Nothing is changed unless every tensor fits. The engine must be idle.
        """
        if self.scheduler.idle:
            self._held += self._land()  # a frame whose readers have all gone
        if not self.scheduler.idle:
            raise CallerError("update_weights while requests are running; finish or abort them first")
        tensors = update if isinstance(update, Mapping) else read_tensors(Path(update))
        own: dict[str, torch.Tensor] = dict(self.runner.model.named_buffers())
        own |= dict(self.runner.model.named_parameters(remove_duplicate=False))
        _refuse_misfits(tensors, own)
        # From here to the new certificate nothing is served: whatever goes wrong, no answer carries the
        # old contract's name over other weights.
        self._weights = None
        self.scheduler.index.clear()
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
        if self.linears == "native":
            zoo.pack_linears(self.runner.model)
        version = zoo.touch_weights(self.loaded.model)
        self._facts["weights"] = fingerprint(self.runner.model)
        self._certify()
        self._weights = version
        return self.contract

    def _refuse_uncertified(self) -> None:
        """Weights changed behind this engine's back, or were never certified: it has no contract."""
        if self._weights != zoo.weights_version(self.loaded.model):
            raise GuaranteeLost(
                "the weights are not the certified ones: an update failed, or another engine over the same "
                "model changed them; call update_weights() again or build a new engine"
            )

    # ---- what it is and how it fares

    def _certify(self) -> None:
        self.verifier.prove()
        self.report: Report = probe(self.runner, max_model_len=self.max_model_len, operators=self._operators)
        runner = self.runner
        compiler = numerics.compiler(self.device) if runner.compiled else "off"
        facts = self._facts | self._where() | {
            "architecture": self.loaded.arch.model_type,
            "attention": runner.kernel.name,
            "compile": compiler,
            "date": self.config.date or "none",
            "dtype": str(next(runner.model.parameters()).dtype).removeprefix("torch."),
            "frame rows": str(self.frame_rows),
            "linear": self._linear_name(),
            "page": str(PAGE),
            "probe": self.report.digest,
        }  # fmt: skip
        self.contract = Contract.of(facts)
        log.info("contract %s, certified by %d frames", self.contract, self.report.frames)

    def _linear_name(self) -> str:
        return linear.name() if self.linears == "native" else "torch"

    def _where(self) -> dict[str, str]:
        """The machine and its libraries, as far as bits may depend on them."""
        cpu = machine.cpu_facts().items() if self.device.type == "cpu" else ()
        said = ", ".join(f"{name} {value}" for name, value in sorted(cpu)) or "any"
        switches = self._switches | (machine.settle() if self.device.type == "cpu" else {})
        return numerics.facts(self.device) | switches | {"cpu": said}

    def stats(self) -> dict[str, Any]:
        """Counters since the engine was built, and where it stands now."""
        scheduler = self.scheduler
        counts = dataclasses.asdict(scheduler.counts)
        counts["tokens_per_frame"] = counts["output_tokens"] / max(1, counts["frames"])
        return counts | {
            "proposer": self.proposer.name,
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "pages": scheduler.limits.num_pages - 1,
            "pages_available": scheduler.index.num_available,
            "pages_indexed": scheduler.index.num_indexed,
            "contract": self.contract.id,
            "step_seconds": self._stepped,
            "wait_seconds": self._waited,  # of those, spent waiting for the device
            "uptime": time.monotonic() - self._began,
        }


def build(config: EngineConfig, *, make_proposer: MakeProposer | None = None) -> Engine:
    """An engine from a configuration: resolve, survey, load, prove."""
    return Engine(load(config), config, make_proposer=make_proposer)


def _known_proposer(name: str) -> MakeProposer:
    if name not in PROPOSERS:
        raise BadParameter(f"proposer={name!r}: choose one of {', '.join(sorted(PROPOSERS))}")
    return PROPOSERS[name]


def _refuse_misfits(tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name not in own:
            raise BadParameter(
                f"update_weights: the model has no tensor {name!r}; names are those of its state dict"
            )
        if tensor.shape != own[name].shape:
            raise BadParameter(
                f"update_weights: {name} has shape {tuple(tensor.shape)}, "
                f"the model's has {tuple(own[name].shape)}"
            )


__all__ = ["PROPOSERS", "Engine", "MakeProposer", "Parts", "build"]
