"""The plan: which processes to start, with which arguments and environment. Pure: settings and facts in, values out."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from pydantic_settings import CliApp

from text_generation_launcher import mpi, under_mpirun
from text_generation_launcher.config import LauncherConfig, child_settings
from text_generation_launcher.devices import Devices, nth_visible
from text_generation_proto.process import ProcessConfig
from text_generation_router.config import RouterConfig, listen_host
from text_generation_shard.config import ShardConfig, shard_name

STOP_MARGIN = 5.0
"""Seconds beyond its own time-out that a stopping child has before it is killed."""

LAST_PORT = 65535


class PlanError(Exception):
    """The settings ask for what this machine or this version cannot do."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to start."""

    name: str
    """What the process calls itself in its log records."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    inherited_fds: tuple[int, ...]
    stop_timeout: float
    """Seconds between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True)
class ShardSpec(ChildSpec):
    """A shard to start."""

    replica: int
    """Which copy of the model it serves, from 0."""
    rank: int
    """Its place among the shards of that replica."""
    address: str
    group_address: str = ""
    """Where the shards of that replica meet; "" where there is one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything to start, shards first."""

    shards: tuple[ShardSpec, ...]
    """Replica by replica, rank by rank."""
    router: ChildSpec
    host: str
    """Where the router listens; a literal address."""
    port: int

    @property
    def groups(self) -> tuple[tuple[ShardSpec, ...], ...]:
        """The shards of each replica: they live and die together."""
        return tuple(tuple(group) for _, group in groupby(self.shards, key=lambda shard: shard.replica))

    @property
    def url(self) -> str:
        """The router's base URL, from this machine."""
        host = ipaddress.ip_address(self.host)
        if host.is_unspecified:
            host = ipaddress.ip_address("127.0.0.1" if host.version == 4 else "::1")
        return f"http://[{host}]:{self.port}" if host.version == 6 else f"http://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the plan needs to know that is no setting."""

    devices: Devices
    cpus: int
    """Processors the launcher may use."""
    model_path: Path
    socket_folder: Path
    """Where the shards' sockets go, unless a setting says otherwise."""
    lifeline_fd: int
    environ: Mapping[str, str]
    is_root: bool = False
    """Whether the launcher, and so everything it starts, runs as root."""


def make_plan(config: LauncherConfig, around: Surroundings) -> Plan:
    """The processes to start. Raises PlanError."""
    parts = count_parts(config, around.devices)
    ranks = range(count_processes(config, around.devices))
    shards = tuple(_shard(config, around, replica, rank) for replica in range(config.num_replicas) for rank in ranks)
    return Plan(shards, _router(config, around, shards, parts), listen_host(config.hostname), config.port)


def count_parts(config: LauncherConfig, devices: Devices) -> int:
    """Into how many parts all replicas together are cut; where there are devices, a part is one. Raises PlanError."""
    parts = count_shards(config, devices)
    total = parts * config.num_replicas
    if (number := _device_number(config)) is not None and parts > 1:
        raise PlanError(f"`device` is {config.device}, and {parts} shards take a device each")
    if config.num_replicas > 1 and _on_devices(config, devices) and number is not None:
        raise PlanError(f"`device` is {config.device}, and {config.num_replicas} replicas take a device each")
    if number is not None and config.engine == "tensorrt-llm" and number >= devices.count:
        raise PlanError(f"`device` is {config.device}, and {devices.count} devices are visible")
    # Parts of one model may share a CPU, but only if asked to: nobody would cut a model for that.
    cut = parts > 1 and (config.device != "cpu" or config.engine == "tensorrt-llm")
    if total > devices.count and (cut or (config.num_replicas > 1 and _on_devices(config, devices))):
        raise PlanError(f"not enough cuda devices: {_demand(config, parts)}, and {devices.count} are visible")
    return total


def _demand(config: LauncherConfig, parts: int) -> str:
    if config.num_replicas == 1:
        return f"{parts} shards take one each (--num-shard)"
    each = "one" if parts == 1 else str(parts)
    flags = "--num-replicas" if parts == 1 else "--num-replicas, --num-shard"
    return f"{config.num_replicas} replicas take {each} each ({flags})"


def _on_devices(config: LauncherConfig, devices: Devices) -> bool:
    """Whether the shards run on accelerators, as far as can be told without asking the engine."""
    return devices.count > 0 and config.device != "cpu" and config.engine != "echo"


