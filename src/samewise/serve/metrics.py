"""Metrics for Prometheus: vLLM's names under our own prefix, and metrics of frames and drafts.

The engine's counters are read from its statistics at every scrape; times of requests are recorded as they
end. The registry is the server's own, so metrics of the process or of another server do not appear in it.
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
from samewise.openai.request import ParsedRequest
from samewise.outputs import RequestOutput
from samewise.serve.settings import ServeSettings
from samewise.serve.shared_result import SharedResult
from samewise.serve.worker import State, Worker
from samewise.verify.probe import ProbeReport

PREFIX = "samewise:"
# Upper bounds of histogram buckets: vLLM's, with smaller ones added for small models.
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
PER_TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5,
)  # fmt: skip
REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
NUM_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
STATS_TIMEOUT = 2.0
"""Seconds to wait for the engine's statistics before the last known ones are returned. Set by hand: above the
length of a step, below the usual scrape timeout of 10 s."""

GAUGES = {  # name: (statistic, description)
    "num_requests_running": ("running", "Sequences that hold pages."),
    "num_requests_waiting": ("waiting", "Sequences that wait to be admitted."),
    "recomputed_share": ("recomputed_share", "Share of drafted tokens that were rejected."),
    "tokens_per_frame": ("tokens_per_frame", "Tokens committed per frame, on average."),
    "nodes_per_draft": ("nodes_per_draft", "Guesses of a draft tree, on average."),
    "accepted_depth": ("accepted_depth", "Length of a draft tree's accepted path, on average."),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "generation_tokens": ("output_tokens", "Tokens committed."),
    "unverified_tokens": ("unverified_tokens", "Tokens committed for requests with verify=false."),
    "prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("cached_tokens", "Prompt tokens found in the prefix cache."),
    "num_preemptions": ("preempted", "Sequences preempted; they recompute their KV pages."),
    "requests": ("requests", "Sequences added."),
    "requests_aborted": ("aborted", "Sequences aborted."),
    "frames": ("frames", "Frames run."),
    "frame_rows": ("rows", "Rows of frames that were used."),
    "frame_padded_rows": ("padded_rows", "Rows of frames that were padding."),
    "rolled_back_tokens": ("rolled_back", "Drafted tokens that were rejected."),
    "step_seconds": ("step_seconds", "Seconds spent in steps."),
    "wait_seconds": ("wait_seconds", "Seconds of steps spent waiting for the device."),
}
DRAFTERS = {
    "spec_decode_num_drafts": ("drafts", "Draft trees verified."),
    "spec_decode_num_draft_tokens": ("guessed", "Tokens drafted: nodes of draft trees."),
    "spec_decode_num_accepted_tokens": ("accepted", "Drafted tokens that were accepted."),
}
DRAFT_MEMORY = {  # part: statistic of a proposer that keeps texts or rows
    "tables": "table_bytes",
    "store": "store_bytes",
    "sequences": "sequence_bytes",
}

FAIL_OVERS = {
    "failovers": "Sequences that went on in another replica, because theirs died or was stopped.",
    "failover_seconds": "Seconds that they paused.",
}


class Metrics:
    """The metrics of one server. Owned by its Service."""

    media_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, worker: Worker, settings: ServeSettings) -> None:
        self._worker, self._settings = worker, settings
        self._stats: dict[str, Any] = {}
        self._text = SharedResult(self._make_text)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_EngineCollector(self))
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_SECONDS
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds", "Per token after the first.", PER_TOKEN_SECONDS
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", REQUEST_SECONDS
        )
        self._prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", NUM_TOKENS
        )
        self._answer_tokens = self._histogram("request_generation_tokens", "Tokens of an answer.", NUM_TOKENS)
        self._finished = Counter(
            PREFIX + "request_success", "Finished answers, by reason.", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip

    def _histogram(self, name: str, description: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, description, ["model_name"], buckets=buckets, registry=self._registry)

    def finished(self, parsed: ParsedRequest, outputs: Sequence[RequestOutput]) -> None:
        """Record a request that finished."""
        name = parsed.model or self.model
        for output in outputs:
            metrics = output.metrics
            self._prompt_tokens.labels(name).observe(len(output.prompt_token_ids))
            if metrics.time_to_first_token is not None:
                self._first_token.labels(name).observe(metrics.time_to_first_token)
            if metrics.time_per_output_token is not None:
                self._per_token.labels(name).observe(metrics.time_per_output_token)
            if metrics.finished_time is not None:
                self._latency.labels(name).observe(metrics.finished_time - metrics.arrival_time)
            for completion in output.outputs:
                self._answer_tokens.labels(name).observe(len(completion.token_ids))
                self._finished.labels(name, completion.finish_reason or "none").inc()

    @property
    def model(self) -> str:
        """The label of metrics that belong to no request."""
        if self._settings.model_names:
            return self._settings.model_names[0]
        return self._worker.llm.config.model if self._worker.state is State.READY else ""

    async def text(self) -> bytes:
        """The exposition. Requests that come while one is being made share the next one."""
        return await self._text.get()

    async def _make_text(self) -> bytes:
        """While the engine is busy with a long step, its last known statistics are used."""
        with suppress(SamewiseError, TimeoutError):  # loading, stopped or busy
            self._stats = await asyncio.wait_for(self._worker.llm.stats(), STATS_TIMEOUT)
        return generate_latest(self._registry)

    def families(self) -> Iterator[Metric]:
        """Metrics read from the engine."""
        yield self._gauge(
            "up", "1 while the engine takes requests.", float(self._worker.state is State.READY)
        )
        if not self._stats:
            return
        labels, engines = self._engines()
        for name, (key, description) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, description, labels=labels)
            for values, stats in engines:
                gauge.add_metric(values, stats[key])
            yield gauge
        used = GaugeMetricFamily(
            PREFIX + "kv_cache_usage_perc", "Share of KV pages in use, from 0 to 1.", labels=labels
        )
        for values, stats in engines:
            used.add_metric(values, 1 - stats["pages_available"] / max(1, stats["pages"]))
        yield used
        for name, (key, description) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, description, labels=labels)
            for values, stats in engines:
                counter.add_metric(values, stats[key])
            yield counter
        for name, (key, description) in DRAFTERS.items():
            counter = CounterMetricFamily(PREFIX + name, description, labels=[*labels, "proposer"])
            for values, stats in engines:
                for drafter, counts in sorted(stats["drafters"].items()):
                    counter.add_metric([*values, drafter], counts[key])
            yield counter
        yield self._accepted_per_pos()
        yield self._draft_memory()
        yield from self._fail_overs()
        yield from self._contract()

    def _engines(self) -> tuple[list[str], list[tuple[list[str], dict[str, Any]]]]:
        """(names of the labels; for each engine their values, and its statistics)."""
        replicas: dict[str, dict[str, Any]] | None = self._stats.get("replicas")
        if replicas is None:
            return ["model_name"], [([self.model], self._stats)]
        return ["model_name", "replica"], [([self.model, name], replicas[name]) for name in sorted(replicas)]

    def _accepted_per_pos(self) -> Metric:
        """Accepted tokens by their place in the accepted path, 0 first: how deep drafts are right."""
        labels, engines = self._engines()
        counter = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Drafts whose accepted path reached this position.",
            labels=[*labels, "proposer", "position"],
        )
        for values, stats in engines:
            for drafter, counts in sorted(stats["drafters"].items()):
                depths = counts["depths"]
                for position in range(len(depths) - 1):
                    counter.add_metric([*values, drafter, str(position)], sum(depths[position + 1 :]))
        return counter

    def _draft_memory(self) -> Metric:
        """Host memory of proposers: recycled candidates, stored texts, and texts of running sequences."""
        labels, engines = self._engines()
        gauge = GaugeMetricFamily(
            PREFIX + "draft_memory_bytes",
            "Host memory of drafts: tables of recycled candidates, stored texts, running sequences.",
            labels=[*labels, "proposer", "part"],
        )
        for values, stats in engines:
            for name, report in sorted(stats.items()):
                if isinstance(report, dict) and DRAFT_MEMORY["tables"] in report:
                    for part, key in DRAFT_MEMORY.items():
                        gauge.add_metric([*values, name, part], report[key])
        return gauge

    def _fail_overs(self) -> Iterator[Metric]:
        """Of a server over replicas: answers that went on elsewhere, and for how long they paused."""
        for key, description in FAIL_OVERS.items():
            if key in self._stats:
                counter = CounterMetricFamily(PREFIX + key, description, labels=["model_name"])
                counter.add_metric([self.model], self._stats[key])
                yield counter

    def _contract(self) -> Iterator[Metric]:
        try:
            llm = self._worker.llm
        except SamewiseError:
            return
        report: ProbeReport = llm.report
        contract: Contract = llm.contract
        # An engine whose probe fails does not start, so a report means that it passed.
        yield self._gauge("probe_passed", "1: the frame property held on this machine at start-up.", 1.0)
        yield self._gauge("probe_frames", "Frames the probe compared.", report.frames)
        yield self._gauge("probe_duration_seconds", "Duration of the probe.", report.seconds)
        facts = dict(contract.facts)
        labels = {
            "model_name": self.model, "contract": contract.id, "proposer": llm.config.proposer,
            "dtype": facts.get("dtype", ""), "frame_rows": facts.get("frame rows", ""),
            "attention": facts.get("attention", ""),
        }  # fmt: skip
        info = GaugeMetricFamily(PREFIX + "contract_info", "What the bits depend on.", labels=list(labels))
        info.add_metric(list(labels.values()), 1.0)
        yield info

    def _gauge(self, name: str, description: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(PREFIX + name, description, labels=["model_name"])
        gauge.add_metric([self.model], value)
        return gauge


class _EngineCollector:
    """Adapter: prometheus_client calls `collect` at every scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.families()


__all__ = ["COUNTERS", "DRAFTERS", "DRAFT_MEMORY", "FAIL_OVERS", "GAUGES", "PREFIX", "Metrics"]
