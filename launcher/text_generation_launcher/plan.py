"""The processes to start, with their arguments and environments. Pure: computed from settings and facts."""

import dataclasses
import ipaddress
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from pydantic_settings import CliApp

from text_generation_common import notify
from text_generation_common.cpus import usable_cpus
from text_generation_common.secrets import is_secret
from text_generation_common.settings import ChildConfig, ProcessConfig
from text_generation_launcher import mpi
from text_generation_launcher.config import LauncherConfig, child_settings
from text_generation_launcher.counts import (
    compute_type,
    count_partitions,
    count_processes,
    count_shards,
    on_devices,
)
from text_generation_launcher.devices import Devices, some_visible
from text_generation_launcher.host_memory import NO_MEMORY, HostMemory
from text_generation_proto.addresses import join_host_port
from text_generation_router.config import RouterConfig, listen_host
from text_generation_shard.config import ShardConfig, device_number, shard_name

STOP_MARGIN = 5.0
"""Seconds beyond its own timeout after which a stopping child is killed."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    name: str
    """The name of the process in its log records."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    inherited_fds: tuple[int, ...]
    stop_timeout: float
    """Seconds between SIGTERM and SIGKILL."""
    config: ProcessConfig = dataclasses.field(default_factory=ChildConfig.of, kw_only=True)
    """The settings in `argv`."""
    hang_timeout: float = dataclasses.field(default=0.0, kw_only=True)
    """Seconds without a heartbeat after which it is aborted; 0: never."""


@dataclass(frozen=True, slots=True)
class ShardSpec(ChildSpec):
    replica: int
    """Index of the replica it belongs to, from 0."""
    rank: int
    """Rank in the replica's tensor-parallel group."""
    address: str
    group_address: str = ""
    """Address at which the shards of the replica meet; "" for a single shard."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    shards: tuple[ShardSpec, ...]
    """Ordered by replica, then by rank."""
    router: tuple[ChildSpec, ...]
    """The router, or its scheduler process and then the HTTP workers, which stop before it. Empty if it is elsewhere: with
    --parts shards, and on nodes of a replica other than the first."""
    host: str
    """IP address that the router listens on."""
    port: int
    management_port: int = 0
    """The port for probes and metrics; 0: none."""

    @property
    def ports(self) -> tuple[int, ...]:
        return tuple(filter(None, (self.port, self.management_port))) if self.router else ()

    @property
    def groups(self) -> tuple[tuple[ShardSpec, ...], ...]:
        """The shards of each replica: they start and end together."""
        return tuple(tuple(group) for _, group in groupby(self.shards, key=lambda shard: shard.replica))

    @property
    def url(self) -> str:
        """The router's base URL, from this machine."""
        host = "127.0.0.1" if ipaddress.ip_address(self.host).is_unspecified else self.host
        return f"http://{join_host_port(host, self.port)}"


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """The facts that a plan depends on, apart from the settings."""

    devices: Devices
    model_path: Path
    socket_folder: Path
    """Default folder of the shards' sockets."""
    lifeline_fd: int
    environ: Mapping[str, str]
    is_root: bool = False
    """True if the launcher, and so every child, runs as root."""
    members_file: Path | None = None
    """The file from which the router reads the addresses of shards on other hosts."""
    host_cache: HostMemory = NO_MEMORY
    cpus: int = dataclasses.field(default_factory=usable_cpus)
    """CPU cores that the launcher may use."""


def make_plan(config: LauncherConfig, context: LaunchContext) -> LaunchPlan:
    """Return the processes to start. Raises PlanError."""
    partitions = count_partitions(config, context.devices)
    ranks = range(count_processes(config, context.devices))
    replicas = range(0 if config.parts == "router" else config.num_replicas)
    shards = tuple(_shard(config, context, replica, rank) for replica in replicas for rank in ranks)
    alone = config.node_rank or config.parts == "shards"
    router = () if alone else _router(config, context, shards, partitions * config.hosts)
    return LaunchPlan(shards, router, listen_host(config.hostname), config.port, config.management_port)


SECRETS = frozenset({"api_key", "shard_token"})
"""Settings that are passed only to the children that need them, and in their environment: command lines are public."""


