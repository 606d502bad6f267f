"""Options of replicas and workers are refused by name where they mean nothing; ray is named if missing."""

import sys
from typing import Any

import pytest


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)


@pytest.mark.parametrize(
    "option", [("--ray-address", "auto"), ("--max-replicas", "2"), ("--replica-cpus", "1")]
)
def test_options_of_replicas_need_replicas(run, model, option):
    result = run("serve", model, *option)
    assert result.code == 2
    assert option[0].strip("-").replace("-", "_") in result.err
    assert "give --replicas too" in result.err


def test_no_replica_is_refused(run, model):
    assert "replicas=0: give 1 or more" in run("serve", model, "--replicas", "0").err


def test_replicas_without_ray_name_the_remedy(run, model, no_ray):
    result = run("serve", model, "--replicas", "2", "--device", "cpu")
    assert result.code == 2
    assert "samewise serve --replicas needs ray: pip install 'samewise[ray]'" in result.err


def test_workers_need_ray(run, tmp_path, no_ray):
    source = tmp_path / "in.jsonl"
    source.write_text("")
    assert "give --ray too" in run("batch", source, tmp_path / "out", "--workers", "2").err
    result = run("batch", source, tmp_path / "out", "--ray")
    assert result.code == 2
    assert "pip install 'samewise[ray]'" in result.err


@pytest.mark.parametrize(
    ("options", "num_cpus", "num_gpus"),
    [
        (("--device", "cuda"), None, 1),
        (("--device", "cpu"), None, 0),
        (("--device", "cpu", "--worker-gpus", "1", "--worker-cpus", "2"), 2, 1),
    ],
)
def test_each_worker_on_cuda_claims_a_device(run, tmp_path, monkeypatch, options, num_cpus, num_gpus):
    """Without a claim Ray would put all workers on one device, or on a machine that has none."""
    from samewise.jobs.batch import BatchSummary  # needs the extra `serve`, which the collection does not

    asked: dict[str, Any] = {}

    def note(*_: object, **given: Any) -> BatchSummary:
        asked.update(given)
        return BatchSummary(total=0, done_before=0)

    monkeypatch.setattr("samewise.scale.batch.run_on_ray", note)
    result = run("batch", tmp_path / "in", tmp_path / "out", "--ray", "--workers", "3", *options)
    assert result.code == 0, result.err
    assert (asked["workers"], asked["num_cpus"], asked["num_gpus"]) == (3, num_cpus, num_gpus)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        (("--workers", "0"), "workers=0: give 1 or more"),
        (("--worker-gpus", "2"), "worker_gpus=2: an engine has one device"),
        (("--worker-cpus", "0"), "worker_cpus=0.0: give more than 0 cores"),
    ],
)
def test_workers_that_cannot_be_are_refused(run, tmp_path, option, remedy):
    result = run("batch", tmp_path / "in", tmp_path / "out", "--ray", "--device", "cpu", *option)
    assert result.code == 2
    assert remedy in result.err
