"""What Prometheus is told: vLLM's names under our own prefix, and what only this engine has.

Counters of the engine are read from its own statistics when somebody looks; only what belongs to a
request (how long it took) is recorded as it ends. A registry of its own: nothing of the process leaks in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from samewise.contract import Contract
from samewise.errors import SamewiseError
from samewise.openai.parsed import Parsed
from samewise.outputs import RequestOutput
from samewise.serve.settings import ServeSettings
from samewise.serve.worker import State, Worker
from samewise.verify.probe import Report

PREFIX = "samewise:"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
LONG = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
PATIENCE = 2.0  # seconds to wait for the engine's statistics before the last known are given

GAUGES = {  # name: (statistic, meaning)
    "num_requests_running": ("running", "Sequences that hold pages."),
    "num_requests_waiting": ("waiting", "Sequences that wait for a place."),
    "recomputed_share": ("recomputed_share", "Share of guesses that were rolled back."),
    "tokens_per_frame": ("tokens_per_frame", "Tokens a frame made public, on average."),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens taken in."),
    "generation_tokens": ("output_tokens", "Tokens made public."),
    "unverified_tokens": ("unverified_tokens", "Of those, tokens of requests that opted out."),
    "prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("cached_tokens", "Prompt tokens found there."),
    "num_preemptions": ("preempted", "Sequences that lost their pages and read them again."),
    "requests": ("requests", "Sequences taken in."),
    "requests_aborted": ("aborted", "Sequences dropped before their end."),
    "frames": ("frames", "FrameCosts replayed."),
    "frame_rows": ("rows", "Rows of frames that were used."),
    "frame_padded_rows": ("padded_rows", "Rows of frames that were padding."),
    "rolled_back_tokens": ("rolled_back", "Guesses that were wrong, or stood behind one that was."),
    "step_seconds": ("step_seconds", "Seconds the engine was stepping."),
    "wait_seconds": ("wait_seconds", "Of those, seconds it waited for the device."),
}
DRAFTERS = {
    "spec_decode_num_drafts": ("drafts", "Drafts replayed."),
    "spec_decode_num_draft_tokens": ("guessed", "Tokens guessed."),
    "spec_decode_num_accepted_tokens": ("accepted", "Guesses that were right."),
}


class Metrics:
    """Everything `/metrics` says. Owned by the service."""

    media_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, worker: Worker, settings: ServeSettings) -> None:
        self._worker, self._settings = worker, settings
        self._stats: dict[str, Any] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Engine(self))
        self._first = self._histogram("time_to_first_token_seconds", "Arrival to first token.", SECONDS)
        self._pace = self._histogram("time_per_output_token_seconds", "Per token after the first.", PER_TOKEN)
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", LONG)
        self._asked = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._given = self._histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self._ended = Counter(
            PREFIX + "request_success", "Answers that ended, by reason.", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, meaning, ["model_name"], buckets=buckets, registry=self._registry)

    def finished(self, parsed: Parsed, outputs: Sequence[RequestOutput]) -> None:
        """A request has ended well."""
        name = parsed.model or self.model
        for output in outputs:
            metrics = output.metrics
            self._asked.labels(name).observe(len(output.prompt_token_ids))
            if metrics.time_to_first_token is not None:
                self._first.labels(name).observe(metrics.time_to_first_token)
            if metrics.time_per_output_token is not None:
                self._pace.labels(name).observe(metrics.time_per_output_token)
            if metrics.finished_time is not None:
                self._whole.labels(name).observe(metrics.finished_time - metrics.arrival_time)
            for one in output.outputs:
                self._given.labels(name).observe(len(one.token_ids))
                self._ended.labels(name, one.finish_reason or "none").inc()

    @property
    def model(self) -> str:
        """The name on metrics that belong to no request."""
        if self._settings.model_names:
            return self._settings.model_names[0]
        return self._worker.llm.config.model if self._worker.state is State.READY else ""

    async def text(self) -> bytes:
        """The exposition. An engine busy with a long step is not waited for: the last numbers stand."""
        with suppress(SamewiseError, TimeoutError):  # loading, stopped or busy
            self._stats = await asyncio.wait_for(self._worker.llm.stats(), PATIENCE)
        return generate_latest(self._registry)

    def families(self) -> Iterator[Metric]:
        """What is read from the engine."""
        yield self._one("up", "1 while the engine takes requests.", float(self._worker.state is State.READY))
        stats = self._stats
        if not stats:
            return
        for name, (key, meaning) in GAUGES.items():
            yield self._one(name, meaning, stats[key])
        used = 1 - stats["pages_available"] / max(1, stats["pages"])
        yield self._one("kv_cache_usage_perc", "Share of KV pages in use, from 0 to 1.", used)
        for name, (key, meaning) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, meaning, labels=["model_name"])
            counter.add_metric([self.model], stats[key])
            yield counter
        for name, (key, meaning) in DRAFTERS.items():
            counter = CounterMetricFamily(PREFIX + name, meaning, labels=["model_name", "proposer"])
            for drafter, tally in sorted(stats["drafters"].items()):
                counter.add_metric([self.model, drafter], tally[key])
            yield counter
        yield from self._certificate()

    def _certificate(self) -> Iterator[Metric]:
        try:
            llm = self._worker.llm
        except SamewiseError:
            return
        report: Report = llm.report
        contract: Contract = llm.contract
        # An engine whose probe fails does not start: that there is a report is the result.
        yield self._one("probe_passed", "1: the frame property held on this machine at start-up.", 1.0)
        yield self._one("probe_frames", "FrameCosts the probe compared.", report.frames)
        yield self._one("probe_duration_seconds", "What the probe took.", report.seconds)
        facts = dict(contract.facts)
        labels = {
            "model_name": self.model, "contract": contract.id, "proposer": llm.config.proposer,
            "dtype": facts.get("dtype", ""), "frame_rows": facts.get("frame rows", ""),
            "attention": facts.get("attention", ""),
        }  # fmt: skip
        info = GaugeMetricFamily(PREFIX + "contract_info", "What the bits depend on.", labels=list(labels))
        info.add_metric(list(labels.values()), 1.0)
        yield info

    def _one(self, name: str, meaning: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(PREFIX + name, meaning, labels=["model_name"])
        gauge.add_metric([self.model], value)
        return gauge


class _Engine:
    """The engine's own numbers, as Prometheus collects them."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.families()


__all__ = ["COUNTERS", "DRAFTERS", "GAUGES", "PREFIX", "Metrics"]
