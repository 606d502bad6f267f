"""Metrics for Prometheus, and the Grafana dashboard that shows them."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from served_app import COMPLETIONS, ServedApp, run, served_app

from samewise.serve.metrics import COUNTERS, DRAFT_MEMORY, DRAFTERS, GAUGES, PREFIX

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
VLLM = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
    "generation_tokens_total", "time_to_first_token_seconds_bucket", "time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_success_total", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "spec_decode_num_accepted_tokens_total",
)  # fmt: skip


async def samples(served: ServedApp) -> dict[str, dict[tuple[str, ...], float]]:
    """name → label values in order of label → value."""
    response = await served.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            values.setdefault(sample.name, {})[labels] = sample.value
    return values


def test_metrics_count_requests_tokens_and_frames() -> None:
    async def work() -> None:
        async with served_app(proposer="ngram") as served:
            before = await samples(served)
            assert before["samewise:up"] == {("tiny-llama",): 1}
            assert before["samewise:generation_tokens_total"] == {("tiny-llama",): 0}
            for _ in range(2):
                await served.complete("ab" * 40, max_tokens=50, n=2)
            await served.client.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 5, "stream": True})
            after = await samples(served)
            assert {PREFIX + name for name in VLLM} <= set(after)

            def one(name: str) -> float:
                (value,) = after[PREFIX + name].values()
                return value

            assert one("prompt_tokens_total") == 4 * 80 + 2
            assert one("generation_tokens_total") == 205
            assert one("prefix_cache_hits_total") > 0
            assert one("e2e_request_latency_seconds_count") == 3
            assert one("time_to_first_token_seconds_count") == 3
            assert one("request_generation_tokens_sum") == 205
            assert after["samewise:request_success_total"] == {("length", "tiny-llama"): 5}
            assert one("frames_total") > 0
            assert one("frame_rows_total") >= 205
            guessed = after["samewise:spec_decode_num_draft_tokens_total"]["tiny-llama", "ngram"]
            accepted = after["samewise:spec_decode_num_accepted_tokens_total"]["tiny-llama", "ngram"]
            assert one("rolled_back_tokens_total") == guessed - accepted
            depths = after["samewise:spec_decode_num_accepted_tokens_per_pos_total"]
            assert sum(depths.values()) == accepted
            drafts = after["samewise:spec_decode_num_drafts_total"]["tiny-llama", "ngram"]
            assert one("nodes_per_draft") == guessed / drafts
            assert one("accepted_depth") == accepted / drafts
            assert depths["tiny-llama", "0", "ngram"] <= drafts
            memory = after["samewise:draft_memory_bytes"]
            report = (await served.llm.stats())["ngram"]
            for part, key in DRAFT_MEMORY.items():  # labels in the order of their names
                assert memory["tiny-llama", part, "ngram"] == report[key]
            assert memory["tiny-llama", "store", "ngram"] > memory["tiny-llama", "sequences", "ngram"] == 0
            assert one("probe_passed") == 1
            ((labels, value),) = after["samewise:contract_info"].items()
            assert served.llm.contract.id in labels
            assert value == 1

    run(work())


def test_metrics_belong_to_one_server() -> None:
    async def work() -> None:
        async with served_app() as one, served_app() as two:
            await one.complete()
            values = await samples(two)
            assert values["samewise:generation_tokens_total"] == {("tiny-llama",): 0}
            assert not any(name.startswith(("python_", "process_")) for name in values)

    run(work())


@pytest.fixture(scope="module")
def names() -> set[str]:
    """The names of all metrics of a server that answered a request."""

    async def work() -> set[str]:
        async with served_app(proposer="ngram") as served:
            await served.complete("ab" * 20, max_tokens=30)
            return set(await samples(served))

    return run(work())


def test_the_dashboard_uses_existing_metrics_only(names: set[str]) -> None:
    used = set(re.findall(r"samewise:\w+", DASHBOARD.read_text(encoding="utf-8")))
    assert used
    assert used <= names, sorted(used - names)


def test_the_dashboard_shows_frames_drafts_and_the_contract() -> None:
    text = DASHBOARD.read_text(encoding="utf-8")
    for name in (
        "frame_padded_rows",
        "rolled_back_tokens",
        "spec_decode_num_accepted_tokens",
        "contract_info",
    ):
        assert PREFIX + name in text


def test_the_dashboard_is_well_formed() -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert board["uid"] == "samewise"
    for panel in board["panels"]:
        assert panel["title"]
        assert panel["description"]
        assert all(target["expr"] for target in panel["targets"])


def test_every_declared_metric_is_exposed(names: set[str]) -> None:
    wanted = {PREFIX + name for name in GAUGES} | {f"{PREFIX}{name}_total" for name in COUNTERS | DRAFTERS}
    assert wanted <= names
