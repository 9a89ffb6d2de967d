from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TypeVar

import pytest
from pydantic_settings import CliApp

from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.devices import Devices
from text_generation_launcher.plan import (
    LaunchContext,
    LaunchPlan,
    PlanError,
    child_env,
    compute_type,
    count_parts,
    count_shards,
    make_plan,
)
from text_generation_proto.settings import ProcessConfig
from text_generation_router.config import RouterConfig, listen_host
from text_generation_shard.config import ShardConfig

C = TypeVar("C", bound=ProcessConfig)

CONTEXT = LaunchContext(
    Devices(0, None), 8, Path("/models/m"), Path("/tmp/tgi-1"), lifeline_fd=7, environ={"PATH": "/bin"}
)
TWO_GPUS = dataclasses.replace(CONTEXT, devices=Devices(2, "NVIDIA H200"))


def config(**settings: object) -> LauncherConfig:
    return LauncherConfig.of(model_id="some/model", **settings)


def plan(context: LaunchContext = CONTEXT, **settings: object) -> LaunchPlan:
    return make_plan(config(**settings), context)


def parsed(child: type[C], argv: tuple[str, ...], module: str) -> C:
    """Return the settings that a child parses from its arguments."""
    assert argv[1:4] == ("-P", "-m", module)
    return CliApp.run(child, cli_args=list(argv[4:]))


def shard_of(plan: LaunchPlan) -> ShardConfig:
    return shards_of(plan)[0]


def shards_of(plan: LaunchPlan) -> list[ShardConfig]:
    return [parsed(ShardConfig, shard.argv, "text_generation_shard") for shard in plan.shards]


def router_of(plan: LaunchPlan) -> RouterConfig:
    return parsed(RouterConfig, plan.router.argv, "text_generation_router")


@pytest.mark.parametrize(
    ("sharded", "num_shard", "devices", "shards"),
    [
        (None, None, 0, 1),
        (None, None, 1, 1),
        (None, None, 8, 1),
        (None, 1, 8, 1),
        (False, None, 8, 1),
        (False, 1, 8, 1),
    ],
)
def test_one_shard_is_the_default(sharded: bool | None, num_shard: int | None, devices: int, shards: int) -> None:
    assert count_shards(config(sharded=sharded, num_shard=num_shard), Devices(devices, None)) == shards


@pytest.mark.parametrize(
    ("sharded", "num_shard", "devices", "text"),
    [
        (True, None, 0, "`sharded` is true but only found 0 CUDA devices"),
        (True, None, 1, "`sharded` is true but only found 1 CUDA devices"),
        (True, 1, 8, "`sharded` is true but `num_shard` <= 1"),
    ],
)
def test_impossible_sharding_is_rejected(sharded: bool | None, num_shard: int | None, devices: int, text: str) -> None:
    with pytest.raises(PlanError) as error:
        count_shards(config(sharded=sharded, num_shard=num_shard), Devices(devices, None))
    assert str(error.value) == text


def test_children_parse_the_planned_settings() -> None:
    made = plan(port=8080, revision="main", json_output=True, log_level="debug")
    shard, router = shard_of(made), router_of(made)
    assert (shard.model_path, shard.address, shard.rank, shard.world_size) == (
        "/models/m",
        "unix:///tmp/tgi-1/shard-0",
        0,
        1,
    )
    assert (router.model_path, router.shard_address, router.port) == ("/models/m", (shard.address,), 8080)
    for child in (shard, router):
        assert (child.model_id, child.json_output, child.log_level, child.lifeline_fd) == (
            "some/model",
            True,
            "debug",
            7,
        )
    assert router.revision == "main"
    assert [child.inherited_fds for child in (*made.shards, made.router)] == [(7,), (7,)]


def test_settings_reach_their_child() -> None:
    settings: dict[str, object] = {
        "engine": "echo",
        "dtype": "float32",
        "load_format": "dummy",
        "cpu_memory_fraction": 0.3,
        "num_threads": 2,
        "reflection": True,
        "shutdown_timeout": 3.0,
        "echo_step_ms": 1.5,
        "echo_fail_token": 5,
        "max_concurrent_requests": 7,
        "max_stop_sequences": 9,
        "max_total_tokens": 100,
        "max_batch_prefill_tokens": 64,
        "max_batch_size": 8,
        "waiting_served_ratio": 0.3,
        "cors_allow_origin": ("http://a", "http://b,c"),
        "graceful_termination_timeout": 4.0,
        "payload_limit": 10,
    }
    made = plan(**settings)
    shard, router = shard_of(made), router_of(made)
    for name, value in settings.items():
        children = [child for child in (shard, router) if name in type(child).model_fields]
        assert children, name
        for child in children:
            assert getattr(child, name) == value, name