def child_argv(module: str, config: ProcessConfig) -> tuple[str, ...]:
    """Return the command line of one of our modules. -P: do not import from the working folder."""
    return (sys.executable, "-P", "-m", module, *CliApp.serialize(config))


def child_env(environ: Mapping[str, str], child: type[ProcessConfig]) -> dict[str, str]:
    """Return the environment of a child: the launcher's, without secrets, the child's settings and the service manager's.

    Settings are passed on the command line, which omits defaults: the environment must not override them.
    """
    settings = child.model_fields.keys() | SECRETS
    return {
        name: value
        for name, value in environ.items()
        if name.lower() not in settings and name not in notify.VARIABLES and not is_secret(name)
    }


def _shard(config: LauncherConfig, context: LaunchContext, replica: int, number: int) -> ShardSpec:
    """Return one of the shards of `replica` on this host, `number` counts them from 0."""
    here = count_processes(config, context.devices)
    rank, size = config.node_rank * here + number, config.nodes * here
    address = _address(config, context, replica, number, here)
    group_address = f"unix://{context.socket_folder}/group-{replica}" if size > 1 else ""
    if config.nodes > 1:
        group_address = config.group_address
    settings = child_settings(config, ShardConfig) | {
        "model_path": str(context.model_path),
        "address": address,
        "rank": rank,
        "replica": replica,
        "world_size": size,
        "group_address": group_address,
        "max_batch_size": config.max_batch_size or 0,
        "max_batch_total_tokens": config.max_batch_total_tokens or 0,
        "health_port": config.health_port and config.health_port + replica * here + number,
        "lifeline_fd": context.lifeline_fd,
        "shard_token": "",
    }
    if config.trace_steps and config.num_replicas > 1:
        settings["trace_steps"] = f"{config.trace_steps}-{replica}"
    env = child_env(context.environ, ShardConfig) | config.environ
    if config.engine == "tensorrt-llm":
        # It sees only its own devices, numbered from 0: a device number of ours would be wrong.
        shards, hosts = count_shards(config, context.devices), config.hosts
        settings |= {"tensor_parallel": shards, "device": "auto", "gpus_per_node": shards // hosts if hosts > 1 else 0}
        env = mpi.rank_environment(env, as_root=context.is_root)
        if context.devices.count and config.hosts == 1:
            chosen = device_number(config.device)
            first = replica * shards if chosen is None else chosen
            env["CUDA_VISIBLE_DEVICES"] = some_visible(context.environ, first, shards)
    elif config.num_replicas * here > 1:
        if on_devices(config, context.devices):
            env["CUDA_VISIBLE_DEVICES"] = some_visible(context.environ, replica * here + number)
            if number == 0 and here > 1 and config.places == "local":
                settings["group_gpus"] = some_visible(context.environ, replica * here, here)
        else:
            settings |= _cpu_share(config, context, config.num_replicas * here)
    if size > 1:
        # torch.distributed would log many stack traces after the death of a peer.
        env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    host_cache = context.host_cache
    if host_cache.size:
        # Without the router, one of several may drive each replica: then they share nothing.
        apart = config.parts == "shards"
        part, parts = (replica * here + number, config.num_replicas * here) if apart else (number, here)
        start, part_bytes = host_cache.part(part, parts)
        settings |= {
            "host_cache_fd": host_cache.descriptor,
            "host_cache_name": f"{host_cache.name}-{replica if apart else 0}",
            "host_cache_start": start,
            "host_cache_bytes": part_bytes,
        }
    shard_config = ShardConfig.of(**settings)
    spec = ShardSpec(
        name=shard_name(replica, rank, size),
        argv=child_argv("text_generation_shard", shard_config),
        config=shard_config,
        env=env,
        inherited_fds=(context.lifeline_fd, *((host_cache.descriptor,) if host_cache.descriptor else ())),
        stop_timeout=config.drain_timeout + config.shutdown_timeout + STOP_MARGIN,
        replica=replica,
        rank=rank,
        address=address,
        group_address=group_address,
        hang_timeout=config.hang_timeout,
    )
    by_mpirun = config.engine == "tensorrt-llm" and config.trtllm_launch == "mpirun"
    return _with_mpirun(config, context, spec) if by_mpirun else spec


def _with_mpirun(config: LauncherConfig, context: LaunchContext, shard: ShardSpec) -> ShardSpec:
    """Return the shard with ranks that mpirun starts."""
    settings = child_settings(config, mpi.MpirunConfig) | {
        "replica": shard.replica,
        "lifeline_fd": context.lifeline_fd,
    }
    ranks, as_root = count_shards(config, context.devices), context.is_root
    mpirun = mpi.mpirun_command(ranks, as_root=as_root, hosts=config.trtllm_hosts, environ=shard.env)
    return dataclasses.replace(
        shard,
        argv=(
            *child_argv(mpi.__name__, mpi.MpirunConfig.of(**settings)),
            *(mpi.SEPARATOR, *mpirun),
            *(mpi.SEPARATOR, *shard.argv),
        ),
        env={**shard.env, "PATH": mpi.search_path(shard.env)},
        stop_timeout=shard.stop_timeout + mpi.STOP_MARGIN,
    )


def _address(config: LauncherConfig, context: LaunchContext, replica: int, rank: int, size: int) -> str:
    if config.places == "ray":
        return "0.0.0.0:0"  # the place of the shard decides
    if config.shard_tcp_port:
        return config.shard_tcp_address(replica * size + rank)
    suffix = f"{replica}" if size == 1 else f"{replica}-{rank}"
    if config.shard_uds_path:
        return f"unix://{Path(config.shard_uds_path).absolute()}-{suffix}"
    return f"unix://{context.socket_folder}/shard-{suffix}"


def _cpu_share(config: LauncherConfig, context: LaunchContext, shards: int) -> dict[str, object]:
    """Return the share of cores and memory of one of several shards on a CPU.

    Cores: if each shard had a thread on every core, threads at barriers would wait for threads without a core. Memory: the
    requested fraction is that of all shards together.
    """
    share: dict[str, object] = {"cpu_memory_fraction": config.cpu_memory_fraction / shards}
    if not config.num_threads and "OMP_NUM_THREADS" not in context.environ:
        share["num_threads"] = max(1, context.cpus // shards)
    return share


def _router(
    config: LauncherConfig, context: LaunchContext, shards: tuple[ShardSpec, ...], partitions: int
) -> tuple[ChildSpec, ...]:
    settings = child_settings(config, RouterConfig) | {
        "model_path": str(context.model_path),
        "shard_address": tuple(shard.address for shard in shards if shard.rank == 0 and config.places == "local"),
        "hostname": listen_host(config.hostname),
        "max_input_tokens": config.input_limit,
        "compute_type": config.compute_type or (compute_type(partitions, context.devices) if partitions else "unknown"),
        "lifeline_fd": context.lifeline_fd,
        "api_key": (),
        "shard_token": "",
    }
    if config.places == "ray":
        settings["shards"] = f"file://{context.members_file}"
    env = child_env(context.environ, RouterConfig)
    if config.api_key:
        env["API_KEY"] = ",".join(config.api_key)
    if config.http_workers == 1:
        return (_router_process(config, context, settings, env | config.environ),)
    settings["worker_socket"] = str(context.socket_folder / "link")
    scheduler = _router_process(config, context, settings | {"role": "scheduler"}, env | config.environ)
    settings["role"] = "http"
    workers = (
        # Without the token of the shards: workers do not call them.
        _router_process(config, context, settings | {"http_worker": number}, env)
        for number in range(config.http_workers)
    )
    return scheduler, *workers


def _router_process(
    config: LauncherConfig, context: LaunchContext, settings: Mapping[str, object], env: Mapping[str, str]
) -> ChildSpec:
    router_config = RouterConfig.of(**settings)
    return ChildSpec(
        name=router_config.process_name,
        argv=child_argv("text_generation_router", router_config),
        config=router_config,
        env=env,
        inherited_fds=(context.lifeline_fd,),
        stop_timeout=config.shutdown_delay + config.graceful_termination_timeout + STOP_MARGIN,
        hang_timeout=config.hang_timeout,
    )