def _device_number(config: LauncherConfig) -> int | None:
    """Which one of the visible devices was asked for by number."""
    asked = re.fullmatch(r"cuda:(\d+)", config.device)
    return None if asked is None else int(asked[1])


def count_shards(config: LauncherConfig, devices: Devices) -> int:
    """Into how many parts to cut the model, in TGI's word: shards. Raises PlanError."""
    wanted = config.num_shard
    if config.sharded:
        if wanted is None and devices.count <= 1:
            raise PlanError(f"`sharded` is true but only found {devices.count} CUDA devices")
        if wanted is not None and wanted <= 1:
            raise PlanError("`sharded` is true but `num_shard` <= 1")
        wanted = devices.count if wanted is None else wanted
    # TGI would take all visible devices where neither setting is given. A model that fits in one serves more from replicas.
    num_shard = 1 if wanted is None else wanted
    if num_shard > 1 and config.engine == "echo":
        raise PlanError(
            f"{num_shard} shards were asked for (--num-shard, --sharded): the echo engine has no model to cut"
        )
    return num_shard


def count_processes(config: LauncherConfig, devices: Devices) -> int:
    """How many shard processes serve a replica: one a part. Raises PlanError.

    TensorRT-LLM spreads over devices by itself: its parts are served by one shard, which is their leader.
    """
    return 1 if config.engine == "tensorrt-llm" else count_shards(config, devices)


def check_ports(config: LauncherConfig, devices: Devices) -> None:
    """Whether all shards have a port, where they listen on ports. Raises PlanError."""
    first, shards = config.shard_tcp_port, config.num_replicas * count_processes(config, devices)
    last = first + shards - 1
    if first and last > LAST_PORT:
        raise PlanError(f"`shard_tcp_port`({first}) for {shards} shards: there is no port {last}")
    if first and first <= config.port <= last:
        raise PlanError(f"`shard_tcp_port`({first}) for {shards} shards: {config.port} is the router's")


def compute_type(parts: int, devices: Devices) -> str:
    """What the x-compute-type header says by default: `1-nvidia-h200`, `2-cpu`; the number is that of all replicas' parts."""
    if devices.count == 0:
        return f"{parts}-cpu"
    return f"{parts}-{(devices.name or 'gpu').lower().replace(' ', '-')}"


SECRETS = frozenset({"api_key"})
"""Settings that reach only the child they are for, and not on its command line, which everyone on the machine can read."""


def child_argv(module: str, config: ProcessConfig) -> tuple[str, ...]:
    """How to start one of our modules with these settings. -P: the working folder is no place to import from."""
    return (sys.executable, "-P", "-m", module, *CliApp.serialize(config))


def child_env(environ: Mapping[str, str], child: type[ProcessConfig]) -> dict[str, str]:
    """The environment of a child: the launcher's, without the child's settings.

    Those travel on the command line, which leaves out what is a default: the environment must not fill it in again.
    """
    settings = child.model_fields.keys() | SECRETS
    env = {name: value for name, value in environ.items() if name.lower() not in settings}
    if "HF_API_TOKEN" in env:  # TGI's old name
        env.setdefault("HF_TOKEN", env["HF_API_TOKEN"])
    return env


def _shard(config: LauncherConfig, around: Surroundings, replica: int, rank: int) -> ShardSpec:
    size = count_processes(config, around.devices)
    address = _address(config, around, replica, rank, size)
    group_address = f"unix://{around.socket_folder}/group-{replica}" if size > 1 else ""
    settings = child_settings(config, ShardConfig) | {
        "model_path": str(around.model_path),
        "address": address,
        "rank": rank,
        "replica": replica,
        "world_size": size,
        "group_address": group_address,
        "max_batch_size": config.max_batch_size or 0,
        "lifeline_fd": around.lifeline_fd,
    }
    if config.trace_steps and config.num_replicas > 1:
        settings["trace_steps"] = f"{config.trace_steps}-{replica}"
    env = child_env(around.environ, ShardConfig)
    if config.engine == "tensorrt-llm":
        # It sees its own devices and no other, and counts them from 0: no number of ours means anything to it.
        settings |= {"tensor_parallel": count_shards(config, around.devices), "device": "auto"}
        env = mpi.environment(env, as_root=around.is_root)
        if around.devices.count:
            env["CUDA_VISIBLE_DEVICES"] = _devices_of(config, around, replica)
    elif config.num_replicas * size > 1:
        if _on_devices(config, around.devices):
            env["CUDA_VISIBLE_DEVICES"] = nth_visible(around.environ, replica * size + rank)
        else:
            settings |= _share_of_machine(config, around, config.num_replicas * size)
    if size > 1:
        # torch.distributed would warn, with stack traces, of whatever follows from the end of a peer.
        env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    spec = ShardSpec(
        name=shard_name(replica, rank, size),
        argv=child_argv("text_generation_shard", ShardConfig.of(**settings)),
        env=env,
        inherited_fds=(around.lifeline_fd,),
        stop_timeout=config.shutdown_timeout + STOP_MARGIN,
        replica=replica,
        rank=rank,
        address=address,
        group_address=group_address,
    )
    by_mpirun = config.engine == "tensorrt-llm" and config.trtllm_launch == "mpirun"
    return _under_mpirun(config, around, spec) if by_mpirun else spec


