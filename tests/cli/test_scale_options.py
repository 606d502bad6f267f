"""Options of replicas and workers are refused by name where they mean nothing; ray is named if missing."""

import sys

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
