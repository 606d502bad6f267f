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
from pathlib import Path
from typing import Any

import torch

from samewise import machine
from samewise.config import EngineConfig
from samewise.contract import Contract
from samewise.counters import Counters
from samewise.draft.auto.auto import Auto
from samewise.draft.base import Reader
from samewise.draft.build import MakeProposer, Parts, maker_of
from samewise.draft.cost_model import FrameCosts
from samewise.draft.decode import Decode
from samewise.engine.frame_log import FrameLog
from samewise.errors import BadParameter, BadPrompt, CallerError, GuaranteeLost
from samewise.execute import numerics
from samewise.execute.load import (
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
from samewise.execute.runner import Runner
from samewise.execute.sampling import Sampler
from samewise.kernels.attention.base import PAGE
from samewise.kernels.linear import packed as linear
from samewise.model.folder import read_tensors
from samewise.model.linear import pack_linears, stack_siblings
from samewise.model.load import touch_weights, weights_version
from samewise.model.rope import pin_rope
from samewise.model.surgery import twin
from samewise.schedule.scheduler import Limits, Scheduler
from samewise.text import grammar
from samewise.types import Ask, Delta, Request, Sampling, Span
from samewise.verify import operators
from samewise.verify.judge import trust
from samewise.verify.probe import Report, confirm_sizes, probe, settle_sizes
from samewise.verify.verifier import Flight, Verifier

READ = 4096  # tokens of newcomers that a proposer reads in a step, and what is left of the last prompt

log = logging.getLogger("samewise")


class Engine:
    """Owns the parts and turns the loop. Not thread-safe: one thread owns an engine."""

    def __init__(
        self,
        loaded: Loaded,
        config: EngineConfig,
        *,
        make_proposer: MakeProposer | None = None,
        ahead: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        machine.pin_environment()
        self._clock = clock
        device = pick_device(config.device)
        self.config, self.loaded, self.device = config, loaded, device
        self._switches = numerics.pin_switches(device)
        arch = loaded.arch
        self.max_model_len = longest(config, arch)
        self.linears = pick_linear(config.linear, device)
        self.frame_rows = config.frame_rows or FRAME_ROWS["cuda" if device.type == "cuda" else self.linears]
        kernel = pick_kernel(config.attention, device)
        compiled = device.type == "cuda" if config.compile is None else config.compile
        loaded.model.to(device)
        if device.type == "cuda":  # on CPU the wider product is no faster
            stack_siblings(loaded.model)  # always: another engine's graphs must not find weights moved
        model = twin(loaded.model)  # modules of its own: another engine may run on the same weights
        rope = pin_rope(model, self.max_model_len)
        if self.linears == "native":
            pack_linears(model)
        sizes: tuple[int, ...] = (self.frame_rows,)
        if operators.elastic(model):
            sizes = frame_sizes(
                self.frame_rows, linears=self.linears, compiled=compiled, device=device.type,
                asked=config.frame_sizes,
            )  # fmt: skip
        elif config.frame_sizes is not None:
            log.warning("frame_sizes is not used: %s has products that are not linears", arch.model_type)
        self.operators = operators.check_linears(
            model, self.frame_rows, self._where() | {"linear": self._linear_name()}, sizes, merged=compiled
        )
        num_pages = count_pages(config, arch, self.max_model_len, device, widest=sizes[-1])
        private = -(-config.search_window // PAGE)
        self.runner = Runner(
            model,
            arch,
            kernel,
            num_pages=num_pages + private,
            sizes=sizes,
            frame_rows=self.frame_rows,
            max_rows=max(config.max_num_seqs, config.search_window),
            max_model_len=self.max_model_len,
            dtype=next(model.parameters()).dtype,
            device=device,
            compile=compiled,
        )
        self.sampler = Sampler(arch.vocab, device)
        self.sizes = settle_sizes(self.runner, self._where(), self.max_model_len)
        self.verifier = Verifier(
            self.runner, self.sampler, ahead=device.type == "cuda" if ahead is None else ahead
        )
        self.frames = FrameCosts(self.runner.sizes)
        self.frame_log = FrameLog()
        parts = Parts(
            self.runner, self.sampler, arch.vocab, config, self.frames, clock, loaded, self.max_model_len,
            ahead=self.verifier.ahead, private=range(num_pages, num_pages + private),
            counters=Counters(), contract=lambda: self.contract.id,
        )  # fmt: skip
        self._renewals, self._reports = parts.renewals, parts.reports
        self.fast = Decode(self.runner, self.sampler, chain=parts.chain)
        self.proposer = (make_proposer or maker_of(config))(parts)
        limits = Limits(
            num_pages=num_pages,
            page=PAGE,
            frame_rows=self.runner.widest,
            full=self.frame_rows,
            frame_sizes=self.runner.sizes,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            vocab=arch.vocab,
            max_draft=config.draft_tokens,
            burst=parts.chain,
            deadline=config.verify_deadline,
            max_queued=config.max_queued,
            prefix_caching=config.enable_prefix_caching,
        )
        self.scheduler = Scheduler(limits, parts.counters)
        self.grammars = grammar.Grammars(loaded.tokenizer, arch.vocab, loaded.eos_ids)
        self._facts = dict(loaded.facts) | {"rope": rope or "as configured"}
        self._flight: Flight | None = None
        self._launched: list[float] = []  # when the frames in flight were
        self._landed = 0.0
        self._held: list[Delta] = []  # published, not yet handed out
        self._next_id = 0
        self._stepped = self._waited = 0.0
        self._weights: int | None = weights_version(loaded.model)
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
            free = self.scheduler.asks(verified=False)
            quiet = self.proposer.quiet
            proposals = [] if quiet else self.proposer.propose(self.scheduler.asks(verified=True))
            self.scheduler.extend(proposals)  # drafts that do not go on are closed, and get their frame
            spans = self.scheduler.spans()
            ahead = self._launch(spans) if spans else None
            deltas += self._decode_unverified(free, {span.seq_id for span in spans})
        self._flight = ahead
        newcomers = self.scheduler.newcomers(READ)
        if newcomers and isinstance(self.proposer, Reader):
            self.proposer.meet(newcomers)  # while the device is at work
        self._stepped += time.perf_counter() - began
        return deltas

    def _launch_ahead(self) -> Flight | None:
        if self._flight is None or not self.verifier.ahead or not self.proposer.quiet:
            return None
        self.scheduler.admit()
        spans = self.scheduler.spans_ahead(self._flight.spans)
        return self._launch(spans) if spans else None

    def _launch(self, spans: list[Span]) -> Flight:
        self._launched.append(self._clock())
        return self.verifier.launch(spans)

    def _land(self) -> list[Delta]:
        flight = self._flight
        if flight is None:
            return []
        launched = self._launched.pop(0)
        # A frame that had to wait for the one before it began when that one landed.
        began = max(launched, self._landed) if self.verifier.ahead else self._clock()
        verdicts = flight.verdicts()
        self._landed = self._clock()
        rows = sum(len(span.inputs) for span in flight.spans)
        reading = any(span.given > 1 for span in flight.spans)
        self.frames.observe(rows, self._landed - began, reading=reading)
        self._waited += flight.waited
        self._flight = None
        # Of those who have gone nobody remembers what was guessed.
        self.proposer.observe([v for v in verdicts if self.scheduler.is_running(v.seq_id)])
        deltas = self.scheduler.commit(verdicts)
        committed = sum(len(delta.tokens) for delta in deltas)
        self.frame_log.landed(flight.spans, self.frames.size(rows), committed, self._landed)
        return self._publish(deltas)

    def _decode_unverified(self, asks: list[Ask], riding: set[int]) -> list[Delta]:
        """The fast path, for those who opted out and do not ride a frame this time."""
        kv_lens = {
            ask.seq_id: ask.kv_len
            for ask in asks
            if ask.seq_id not in riding and self.scheduler.is_running(ask.seq_id)
        }
        asks = [ask for ask in asks if ask.seq_id in kv_lens]
        if not asks:
            return []
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
        share: bool = True,
        speculate: bool = True,
    ) -> int:
        """Queue a request and return its id. Refuses what could never run, and loses nothing by it."""
        self._refuse_uncertified()
        tokens = tuple(prompt)
        self.refuse_unknown(tokens)
        request = Request(
            self._next_id, tokens, sampling, max_tokens, verify, prompt_logprobs, score_from, salt, leader,
            share, speculate,
        )  # fmt: skip
        guide = None if sampling.grammar is None else self.grammars.guide(sampling.grammar, sampling.stop_ids)
        self.scheduler.add(request, guide)
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
            pack_linears(self.runner.model)
        for renew in self._renewals:
            renew()
        version = touch_weights(self.loaded.model)
        self._facts["weights"] = fingerprint(self.runner.model)
        confirm_sizes(self.runner, self.max_model_len)
        self._certify()
        self._weights = version
        return self.contract

    def _refuse_uncertified(self) -> None:
        """Weights changed behind this engine's back, or were never certified: it has no contract."""
        if self._weights != weights_version(self.loaded.model):
            raise GuaranteeLost(
                "the weights are not the certified ones: an update failed, or another engine over the same "
                "model changed them; call update_weights() again or build a new engine"
            )

    # ---- what it is and how it fares

    def _certify(self) -> None:
        self.verifier.prove()
        self.report: Report = probe(
            self.runner, max_model_len=self.max_model_len, operators=len(self.operators)
        )
        runner = self.runner
        compiler = numerics.compiler(self.device) if runner.compiled else "off"
        facts = self._facts | self._where() | {
            "architecture": self.loaded.arch.model_type,
            "attention": runner.kernel.name,
            "compile": compiler,
            "date": self.config.date or "none",
            "dtype": str(next(runner.model.parameters()).dtype).removeprefix("torch."),
            "frame rows": str(self.frame_rows),
            "grammar": grammar.version(),
            "layers": "native" if runner.fused else "modules",
            "linear": self._linear_name(),
            "page": str(PAGE),
            "probe": self.report.digest,
        }  # fmt: skip
        self.contract = Contract.of(facts)
        log.info("contract %s, certified by %d frames", self.contract, self.report.frames)

    @property
    def settings(self) -> dict[str, str | int | bool | None]:
        """What another engine must be told to come to this contract, beside the model's name."""
        return {
            "attention": self.config.attention,
            "compile": self.runner.compiled,
            "date": self.config.date,
            "device": self.device.type,
            "dtype": str(self.runner.dtype).removeprefix("torch."),
            "frame_rows": self.frame_rows,
            "linear": self.linears,
            "max_model_len": self.max_model_len,
            "revision": self.config.revision,
        }

    def _linear_name(self) -> str:
        return linear.name() if self.linears == "native" else "torch"

    def _where(self) -> dict[str, str]:
        """The machine and its libraries, as far as bits may depend on them."""
        cpu = machine.cpu_facts().items() if self.device.type == "cpu" else ()
        said = ", ".join(f"{name} {value}" for name, value in sorted(cpu)) or "any"
        switches = self._switches | (machine.pin_environment() if self.device.type == "cpu" else {})
        return numerics.facts(self.device) | switches | {"cpu": said}

    def stats(self) -> dict[str, Any]:
        """Counters since the engine was built, and where it stands now."""
        scheduler = self.scheduler
        counts = dataclasses.asdict(scheduler.counters)
        counts["tokens_per_frame"] = counts["output_tokens"] / max(1, counts["frames"])
        counts["acceptance"] = counts["accepted"] / max(1, counts["guessed"])
        counts["recomputed_share"] = counts["rolled_back"] / max(1, counts["guessed"])
        decided = self.proposer.stats() if isinstance(self.proposer, Auto) else {}
        reports = {name: report() for name, report in self._reports.items()}
        return (
            counts
            | reports
            | {
                "proposer": self.proposer.name,
                "auto": decided,
                "frame_seconds": self.frames.curve.table(),
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
        )

    def live(self, since: int = 0) -> dict[str, Any]:
        """For whoever watches: the counters, and what frames after number `since` were used for."""
        return {"stats": self.stats(), "frames": self.frame_log.since(since)}


def build(config: EngineConfig, *, make_proposer: MakeProposer | None = None) -> Engine:
    """An engine from a configuration: resolve, survey, load, prove."""
    engine = Engine(load(config), config, make_proposer=make_proposer)
    if type(engine.proposer) is Decode:  # what `skip` drafts with is yet to be found
        engine.proposer.warm(config.max_num_seqs)
    return engine


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


__all__ = ["Engine", "build"]
