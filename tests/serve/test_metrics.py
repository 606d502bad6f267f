"""What Prometheus is told, and a dashboard that asks for nothing else."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from shop import COMPLETIONS, Shop, go, shop

from samewise.serve.metrics import COUNTERS, DRAFTERS, GAUGES, PREFIX

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
VLLM = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
    "generation_tokens_total", "time_to_first_token_seconds_bucket", "time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_success_total", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "spec_decode_num_accepted_tokens_total",
)  # fmt: skip


async def samples(here: Shop) -> dict[str, dict[tuple[str, ...], float]]:
    """name → label values, by label → value."""
    response = await here.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_metrics_count_what_happened() -> None:
    async def work() -> None:
        async with shop(proposer="ngram") as here:
            before = await samples(here)
            assert before["samewise:up"] == {("tiny-llama",): 1}
            assert before["samewise:generation_tokens_total"] == {("tiny-llama",): 0}
            for _ in range(2):
                await here.complete("ab" * 40, max_tokens=50, n=2)
            await here.client.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 5, "stream": True})
            after = await samples(here)
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
            assert one("probe_passed") == 1
            ((labels, value),) = after["samewise:contract_info"].items()
            assert here.llm.contract.id in labels
            assert value == 1

    go(work())


def test_metrics_are_of_this_server_alone() -> None:
    async def work() -> None:
        async with shop() as one, shop() as two:
            await one.complete()
            found = await samples(two)
            assert found["samewise:generation_tokens_total"] == {("tiny-llama",): 0}
            assert not any(name.startswith(("python_", "process_")) for name in found)

    go(work())


@pytest.fixture(scope="module")
def names() -> set[str]:
    """Every name a server may say."""

    async def work() -> set[str]:
        async with shop(proposer="ngram") as here:
            await here.complete("ab" * 20, max_tokens=30)
            return set(await samples(here))

    return go(work())


def test_the_dashboard_asks_only_for_what_there_is(names: set[str]) -> None:
    asked = set(re.findall(r"samewise:\w+", DASHBOARD.read_text(encoding="utf-8")))
    assert asked
    assert asked <= names, sorted(asked - names)


def test_the_dashboard_shows_what_only_we_have() -> None:
    text = DASHBOARD.read_text(encoding="utf-8")
    for name in (
        "frame_padded_rows",
        "rolled_back_tokens",
        "spec_decode_num_accepted_tokens",
        "contract_info",
    ):
        assert PREFIX + name in text


def test_the_dashboard_is_one() -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert board["uid"] == "samewise"
    for panel in board["panels"]:
        assert panel["title"]
        assert panel["description"]
        assert all(target["expr"] for target in panel["targets"])


def test_every_statistic_that_is_named_is_there(names: set[str]) -> None:
    wanted = {PREFIX + name for name in GAUGES} | {f"{PREFIX}{name}_total" for name in COUNTERS | DRAFTERS}
    assert wanted <= names