def _devices_of(config: LauncherConfig, around: Surroundings, replica: int) -> str:
    """What CUDA_VISIBLE_DEVICES says to a replica that spreads over its devices by itself: its own, and no other."""
    parts = count_shards(config, around.devices)
    number = _device_number(config)
    first = replica * parts if number is None else number
    return ",".join(nth_visible(around.environ, first + part) for part in range(parts))


def _under_mpirun(config: LauncherConfig, around: Surroundings, shard: ShardSpec) -> ShardSpec:
    """That shard, with ranks that mpirun starts."""
    settings = child_settings(config, under_mpirun.UnderMpirunConfig) | {
        "replica": shard.replica,
        "lifeline_fd": around.lifeline_fd,
    }
    mpirun = mpi.mpirun_command(count_shards(config, around.devices), as_root=around.is_root)
    return dataclasses.replace(
        shard,
        argv=(
            *child_argv(under_mpirun.__name__, under_mpirun.UnderMpirunConfig.of(**settings)),
            *(under_mpirun.SEPARATOR, *mpirun),
            *(under_mpirun.SEPARATOR, *shard.argv),
        ),
        env={**shard.env, "PATH": mpi.search_path(shard.env)},
        stop_timeout=shard.stop_timeout + under_mpirun.STOP_MARGIN,
    )


def _address(config: LauncherConfig, around: Surroundings, replica: int, rank: int, size: int) -> str:
    if config.shard_tcp_port:
        return f"127.0.0.1:{config.shard_tcp_port + replica * size + rank}"
    place = f"{replica}" if size == 1 else f"{replica}-{rank}"
    if config.shard_uds_path:
        return f"unix://{Path(config.shard_uds_path).absolute()}-{place}"
    return f"unix://{around.socket_folder}/shard-{place}"


def _share_of_machine(config: LauncherConfig, around: Surroundings, shards: int) -> dict[str, object]:
    """What one of several shards takes of the machine they share.

    Processors: where each shard has a thread on all of them, they spend their time at barriers, waiting for threads that
    wait for a processor. Memory: the fraction that was asked for is that of all shards.
    """
    share: dict[str, object] = {"cpu_memory_fraction": config.cpu_memory_fraction / shards}
    if not config.num_threads and "OMP_NUM_THREADS" not in around.environ:
        share["num_threads"] = max(1, around.cpus // shards)
    return share


def _router(config: LauncherConfig, around: Surroundings, shards: tuple[ShardSpec, ...], parts: int) -> ChildSpec:
    settings = child_settings(config, RouterConfig) | {
        "model_path": str(around.model_path),
        "shard_address": tuple(shard.address for shard in shards if shard.rank == 0),
        "hostname": listen_host(config.hostname),
        "max_input_tokens": config.input_limit,
        "compute_type": config.compute_type or compute_type(parts, around.devices),
        "lifeline_fd": around.lifeline_fd,
        **dict.fromkeys(SECRETS, ()),
    }
    env = child_env(around.environ, RouterConfig)
    if config.api_key:
        env["API_KEY"] = ",".join(config.api_key)
    return ChildSpec(
        name="router",
        argv=child_argv("text_generation_router", RouterConfig.of(**settings)),
        env=env,
        inherited_fds=(around.lifeline_fd,),
        stop_timeout=config.graceful_termination_timeout + STOP_MARGIN,
    )
