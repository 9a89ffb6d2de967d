"""Plans with TensorRT-LLM: one shard per replica, which uses several GPUs."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from pydantic_settings import CliApp

from text_generation_launcher import mpi
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.devices import Devices
from text_generation_launcher.mpi import MpirunConfig, split
from text_generation_launcher.plan import LaunchContext, LaunchPlan, PlanError, ShardSpec, count_parts, make_plan
from text_generation_router.config import RouterConfig
from text_generation_shard.config import ShardConfig

EIGHT_GPUS = LaunchContext(
    Devices(8, "NVIDIA H200"), 8, Path("/models/m"), Path("/tmp/tgi-1"), lifeline_fd=7, environ={"PATH": "/bin"}
)


def config(**settings: object) -> LauncherConfig:
    return LauncherConfig.of(**{"model_id": "some/model", "engine": "tensorrt-llm", **settings})


def plan(context: LaunchContext = EIGHT_GPUS, **settings: object) -> LaunchPlan:
    return make_plan(config(**settings), context)


def shard_of(spec: ShardSpec) -> ShardConfig:
    """Return the settings that a shard parses from its arguments."""
    assert spec.argv[:4] == (sys.executable, "-P", "-m", "text_generation_shard")
    return CliApp.run(ShardConfig, cli_args=list(spec.argv[4:]))


def router_of(plan: LaunchPlan) -> RouterConfig:
    return CliApp.run(RouterConfig, cli_args=list(plan.router.argv[4:]))


def rejection(context: LaunchContext = EIGHT_GPUS, **settings: object) -> str:
    with pytest.raises(PlanError) as error:
        plan(context, **settings)
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "gpus"),
    [
        ({}, 1),
        ({"num_shard": 1}, 1),
        ({"num_shard": 4}, 4),
        ({"sharded": True}, 8),
        ({"sharded": True, "num_shard": 2}, 2),
    ],
)
def test_one_shard_leads_all_gpus_of_its_replica(settings: dict[str, object], gpus: int) -> None:
    made = plan(**settings)
    (spec,) = made.shards
    shard = shard_of(spec)
    assert (shard.engine, shard.tensor_parallel) == ("tensorrt-llm", gpus)
    assert (shard.rank, shard.world_size) == (0, 1), "the engine manages its own ranks"
    assert router_of(made).shard_address == (shard.address,)


@pytest.mark.parametrize(
    ("environ", "settings", "devices"),
    [
        ({}, {}, ["0"]),
        ({}, {"num_shard": 4}, ["0,1,2,3"]),
        ({}, {"num_replicas": 3}, ["0", "1", "2"]),
        ({}, {"num_replicas": 2, "num_shard": 4}, ["0,1,2,3", "4,5,6,7"]),
        ({"CUDA_VISIBLE_DEVICES": "7, 5,3,1"}, {"num_replicas": 2, "num_shard": 2}, ["7,5", "3,1"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-0a,MIG-1b,GPU-2c"}, {"num_shard": 2}, ["GPU-0a,MIG-1b"]),
        ({"NVIDIA_VISIBLE_DEVICES": "4,5"}, {"num_shard": 2}, ["0,1"]),
        ({"CUDA_VISIBLE_DEVICES": "7,5,3,1"}, {"device": "cuda:2"}, ["3"]),
    ],
)
def test_each_replica_sees_only_its_own_gpus(
    environ: dict[str, str], settings: dict[str, object], devices: list[str]
) -> None:
    made = plan(dataclasses.replace(EIGHT_GPUS, environ=environ), **settings)
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in made.shards] == devices
    # TensorRT-LLM numbers only its visible devices, so a device number would be wrong.
    assert [shard_of(spec).device for spec in made.shards] == ["auto"] * len(devices)


def test_without_gpus_cuda_visible_devices_is_not_set() -> None:
    made = plan(dataclasses.replace(EIGHT_GPUS, devices=Devices(0, None)))
    assert "CUDA_VISIBLE_DEVICES" not in made.shards[0].env


@pytest.mark.parametrize(
    ("gpus", "settings", "text"),
    [
        (2, {"num_shard": 4}, "not enough cuda devices: 4 shards take one each (--num-shard), and 2 are visible"),
        (0, {"num_shard": 2}, "not enough cuda devices: 2 shards take one each (--num-shard), and 0 are visible"),
        (
            4,
            {"num_shard": 2, "num_replicas": 3},
            "not enough cuda devices: 3 replicas take 2 each (--num-replicas, --num-shard), and 4 are visible",
        ),
        (
            4,
            {"sharded": True, "num_replicas": 2},
            "not enough cuda devices: 2 replicas take 4 each (--num-replicas, --num-shard), and 4 are visible",
        ),
        (
            1,
            {"num_replicas": 2},
            "not enough cuda devices: 2 replicas take one each (--num-replicas), and 1 are visible",
        ),
        (1, {"sharded": True}, "`sharded` is true but only found 1 CUDA devices"),
        (8, {"sharded": True, "num_shard": 1}, "`sharded` is true but `num_shard` <= 1"),
        (8, {"device": "cuda:1", "num_shard": 2}, "`device` is cuda:1, and 2 shards take a device each"),
        (8, {"device": "cuda:1", "num_replicas": 2}, "`device` is cuda:1, and 2 replicas take a device each"),
        (2, {"device": "cuda:2"}, "`device` is cuda:2, and 2 devices are visible"),
    ],
)
def test_unavailable_gpus_are_rejected(gpus: int, settings: dict[str, object], text: str) -> None:
    assert rejection(dataclasses.replace(EIGHT_GPUS, devices=Devices(gpus, None)), **settings) == text


def test_compute_type_counts_gpus() -> None:
    assert router_of(plan(num_shard=4, num_replicas=2)).compute_type == "8-nvidia-h200"
    assert router_of(plan(num_shard=2)).compute_type == "2-nvidia-h200"
    assert count_parts(config(num_shard=4, num_replicas=2), EIGHT_GPUS.devices) == 8


@pytest.mark.parametrize(
    "options", ["engine.yaml", "{kv_cache_config: {dtype: fp8}}", "max_num_tokens: 4096\n# more\n"]
)
def test_options_reach_the_shard_unchanged(options: str) -> None:
    assert shard_of(plan(trtllm_options=options).shards[0]).trtllm_options == options


def test_engine_settings_reach_the_shard() -> None:
    settings: dict[str, object] = {
        "hang_timeout": 30.0,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_batch_size": 8,
    }
    shard = shard_of(plan(**settings).shards[0])
    assert {name: getattr(shard, name) for name in settings} == settings


def test_variables_of_slurm_and_mpirun_do_not_reach_the_shard() -> None:
    environ = {"PATH": "/bin", "SLURM_JOB_ID": "1", "PMI_RANK": "0", "PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    made = plan(dataclasses.replace(EIGHT_GPUS, environ=environ))
    assert made.shards[0].env == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", **mpi.DEFAULTS}
    assert made.router.env == environ, "the router starts no ranks"


def test_other_engines_keep_the_environment() -> None:
    environ = {"SLURM_JOB_ID": "1"}
    made = make_plan(
        LauncherConfig.of(model_id="m", engine="torch", trtllm_launch="mpirun"),
        dataclasses.replace(EIGHT_GPUS, environ=environ, is_root=True),
    )
    assert made.shards[0].env == environ
    assert made.shards[0].argv[3] == "text_generation_shard"


# ------------------------------------------------------------------------------------------------------------- mpirun


def mpirun_parts(spec: ShardSpec) -> tuple[MpirunConfig, list[str], ShardSpec]:
    """Return the settings of the MPI process, the command line of mpirun, and the shard."""
    assert spec.argv[:4] == (sys.executable, "-P", "-m", "text_generation_launcher.mpi")
    own, mpirun, shard = split(spec.argv[4:])
    return CliApp.run(MpirunConfig, cli_args=own), mpirun, dataclasses.replace(spec, argv=tuple(shard))


def test_mpirun_starts_one_rank_per_gpu() -> None:
    made = plan(num_replicas=2, num_shard=4, trtllm_launch="mpirun", json_output=True)
    for replica, spec in enumerate(made.shards):
        own, mpirun, shard = mpirun_parts(spec)
        assert (own.replica, own.lifeline_fd, own.json_output) == (replica, 7, True)
        assert mpirun == [
            *("mpirun", "-n", "4", "--oversubscribe", "--bind-to", "none", "trtllm-llmapi-launch"),
            *(sys.executable, "-P", "-m", "text_generation_launcher.env_relay"),
        ]
        assert shard_of(shard).tensor_parallel == 4
        assert shard_of(shard).lifeline_fd == 7
        assert spec.inherited_fds == (7,)


def test_shard_command_is_the_same_with_mpirun() -> None:
    spawned, by_mpirun = (plan(num_shard=2, trtllm_launch=how).shards[0] for how in ("spawn", "mpirun"))
    _, _, shard = mpirun_parts(by_mpirun)
    assert shard.argv == spawned.argv
    assert (by_mpirun.name, by_mpirun.address, by_mpirun.replica) == (spawned.name, spawned.address, spawned.replica)
    assert by_mpirun.env == spawned.env | {"PATH": f"{Path(sys.executable).parent}:/bin"}
    assert by_mpirun.stop_timeout > spawned.stop_timeout, "the ranks end after the shard"


def test_open_mpi_is_allowed_to_run_as_root() -> None:
    root = dataclasses.replace(EIGHT_GPUS, is_root=True)
    for context, allowed in ((EIGHT_GPUS, False), (root, True)):
        spec = plan(context, num_shard=2, trtllm_launch="mpirun").shards[0]
        assert ("--allow-run-as-root" in mpirun_parts(spec)[1]) == allowed
        for env in (spec.env, plan(context).shards[0].env):
            for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
                assert (env.get(name) == env.get(f"{name}_CONFIRM") == "1") == allowed
