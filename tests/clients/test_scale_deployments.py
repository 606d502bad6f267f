"""What Ray Serve is told of an application: bounds, resources, limits, routing. Nothing is started."""

import inspect
from typing import Any

import pytest

from samewise.config import EngineConfig
from samewise.scale import ScaleSettings, app
from samewise.scale.deploy import ENGINES, ROUTER, engines

serve = pytest.importorskip("ray.serve", reason="ray is not installed; see make test-clients")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's modules, on import

CONFIG = EngineConfig.of(model="a-model", max_num_seqs=16)


def deployment_of(application: Any) -> Any:
    return application._bound_deployment


def test_replicas_are_scaled_within_their_bounds() -> None:
    fixed = deployment_of(engines(CONFIG, ScaleSettings(replicas=3)))
    assert (fixed.name, fixed.num_replicas, fixed._deployment_config.autoscaling_config) == (ENGINES, 3, None)
    scaled = deployment_of(engines(CONFIG, ScaleSettings(replicas=2, max_replicas=5)))
    bounds = scaled._deployment_config.autoscaling_config
    assert (bounds.min_replicas, bounds.max_replicas, bounds.target_ongoing_requests) == (2, 5, 8)
    one_at_a_time = deployment_of(engines(CONFIG, ScaleSettings(max_replicas=5, max_ongoing=1)))
    assert one_at_a_time._deployment_config.autoscaling_config.target_ongoing_requests == 0.5


def test_a_replica_has_its_resources_and_limits() -> None:
    scale = ScaleSettings(num_cpus=3, resources={"fast": 1}, drain_seconds=7)
    replica = deployment_of(engines(CONFIG, scale))
    options = replica.ray_actor_options
    assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (3, 0, {"fast": 1})
    assert options["runtime_env"]["env_vars"] == {"OMP_NUM_THREADS": "3"}
    assert replica.max_ongoing_requests == 32
    assert replica._deployment_config.graceful_shutdown_timeout_s == 7
    routing = replica._deployment_config.request_router_config
    assert routing.request_router_class == "samewise.scale.routing.PrefixRouter"
    on_a_card = deployment_of(engines(CONFIG, ScaleSettings(num_gpus=1, max_ongoing=9)))
    assert (on_a_card.ray_actor_options["num_gpus"], on_a_card.max_ongoing_requests) == (1, 9)


def test_an_application_has_as_many_routers_as_asked_for() -> None:
    router = deployment_of(app("a-model", scale=ScaleSettings(replicas=2, routers=3)))
    assert (router.name, router.num_replicas, router.ray_actor_options["num_cpus"]) == (ROUTER, 3, 0)


def test_a_new_router_is_up_before_an_old_one_is_stopped() -> None:
    if "max_surge_percent" not in inspect.signature(serve.Deployment.options).parameters:
        pytest.skip("this release of Ray Serve stops it first")
    assert deployment_of(app("a-model"))._deployment_config.max_surge_percent == 100
    assert deployment_of(engines(CONFIG, ScaleSettings()))._deployment_config.max_surge_percent == 0
