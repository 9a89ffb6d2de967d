"""Plans with tensor-parallel groups: one shard per rank; the router connects to rank 0."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pydantic_settings import CliApp

from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.devices import Devices
from text_generation_launcher.plan import LaunchContext, LaunchPlan, PlanError, check_ports, make_plan
from text_generation_router.config import RouterConfig
from text_generation_shard.config import ShardConfig

GPUS = LaunchContext(
    Devices(8, "NVIDIA H200"), 8, Path("/models/m"), Path("/tmp/tgi-1"), lifeline_fd=7, environ={"PATH": "/bin"}
)
NO_GPU = dataclasses.replace(GPUS, devices=Devices(0, None))


def config(**settings: object) -> LauncherConfig:
    return LauncherConfig.of(**{"model_id": "some/model", "engine": "torch", **settings})


def plan(context: LaunchContext = GPUS, **settings: object) -> LaunchPlan:
    return make_plan(config(**settings), context)


def shards_of(plan: LaunchPlan) -> list[ShardConfig]:
    """Return the settings that the shards parse from their arguments."""
    return [CliApp.run(ShardConfig, cli_args=list(shard.argv[4:])) for shard in plan.shards]


def rejection(context: LaunchContext = GPUS, **settings: object) -> str:
    with pytest.raises(PlanError) as error:
        plan(context, **settings)
    return str(error.value)


def test_each_rank_is_a_process() -> None:
    made = plan(num_replicas=2, num_shard=2)
    places = [(shard.replica, shard.rank, shard.world_size) for shard in shards_of(made)]
    assert places == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    assert [(shard.replica, shard.rank) for shard in made.shards] == [place[:2] for place in places]
    assert [[shard.name for shard in group] for group in made.groups] == [
        ["shard-0-rank-0", "shard-0-rank-1"],
        ["shard-1-rank-0", "shard-1-rank-1"],
    ]
    assert [shard.process_name for shard in shards_of(made)] == [shard.name for shard in made.shards]


def test_addresses_of_ranks_and_groups() -> None:
    made = plan(num_replicas=2, num_shard=2)
    folder = "unix:///tmp/tgi-1"
    assert [shard.address for shard in shards_of(made)] == [
        f"{folder}/shard-0-0",
        f"{folder}/shard-0-1",
        f"{folder}/shard-1-0",
        f"{folder}/shard-1-1",
    ]
    meeting = [f"{folder}/group-0", f"{folder}/group-0", f"{folder}/group-1", f"{folder}/group-1"]
    assert [shard.group_address for shard in shards_of(made)] == meeting
    assert [shard.group_address for shard in made.shards] == meeting
    assert [shard.address for shard in made.shards] == [shard.address for shard in shards_of(made)]


def test_router_has_the_addresses_of_the_leaders() -> None:
    router = CliApp.run(RouterConfig, cli_args=list(plan(num_replicas=2, num_shard=4).router.argv[4:]))
    assert router.shard_address == ("unix:///tmp/tgi-1/shard-0-0", "unix:///tmp/tgi-1/shard-1-0")
    assert router.compute_type == "8-nvidia-h200"


@pytest.mark.parametrize(
    ("environ", "settings", "devices"),
    [
        ({}, {"num_shard": 2}, ["0", "1"]),
        ({}, {"num_replicas": 2, "num_shard": 2}, ["0", "1", "2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "7,5,3,1,0,2,4,6"}, {"num_replicas": 2, "num_shard": 2}, ["7", "5", "3", "1"]),
        ({}, {"sharded": True}, [str(number) for number in range(8)]),
        ({}, {"num_shard": 2, "device": "cuda"}, ["0", "1"]),
    ],
)
def test_each_rank_has_its_own_device(environ: dict[str, str], settings: dict[str, object], devices: list[str]) -> None:
    made = plan(dataclasses.replace(GPUS, environ=environ), **settings)
    assert [shard.env["CUDA_VISIBLE_DEVICES"] for shard in made.shards] == devices


def test_ranks_on_cpu_share_cores_and_memory() -> None:
    for context in (GPUS, NO_GPU):
        made = plan(context, num_replicas=2, num_shard=2, device="cpu")
        assert [shard.num_threads for shard in shards_of(made)] == [2] * 4
        assert [shard.cpu_memory_fraction for shard in shards_of(made)] == [0.1] * 4
        assert all("CUDA_VISIBLE_DEVICES" not in shard.env for shard in made.shards)


def test_ranks_have_consecutive_sockets_and_ports() -> None:
    paths = [shard.address for shard in plan(num_replicas=2, num_shard=2, shard_uds_path="/run/tgi").shards]
    assert paths == [f"unix:///run/tgi-{place}" for place in ("0-0", "0-1", "1-0", "1-1")]
    ports = [shard.address for shard in plan(num_replicas=2, num_shard=2, shard_tcp_port=5000).shards]
    assert ports == [f"127.0.0.1:{port}" for port in (5000, 5001, 5002, 5003)]


def test_torch_log_level_of_groups() -> None:
    assert {shard.env["TORCH_CPP_LOG_LEVEL"] for shard in plan(num_shard=2).shards} == {"ERROR"}
    asked = dataclasses.replace(GPUS, environ={"TORCH_CPP_LOG_LEVEL": "INFO"})
    assert {shard.env["TORCH_CPP_LOG_LEVEL"] for shard in plan(asked, num_shard=2).shards} == {"INFO"}
    assert "TORCH_CPP_LOG_LEVEL" not in plan().shards[0].env


@pytest.mark.parametrize(
    ("context", "settings", "text"),
    [
        (NO_GPU, {"num_shard": 2}, "not enough cuda devices: 2 shards take one each (--num-shard), and 0 are visible"),
        (GPUS, {"num_shard": 9}, "not enough cuda devices: 9 shards take one each (--num-shard), and 8 are visible"),
        (
            GPUS,
            {"num_shard": 4, "num_replicas": 3},
            "not enough cuda devices: 3 replicas take 4 each (--num-replicas, --num-shard), and 8 are visible",
        ),
        (GPUS, {"num_shard": 2, "device": "cuda:1"}, "`device` is cuda:1, and 2 shards take a device each"),
        (
            GPUS,
            {"num_shard": 2, "engine": "echo"},
            "2 shards were asked for (--num-shard, --sharded): the echo engine has no model to split",
        ),
    ],
)
def test_impossible_groups_are_rejected(context: LaunchContext, settings: dict[str, object], text: str) -> None:
    assert rejection(context, **settings) == text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"shard_tcp_port": 65535, "num_replicas": 2}, "`shard_tcp_port`(65535) for 2 shards: there is no port 65536"),
        ({"shard_tcp_port": 65533, "num_shard": 4}, "`shard_tcp_port`(65533) for 4 shards: there is no port 65536"),
        ({"shard_tcp_port": 2999, "num_replicas": 2}, "`shard_tcp_port`(2999) for 2 shards: 3000 is the router's"),
        (
            {"shard_tcp_port": 2997, "num_replicas": 2, "num_shard": 2},
            "`shard_tcp_port`(2997) for 4 shards: 3000 is the router's",
        ),
    ],
)
def test_unavailable_ports_are_rejected(settings: dict[str, object], text: str) -> None:
    with pytest.raises(PlanError) as error:
        check_ports(config(**settings), GPUS.devices)
    assert str(error.value) == text


@pytest.mark.parametrize(
    "settings",
    [
        {"num_shard": 8},
        {"shard_tcp_port": 65532, "num_shard": 4},
        {"shard_tcp_port": 2999, "num_shard": 4, "engine": "tensorrt-llm"},  # one shard process for all four GPUs
        {"shard_tcp_port": 2996, "num_shard": 4},
    ],
)
def test_available_ports_pass(settings: dict[str, object]) -> None:
    check_ports(config(**settings), GPUS.devices)