def test_no_batch_limit_is_zero_for_the_shard() -> None:
    assert shard_of(plan()).max_batch_size == 0
    assert router_of(plan()).max_batch_size is None


def test_max_input_length_reaches_the_router() -> None:
    assert router_of(plan(max_input_length=12)).max_input_tokens == 12
    assert router_of(plan(max_input_tokens=13)).max_input_tokens == 13


def test_environment_does_not_override_a_flag_with_the_default_value() -> None:
    """Defaults are omitted from the child's arguments, so the child must not read the variable."""
    environ = {
        "PATH": "/bin",
        "PORT": "80",
        "port": "81",
        "RANK": "3",
        "LOG_LEVEL": "debug",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    made = plan(dataclasses.replace(CONTEXT, environ=environ), port=3000)
    assert made.router.env == {"PATH": "/bin", "RANK": "3", "CUDA_VISIBLE_DEVICES": "1"}
    assert made.shards[0].env == {"PATH": "/bin", "PORT": "80", "port": "81", "CUDA_VISIBLE_DEVICES": "1"}


def test_children_are_planned_without_reading_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = plan()
    monkeypatch.setenv("MAX_BEST_OF", "9")
    monkeypatch.setenv("DEVICE", "cuda:7")
    assert plan() == quiet


def test_hf_api_token_is_passed_as_hf_token() -> None:
    assert child_env({"HF_API_TOKEN": "a"}, ShardConfig)["HF_TOKEN"] == "a"
    assert child_env({"HF_API_TOKEN": "a", "HF_TOKEN": "b"}, ShardConfig)["HF_TOKEN"] == "b"


def test_addresses_of_shards() -> None:
    assert plan().shards[0].address == "unix:///tmp/tgi-1/shard-0"
    assert plan(shard_uds_path="/run/tgi").shards[0].address == "unix:///run/tgi-0"
    assert plan(shard_uds_path="here").shards[0].address == f"unix://{Path.cwd()}/here-0"
    assert plan(shard_tcp_port=5000).shards[0].address == "127.0.0.1:5000"


def test_router_has_the_addresses_of_all_replicas() -> None:
    made = plan(num_replicas=3)
    shards = shards_of(made)
    assert [shard.name for shard in made.shards] == ["shard-0", "shard-1", "shard-2"]
    assert [(shard.replica, shard.rank) for shard in made.shards] == [(0, 0), (1, 0), (2, 0)]
    assert [(shard.rank, shard.world_size) for shard in shards] == [(0, 1)] * 3
    assert [shard.address for shard in shards] == [f"unix:///tmp/tgi-1/shard-{replica}" for replica in range(3)]
    assert [shard.address for shard in made.shards] == [shard.address for shard in shards]
    assert router_of(made).shard_address == tuple(shard.address for shard in shards)


def test_replicas_have_consecutive_addresses() -> None:
    paths = [shard.address for shard in plan(num_replicas=2, shard_uds_path="/run/tgi").shards]
    assert paths == ["unix:///run/tgi-0", "unix:///run/tgi-1"]
    ports = plan(num_replicas=2, shard_tcp_port=5000)
    assert [shard.address for shard in ports.shards] == ["127.0.0.1:5000", "127.0.0.1:5001"]
    assert router_of(ports).shard_address == ("127.0.0.1:5000", "127.0.0.1:5001")


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        ({}, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "3, 5,7"}, ["3", "5"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-0a1b,MIG-2c3d"}, ["GPU-0a1b", "MIG-2c3d"]),
        ({"NVIDIA_VISIBLE_DEVICES": "2,3"}, ["0", "1"]),
    ],
)
def test_each_replica_has_its_own_device(environ: dict[str, str], devices: list[str]) -> None:
    made = plan(dataclasses.replace(TWO_GPUS, environ=environ), num_replicas=2)
    assert [shard.env["CUDA_VISIBLE_DEVICES"] for shard in made.shards] == devices
    assert [shard.cpu_memory_fraction for shard in shards_of(made)] == [0.4, 0.4]
    assert [shard.num_threads for shard in shards_of(made)] == [0, 0]


def test_single_replica_sees_all_devices() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in plan(TWO_GPUS).shards[0].env


def test_each_replica_has_its_own_trace_file() -> None:
    assert shard_of(plan(trace_steps="/tmp/steps")).trace_steps == "/tmp/steps"
    made = plan(num_replicas=2, trace_steps="/tmp/steps")
    assert [shard.trace_steps for shard in shards_of(made)] == ["/tmp/steps-0", "/tmp/steps-1"]


