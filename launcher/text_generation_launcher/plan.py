"""The plan: which processes to start, with which arguments and environment. Pure: settings and facts in, values out."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic_settings import CliApp

from text_generation_launcher.config import LauncherConfig, child_settings
from text_generation_launcher.devices import Devices
from text_generation_proto.process import ProcessConfig
from text_generation_router.config import RouterConfig, listen_host
from text_generation_shard.config import ShardConfig

STOP_MARGIN = 5.0
"""Seconds beyond its own time-out that a stopping child has before it is killed."""


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

    rank: int
    address: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything to start, shards first."""

    shards: tuple[ShardSpec, ...]
    router: ChildSpec
    host: str
    """Where the router listens; a literal address."""
    port: int

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
    model_path: Path
    socket_folder: Path
    """Where the shards' sockets go, unless a setting says otherwise."""
    lifeline_fd: int
    environ: Mapping[str, str]


def make_plan(config: LauncherConfig, around: Surroundings) -> Plan:
    """The processes to start. Raises PlanError."""
    num_shard = count_shards(config, around.devices)
    shards = tuple(_shard(config, around, rank, num_shard) for rank in range(num_shard))
    return Plan(
        shards, _router(config, around, shards[0].address, num_shard), listen_host(config.hostname), config.port
    )


def count_shards(config: LauncherConfig, devices: Devices) -> int:
    """How many shards to start. Raises PlanError."""
    wanted = config.num_shard
    if config.sharded:
        if wanted is None and devices.count <= 1:
            raise PlanError(f"`sharded` is true but only found {devices.count} CUDA devices")
        if wanted is not None and wanted <= 1:
            raise PlanError("`sharded` is true but `num_shard` <= 1")
        wanted = devices.count if wanted is None else wanted
    # TGI would take all visible devices where neither setting is given. That waits for tensor parallelism.
    num_shard = 1 if wanted is None else wanted
    if num_shard > 1:
        raise PlanError(f"{num_shard} shards were asked for (--num-shard, --sharded): only one shard is served yet")
    return num_shard


def compute_type(num_shard: int, devices: Devices) -> str:
    """What the x-compute-type header says by default: `1-nvidia-h200`, `1-cpu`."""
    if devices.count == 0:
        return f"{num_shard}-cpu"
    return f"{num_shard}-{(devices.name or 'gpu').lower().replace(' ', '-')}"


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


def _shard(config: LauncherConfig, around: Surroundings, rank: int, world_size: int) -> ShardSpec:
    if config.shard_tcp_port:
        address = f"127.0.0.1:{config.shard_tcp_port + rank}"
    elif config.shard_uds_path:
        address = f"unix://{Path(config.shard_uds_path).absolute()}-{rank}"
    else:
        address = f"unix://{around.socket_folder}/shard-{rank}"
    settings = child_settings(config, ShardConfig) | {
        "model_path": str(around.model_path),
        "address": address,
        "rank": rank,
        "world_size": world_size,
        "max_batch_size": config.max_batch_size or 0,
        "lifeline_fd": around.lifeline_fd,
    }
    return ShardSpec(
        name=f"shard-{rank}",
        argv=child_argv("text_generation_shard", ShardConfig.of(**settings)),
        env=child_env(around.environ, ShardConfig),
        inherited_fds=(around.lifeline_fd,),
        stop_timeout=config.shutdown_timeout + STOP_MARGIN,
        rank=rank,
        address=address,
    )


def _router(config: LauncherConfig, around: Surroundings, shard_address: str, num_shard: int) -> ChildSpec:
    settings = child_settings(config, RouterConfig) | {
        "model_path": str(around.model_path),
        "shard_address": shard_address,
        "hostname": listen_host(config.hostname),
        "max_input_tokens": config.input_limit,
        "compute_type": config.compute_type or compute_type(num_shard, around.devices),
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
