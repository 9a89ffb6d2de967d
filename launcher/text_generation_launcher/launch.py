"""The launcher from settings to exit code: check the settings, find the model, plan, supervise."""

import asyncio
import os
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

from text_generation_common.exit_codes import CannotServe, ExitCode, first_error
from text_generation_common.heartbeat import send_heartbeats
from text_generation_common.lifeline import open_lifeline
from text_generation_common.log import log
from text_generation_common.notify import Notifier
from text_generation_common.sockets import PRIVATE_FOLDER_PREFIX, claim_socket
from text_generation_common.waiting import background
from text_generation_launcher.checks import check_engine, check_ports, check_router_files, sized_by_options
from text_generation_launcher.child import run_to_end
from text_generation_launcher.config import NO_EFFECT, LauncherConfig
from text_generation_launcher.counts import PlanError, count_partitions, count_processes, gpus_per_shard, on_devices
from text_generation_launcher.devices import Devices, find_devices
from text_generation_launcher.environment import describe_environment
from text_generation_launcher.host_memory import host_memory
from text_generation_launcher.model import resolve_adapters, resolve_model
from text_generation_launcher.plan import LaunchContext, LaunchPlan, ShardSpec, make_plan
from text_generation_launcher.restarts import RestartPolicy, ServerEnded
from text_generation_launcher.shutdown import GracefulShutdown
from text_generation_launcher.supervisor import Supervisor
from text_generation_launcher.units import RunShard
from text_generation_proto.addresses import socket_path, split_host_port
from text_generation_proto.channel import read_certificates
from text_generation_router.config import listen_host
from text_generation_shard.config import choose_engine

LONGEST_TEMP_FOLDER = 64
"""Bytes; the path of a unix socket has at most 107."""


async def launch(config: LauncherConfig, environ: Mapping[str, str]) -> ExitCode:
    """Serve until a signal arrives or serving fails; return the exit code."""
    notifier = Notifier(environ)
    notifier.show(lambda: f"starting {config.model_id}")
    stop = GracefulShutdown(reloads=bool(config.api_keys_file))
    stop.listen()
    code = ExitCode.STOPPED
    try:
        async with background(send_heartbeats(notifier)), asyncio.TaskGroup() as tasks:
            work = tasks.create_task(_serve(config, environ, stop, notifier))
            await stop.requested.wait()
            notifier.stopping()
            work.cancel()
    except* CannotServe as errors:
        code = log_start_error(first_error(errors))
    except* ServerEnded as errors:
        code = first_error(errors).code
    if stop.requested.is_set():
        code = ExitCode.STOPPED
    log.info("stopped", exit_code=int(code))
    return code


async def _serve(
    config: LauncherConfig, environ: Mapping[str, str], stop: GracefulShutdown, notifier: Notifier
) -> None:
    devices = await devices_for_shards(config, environ)
    stop.listen()  # again: Ray replaces the handlers
    if config.env:
        log.info("environment", **describe_environment(devices))
    config = check_settings(config, environ, devices)  # before a download that may take an hour
    used = count_partitions(config, devices)
    if used < devices.count and config.parts != "router":
        log.warning("not all devices are used", devices=devices.count, used=used)
    if ignored := [name for name in NO_EFFECT if getattr(config, name) != config.default(name)]:
        log.warning("settings of TGI without effect here", settings=ignored)
    if config.input_limit != config.max_input_tokens:
        log.warning("max_input_length is deprecated: use max_input_tokens")
    if (address := listen_host(config.hostname)) in ("0.0.0.0", "::") and address != config.hostname.strip("[]"):
        log.warning("hostname is not an IP address: listening on all", hostname=config.hostname, address=address)
    with open_lifeline() as lifeline_fd:
        engines = {} if config.parts == "router" else {"engine": config.engine}
        log.info("starting", model_id=config.model_id, revision=config.revision, **engines)
        model_path = await resolve_model(config, environ, stop, lifeline_fd)
        if config.lora_adapters and config.parts != "router" and config.engine != "echo":
            adapters = await resolve_adapters(config, environ, stop, lifeline_fd)
            config = config.model_copy(update={"lora_adapters": adapters})
        run_shard: RunShard = run_to_end
        members_file = None
        if config.places == "ray":
            from text_generation_launcher.ray_places import RayPlaces

            places = RayPlaces(count_processes(config, devices), gpus_per_shard(config, devices))
            run_shard, members_file = places.run_to_end, places.members_file
        kept = 0.0 if on_devices(config, devices) else config.cpu_memory_fraction
        with socket_folder(environ) as folder, host_memory(config.host_cache_bytes, kept) as host_cache:
            context = LaunchContext(
                devices,
                model_path,
                folder,
                lifeline_fd,
                environ,
                is_root=os.geteuid() == 0,
                members_file=members_file,
                host_cache=host_cache,
            )
            plan = make_plan(config, context)
            restarts = RestartPolicy(max_restarts=config.max_shard_restarts)
            with _claimed_addresses(plan, plan.shards if config.places == "local" else (), folder):
                await Supervisor(plan, stop, restarts, notifier, run_shard).run()