def test_more_replicas_than_devices_are_rejected() -> None:
    with pytest.raises(PlanError) as error:
        plan(TWO_GPUS, num_replicas=3)
    assert str(error.value) == "not enough cuda devices: 3 replicas take one each (--num-replicas), and 2 are visible"


def test_device_number_is_rejected_for_several_replicas() -> None:
    with pytest.raises(PlanError, match=r"^`device` is cuda:1, and 2 replicas take a device each$"):
        plan(TWO_GPUS, num_replicas=2, device="cuda:1")
    assert plan(TWO_GPUS, device="cuda:1").shards


@pytest.mark.parametrize("settings", [{"device": "cpu"}, {"engine": "echo"}])
def test_replicas_on_cpu_are_not_limited_by_devices(settings: dict[str, object]) -> None:
    made = plan(TWO_GPUS, num_replicas=3, **settings)
    assert len(made.shards) == 3
    assert all("CUDA_VISIBLE_DEVICES" not in shard.env for shard in made.shards)


@pytest.mark.parametrize(
    ("cpus", "replicas", "environ", "num_threads", "expected"),
    [
        (8, 1, {}, 0, 0),  # chosen by torch
        (8, 2, {}, 0, 4),
        (8, 3, {}, 0, 2),
        (2, 3, {}, 0, 1),
        (8, 2, {}, 8, 8),  # explicit
        (8, 2, {"OMP_NUM_THREADS": "1"}, 0, 0),  # OMP_NUM_THREADS has precedence
    ],
)
def test_replicas_share_the_cores(
    cpus: int, replicas: int, environ: dict[str, str], num_threads: int, expected: int
) -> None:
    context = dataclasses.replace(CONTEXT, cpus=cpus, environ=environ)
    made = plan(context, num_replicas=replicas, num_threads=num_threads)
    assert [shard.num_threads for shard in shards_of(made)] == [expected] * replicas


def test_replicas_share_the_memory() -> None:
    assert [shard.cpu_memory_fraction for shard in shards_of(plan(num_replicas=2))] == [0.2, 0.2]
    asked = plan(num_replicas=4, cpu_memory_fraction=0.8)
    assert [shard.cpu_memory_fraction for shard in shards_of(asked)] == [0.2] * 4


@pytest.mark.parametrize(
    ("hostname", "host", "url"),
    [
        ("0.0.0.0", "0.0.0.0", "http://127.0.0.1:3000"),
        ("127.0.0.1", "127.0.0.1", "http://127.0.0.1:3000"),
        ("localhost", "127.0.0.1", "http://127.0.0.1:3000"),
        ("::", "::", "http://[::1]:3000"),
        ("::1", "::1", "http://[::1]:3000"),
        ("3f2b9c7d1e5a", "0.0.0.0", "http://127.0.0.1:3000"),
        ("my-pod-0", "0.0.0.0", "http://127.0.0.1:3000"),
    ],
)
def test_host_name_means_all_addresses(hostname: str, host: str, url: str) -> None:
    made = plan(hostname=hostname)
    assert listen_host(hostname) == made.host == router_of(made).hostname == host
    assert made.url == url


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (Devices(0, None), "1-cpu"),
        (Devices(1, "NVIDIA H200"), "1-nvidia-h200"),
        (Devices(2, None), "1-gpu"),
    ],
)
def test_compute_type_has_the_device_name(devices: Devices, expected: str) -> None:
    assert compute_type(1, devices) == expected
    assert router_of(plan(dataclasses.replace(CONTEXT, devices=devices))).compute_type == expected
    assert router_of(plan(compute_type="mine")).compute_type == "mine"


def test_compute_type_counts_the_shards_of_all_replicas() -> None:
    assert router_of(plan(num_replicas=3)).compute_type == "3-cpu"
    assert router_of(plan(TWO_GPUS, num_replicas=2)).compute_type == "2-nvidia-h200"
    assert count_parts(config(num_replicas=2), TWO_GPUS.devices) == 2


def test_stop_timeouts_exceed_those_of_the_children() -> None:
    made = plan(graceful_termination_timeout=30.0, shutdown_timeout=4.0)
    assert made.router.stop_timeout > 30.0
    assert made.shards[0].stop_timeout > 4.0


def test_api_key_is_passed_only_in_the_routers_environment() -> None:
    router = plan(api_key=("hush", "hush2")).router
    assert not any("hush" in word for word in router.argv)
    assert router.env["API_KEY"] == "hush,hush2"
    with_key = dataclasses.replace(CONTEXT, environ={"API_KEY": "hush"})
    made = plan(with_key)
    assert all("API_KEY" not in child.env for child in (made.router, *made.shards))
