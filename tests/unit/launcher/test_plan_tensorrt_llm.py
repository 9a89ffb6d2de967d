"""Plans with TensorRT-LLM: one shard per replica, which uses several GPUs."""

from __future__ import annotations

import dataclasses
import re
import sys
from itertools import pairwise
from pathlib import Path

import launch_plans
import pytest
from launch_plans import context, router_of, shards_of
from pydantic_settings import CliApp

from text_generation_launcher import mpi
from text_generation_launcher.counts import PlanError
from text_generation_launcher.mpi import MpirunConfig, split
from text_generation_launcher.plan import LaunchContext, LaunchPlan, ShardSpec


def plan(on: LaunchContext | int = 8, **settings: object) -> LaunchPlan:
    return launch_plans.plan(on, **{"engine": "tensorrt-llm", **settings})


@pytest.mark.parametrize(
    ("environ", "settings", "devices"),
    [
        ({}, {}, ["0"]),
        ({}, {"num_shard": 1}, ["0"]),
        ({}, {"num_shard": 4}, ["0,1,2,3"]),
        ({}, {"sharded": True}, ["0,1,2,3,4,5,6,7"]),
        ({}, {"sharded": True, "num_shard": 2}, ["0,1"]),
        ({}, {"num_replicas": 3}, ["0", "1", "2"]),
        ({}, {"num_replicas": 2, "num_shard": 4}, ["0,1,2,3", "4,5,6,7"]),
        ({"CUDA_VISIBLE_DEVICES": "7, 5,3,1"}, {"num_replicas": 2, "num_shard": 2}, ["7,5", "3,1"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-0a,MIG-1b,GPU-2c"}, {"num_shard": 2}, ["GPU-0a,MIG-1b"]),
        ({"NVIDIA_VISIBLE_DEVICES": "4,5"}, {"num_shard": 2}, ["0,1"]),
        ({"CUDA_VISIBLE_DEVICES": "7,5,3,1"}, {"device": "cuda:2"}, ["3"]),
    ],
)
def test_one_shard_leads_all_gpus_of_its_replica(
    environ: dict[str, str], settings: dict[str, object], devices: list[str]
) -> None:
    made = plan(context(8, environ=environ), **settings)
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in made.shards] == devices
    shards = shards_of(made)
    assert [(shard.engine, shard.tensor_parallel) for shard in shards] == [
        ("tensorrt-llm", names.count(",") + 1) for names in devices
    ]
    # TensorRT-LLM manages its own ranks, and numbers only its visible devices.
    assert {(shard.rank, shard.world_size, shard.device) for shard in shards} == {(0, 1, "auto")}
    assert router_of(made).shard_address == tuple(shard.address for shard in shards)


def test_without_gpus_cuda_visible_devices_is_not_set() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in plan(0).shards[0].env


def test_variables_of_slurm_and_mpirun_do_not_reach_the_shard() -> None:
    environ = {"PATH": "/bin", "SLURM_JOB_ID": "1", "PMI_RANK": "0", "PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    made = plan(context(8, environ=environ))
    assert made.shards[0].env == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", **mpi.DEFAULTS}
    assert made.router[0].env == environ, "the router starts no ranks"


def test_other_engines_keep_the_environment() -> None:
    environ = {"SLURM_JOB_ID": "1"}
    made = plan(context(8, environ=environ, is_root=True), engine="torch", trtllm_launch="mpirun")
    assert made.shards[0].env == environ
    assert made.shards[0].argv[3] == "text_generation_shard"


def mpirun_parts(spec: ShardSpec) -> tuple[MpirunConfig, list[str], tuple[str, ...]]:
    """Return the settings of the MPI process, and the command lines of mpirun and of the shard."""
    assert spec.argv[:4] == (sys.executable, "-P", "-m", "text_generation_launcher.mpi")
    own, mpirun, shard = split(spec.argv[4:])
    return CliApp.run(MpirunConfig, cli_args=own), mpirun, tuple(shard)


def test_mpirun_starts_one_rank_per_gpu_beside_the_same_shard() -> None:
    settings: dict[str, object] = {"num_replicas": 2, "num_shard": 4, "json_output": True}
    spawned, by_mpirun = (plan(**settings, trtllm_launch=how).shards for how in ("spawn", "mpirun"))
    for replica, (spec, same) in enumerate(zip(by_mpirun, spawned, strict=True)):
        own, mpirun, shard = mpirun_parts(spec)
        assert (own.replica, own.lifeline_fd, own.json_output) == (replica, 7, True)
        assert mpirun == [
            *("mpirun", "-n", "4", "--oversubscribe", "--bind-to", "none", "trtllm-llmapi-launch"),
            *(sys.executable, "-P", "-m", "text_generation_launcher.env_relay"),
        ]
        assert spec.env == same.env | {"PATH": f"{Path(sys.executable).parent}:/bin"}
        assert spec.stop_timeout > same.stop_timeout, "the ranks end after the shard"
        unchanged = dataclasses.replace(spec, argv=shard, env=same.env, stop_timeout=same.stop_timeout)
        assert unchanged == same


def test_mpirun_starts_the_ranks_of_several_hosts() -> None:
    environ = {"PATH": "/bin", "NCCL_DEBUG": "INFO", "HF_HOME": "/hf", "CUDA_VISIBLE_DEVICES": "0,1,2,3", "LANG": "C"}
    settings: dict[str, object] = {"num_shard": 8, "trtllm_launch": "mpirun", "trtllm_hosts": ("head", "second.local")}
    made = plan(context(4, environ=environ), **settings)
    [spec] = made.shards
    _, mpirun, _ = mpirun_parts(spec)
    assert mpirun[:9] == [
        *("mpirun", "-n", "8", "--oversubscribe", "--bind-to", "none"),
        *("--host", "head:4,second.local:4", "-x"),
    ]
    exported = [name for flag, name in pairwise(mpirun) if flag == "-x"]
    assert exported == ["GRPC_ENABLE_FORK_SUPPORT", "HF_HOME", "NCCL_DEBUG", "PATH"]
    [shard] = shards_of(dataclasses.replace(made, shards=(dataclasses.replace(spec, argv=mpirun_shard(spec)),)))
    assert (shard.tensor_parallel, shard.gpus_per_node, shard.world_size) == (8, 4, 1)
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3", "each host has its own devices"
    assert router_of(made).compute_type.startswith("8-")
    for hosts, devices, problem in (
        (("a", "b", "c"), 4, "8 shards (--num-shard) cannot be divided among 3 nodes"),
        (("a", "b"), 3, "not enough cuda devices"),
    ):
        with pytest.raises(PlanError, match=re.escape(problem)):
            plan(devices, **settings | {"trtllm_hosts": hosts})


def mpirun_shard(spec: ShardSpec) -> tuple[str, ...]:
    return mpirun_parts(spec)[2]


def test_open_mpi_is_allowed_to_run_as_root() -> None:
    for is_root in (False, True):
        machine = context(8, is_root=is_root)
        spec = plan(machine, num_shard=2, trtllm_launch="mpirun").shards[0]
        assert ("--allow-run-as-root" in mpirun_parts(spec)[1]) == is_root
        for env in (spec.env, plan(machine).shards[0].env):
            for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
                assert (env.get(name) == env.get(f"{name}_CONFIRM") == "1") == is_root