def check_settings(config: LauncherConfig, environ: Mapping[str, str], devices: Devices) -> LauncherConfig:
    """Return the settings with the engine chosen and a token for the shards. Raises PlanError if they cannot be met."""
    engine = choose_engine(config.engine, has_gpu=devices.count > 0 and config.device != "cpu")
    token = config.shard_token or (secrets.token_hex(32) if config.parts == "all" else "")
    config = config.model_copy(update={"engine": engine, "shard_token": token})
    if config.parts != "router":
        config = sized_by_options(config)
    count_partitions(config, devices)
    check_ports(config, devices)
    if config.parts != "router":
        check_engine(config, environ)
    if config.parts != "shards":
        check_router_files(config)
    if config.shard_tls_cert:
        try:
            read_certificates(config)
        except OSError as error:
            raise PlanError(f"the certificates for the shards cannot be read: {error}") from error
    return config


async def devices_for_shards(config: LauncherConfig, environ: Mapping[str, str]) -> Devices:
    """Return the devices for shards: those of this host, or of the Ray cluster. Raises PlanError, CannotServe."""
    if config.places == "local":
        return await find_devices(environ)
    if find_spec("ray") is None:
        raise PlanError("`places` is ray, and Ray is not installed: pip install 'ray>=2.40'")
    from text_generation_launcher import ray_places

    return await ray_places.connect()


@contextmanager
def _claimed_addresses(plan: LaunchPlan, shards: Iterable[ShardSpec], folder: Path) -> Iterator[None]:
    """Check the ports and sockets of the router and of these shards before minutes of loading.

    Inside the block, the ports that HTTP workers share are kept from other launchers, whose workers could share them as well.
    Raises CannotServe.
    """
    with ExitStack() as ports:
        for number in plan.ports:
            port = ports.enter_context(_bind(plan.host, number))
            if len(plan.router) > 1:
                # Workers can bind the port, with SO_REUSEPORT; the check of another launcher, without it, fails. This socket
                # does not listen, so it gets no connection.
                port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
                port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            else:
                port.close()
        for shard in shards:
            path = socket_path(shard.address)
            if path is None:
                _bind(*split_host_port(shard.address)).close()
            elif path.parent != folder:
                claim_socket(path)
        yield


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket at a port that no other socket listens on or keeps. Raises CannotServe."""
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host, port))
    except OSError as error:
        probe.close()
        raise CannotServe(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return probe


@contextmanager
def socket_folder(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the path of a private socket folder: the first shard creates it; the last one, or this function, removes it."""
    # tempfile.gettempdir() would write a file, which fails on a full disk; sockets take no space.
    base = os.path.abspath(environ.get("TMPDIR", "/tmp"))  # the address of a shard has no relative path
    if len(os.fsencode(base)) > LONGEST_TEMP_FOLDER or not os.path.isdir(base):
        base = "/tmp"
    folder = Path(base, PRIVATE_FOLDER_PREFIX + secrets.token_hex(8))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def log_start_error(error: BaseException) -> ExitCode:
    """Log the reason why the server cannot start; return the exit code."""
    if isinstance(error, PlanError):
        log.error("settings refused", reason=str(error))
        return ExitCode.USAGE
    log.error("cannot start", reason=str(error))
    return ExitCode.FAILED
