"""Settings of replicas are checked by name; statistics of several engines are those of one."""

from typing import Any

import pytest

from samewise.errors import BadParameter, GuaranteeLost, MachineError
from samewise.scale import ScaleSettings
from samewise.scale.cluster import cause_of
from samewise.scale.merge_stats import merge_stats
from samewise.testing import run, tiny_engine
from samewise.types import Sampling


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"num_cpus": 0}, "num_cpus"),
        ({"num_gpus": 2}, "num_gpus"),
        ({"drain_seconds": -1}, "drain_seconds"),
        ({"max_ongoing": 0}, "max_ongoing"),
        ({"routers": 0}, "routers"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(values: dict[str, Any], param: str) -> None:
    with pytest.raises(BadParameter, match=f"{param}=") as refused:
        ScaleSettings(**values)
    assert refused.value.param == param


def test_counters_are_added_and_means_are_means_of_all() -> None:
    engines = [tiny_engine(proposer="ngram", clock=lambda: 0.0) for _ in range(2)]
    for number, engine in enumerate(engines):
        run(engine, [([65, 66] * 20, Sampling(), 20 + 10 * number)])
    stats = [engine.stats() for engine in engines]
    merged = merge_stats(stats)
    assert merged["output_tokens"] == 50
    assert merged["frames"] == sum(each["frames"] for each in stats)
    assert merged["pages"] == sum(each["pages"] for each in stats)
    assert merged["tokens_per_frame"] == 50 / merged["frames"]
    depths = merged["drafters"]["ngram"]["depths"]
    assert sum(depths) == sum(sum(each["drafters"]["ngram"]["depths"]) for each in stats)
    assert merged["contract"] == stats[0]["contract"]
    assert merged["frame_seconds"] == stats[0]["frame_seconds"]
    assert merge_stats(stats[:1]) == stats[0]


def test_the_error_of_a_replica_is_found_in_what_ray_says() -> None:
    said = (
        "Deploying failed: Traceback …\nsamewise.errors.GuaranteeLost: replica r1: dtype is bfloat16\n"
        "\nThe above exception …\nray.exceptions.RayTaskError"
    )
    error = cause_of(said)
    assert isinstance(error, GuaranteeLost)
    assert str(error) == "replica r1: dtype is bfloat16"
    assert isinstance(cause_of("it failed"), MachineError)
