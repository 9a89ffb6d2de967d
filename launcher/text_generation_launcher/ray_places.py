"""Shards that actors of a Ray cluster start (--places ray). The only module that imports Ray.

    launcher ──► placement group, one a replica: a bundle for each shard, all on one node
        └─────► actor, one a shard: starts the shard with a lifeline, forwards its log, reports its end
    router ────► shards, directly; their addresses are in a file in memory that this module writes

Ray carries no request and no answer. An actor that ends closes the lifeline of its shard. Ray ends the actors when the
launcher ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, redirect_stderr, suppress
from functools import partial
from io import BufferedIOBase, TextIOWrapper
from pathlib import Path
from typing import Any

import ray
import yaml
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from typing_extensions import Buffer

from text_generation_common.exit_codes import CannotServe, ExitCode
from text_generation_common.lifeline import open_lifeline
from text_generation_common.log import log
from text_generation_common.one_line import one_line
from text_generation_launcher.child import label, run_to_end
from text_generation_launcher.devices import Devices, call_in_daemon
from text_generation_launcher.plan import STOP_MARGIN, ShardSpec
from text_generation_launcher.shutdown import GracePeriod
from text_generation_proto.addresses import join_host_port
from text_generation_proto.v1 import shard_pb2 as pb

NODE_VARIABLES = ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR", "CUDA_VISIBLE_DEVICES")
"""Variables that a shard takes from its node. CUDA_VISIBLE_DEVICES is what Ray assigned."""
Handle = Any
"""An object of Ray, which has no types."""
CONNECT_TIMEOUT_S = 20.0
"""Seconds for the cluster to answer."""
PATIENCE_S = 10.0
"""Seconds without room in the cluster after which the log says so."""


async def connect() -> Devices:
    """Connect to the cluster that RAY_ADDRESS names, or to the one of this host; return its GPUs. Raises CannotServe."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it would write to our log, and not as JSON
    ours = os.dup(2)
    with open(os.devnull, "wb") as nowhere:  # noqa: ASYNC230 - it does not block
        os.dup2(nowhere.fileno(), 2)  # until Ray has read that level
    try:
        # In the main thread it would take our handler of SIGTERM. It waits for minutes for a cluster that does not answer.
        await call_in_daemon(
            lambda: ray.init(address="auto", log_to_driver=False, logging_level="ERROR"), CONNECT_TIMEOUT_S
        )
    except TimeoutError as error:
        address = os.environ.get("RAY_ADDRESS", "the address of this host's")
        raise CannotServe(
            f"no Ray cluster answers within {CONNECT_TIMEOUT_S:g} s at {address} (RAY_ADDRESS)"
        ) from error
    except Exception as error:
        raise CannotServe(f"no Ray cluster was found (RAY_ADDRESS): {one_line(error)}") from error
    finally:
        os.dup2(ours, 2)
        os.close(ours)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    return Devices(gpus, None)


class RayPlaces:
    """Starts shards in the cluster, and lists those that serve in a file for the router."""

    def __init__(self, shards_per_replica: int, gpus_per_shard: int) -> None:
        self._members_fd = os.memfd_create("members")
        self._shards_per_replica = shards_per_replica
        self._gpus_per_shard = gpus_per_shard
        self._groups: dict[int, Handle] = {}
        """Placement groups, by replica."""
        self._placing: dict[int, asyncio.Lock] = {}
        self._users: dict[int, set[int]] = {}
        """The ranks that use the placement group of a replica."""
        self._serving: dict[int, str] = {}
        """Addresses of the replicas that serve."""

    @property
    def members_file(self) -> Path:
        """The list of the shards that serve, for the router. It is in memory, and ends with this process."""
        return Path(f"/proc/{os.getpid()}/fd/{self._members_fd}")

    async def run_to_end(
        self,
        spec: ShardSpec,
        grace_period: GracePeriod,
        *,
        described: asyncio.Future[pb.InfoResponse],
        **_: object,
    ) -> int:
        """Run a shard until it ends and return its exit code. When cancelled, stop it first.

        `described` gets its description once it serves. An actor or a node that is lost counts as DEPENDENCY_LOST.
        """
        users = self._users.setdefault(spec.replica, set())
        users.add(spec.rank)
        actor: Handle = None
        try:
            group = await self._group(spec.replica)
            actor = _ACTOR.options(
                num_cpus=1,
                num_gpus=self._gpus_per_shard,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, spec.rank),
            ).remote()
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(self._follow(actor, spec, described))
                try:
                    await asyncio.wait((following,))
                    return following.result()
                finally:
                    await _stop(actor, following, spec, grace_period)
        finally:
            if spec.rank == 0 and self._serving.pop(spec.replica, None) is not None:
                self._write()
            if actor is not None:
                ray.kill(actor)
            users.discard(spec.rank)
            if not users and (unused := self._groups.pop(spec.replica, None)) is not None:
                remove_placement_group(unused)

    async def _group(self, replica: int) -> Handle:
        """Return the placement group of a replica. Its first shard makes it, its last one removes it."""
        async with self._placing.setdefault(replica, asyncio.Lock()):
            if replica not in self._groups:
                self._groups[replica] = await self._place(replica)
            return self._groups[replica]

    async def _place(self, replica: int) -> Handle:
        """Return a placement group for a replica once the cluster has room for it."""
        bundle = {"CPU": 1} | ({"GPU": self._gpus_per_shard} if self._gpus_per_shard else {})
        group = placement_group([bundle] * self._shards_per_replica, strategy="STRICT_PACK")
        try:
            waiting = group.ready().future()
            ready = asyncio.wrap_future(waiting)
            await asyncio.wait((ready,), timeout=PATIENCE_S)
            if not ready.done():
                log.warning(
                    "waiting for room in the Ray cluster", replica=replica, bundles=self._shards_per_replica, **bundle
                )
            await ready
        except BaseException:
            remove_placement_group(group)
            raise
        return group

    async def _follow(self, actor: Handle, spec: ShardSpec, described: asyncio.Future[pb.InfoResponse]) -> int:
        """Handle what the actor of a shard reports, until the shard has ended; return its exit code."""
        address = ""
        try:
            async for reference in actor.run.remote(spec):
                kind, value = await reference
                match kind:
                    case "address":
                        address = value
                    case "log":
                        sys.stderr.buffer.write(value)  # does not block: a LogWriter
                        sys.stderr.buffer.flush()
                    case "serves":
                        if spec.rank == 0:
                            self._serving[spec.replica] = address
                            self._write()
                        if not described.done():
                            described.set_result(pb.InfoResponse.FromString(value))
                    case "ended":
                        return int(value)
        except RayError as error:
            reason = str(error).partition("\n")[0]
            log.error("the actor of a shard is lost", replica=spec.replica, rank=spec.rank, reason=reason)
        return ExitCode.DEPENDENCY_LOST

    def _write(self) -> None:
        """Replace the list at once: a reader sees the old one or the new one."""
        new = os.memfd_create("members")
        os.write(new, yaml.safe_dump(sorted(self._serving.values())).encode())
        os.dup2(new, self._members_fd, inheritable=False)
        os.close(new)


async def _stop(actor: Handle, following: asyncio.Task[int], spec: ShardSpec, grace_period: GracePeriod) -> None:
    """Stop the shard of an actor, unless it has ended."""
    if not following.done():
        actor.stop.remote()
        with suppress(TimeoutError):
            async with grace_period(spec.stop_timeout + STOP_MARGIN, lambda: None):
                await asyncio.wait((following,))
    following.cancel()


Event = tuple[str, object]
"""A report of an actor: ("address", str), ("log", bytes), ("serves", bytes: an InfoResponse), ("ended", int: exit code)."""

Report = Callable[[Event], None]
"""Passes an event on; "ended" is the last one."""


class _LogEvents(BufferedIOBase):
    """Standard error of an actor: what the shard writes becomes events."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        written = bytes(data)
        self._report(("log", written))
        return len(written)


class ShardActor:
    """Starts one shard on its node. It runs in a process of Ray, and its event loop in a thread of its own."""

    def __init__(self) -> None:
        self._stop: Callable[[], object] | None = None

    async def run(self, spec: ShardSpec) -> AsyncIterator[Event]:
        """Run a shard until it ends; yield what is to be known of it."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def report(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        threading.Thread(target=self._run, args=(spec, report), daemon=True).start()
        kind = ""
        while kind != "ended":
            kind, _ = event = await events.get()
            yield event

    async def stop(self) -> None:
        """Stop the shard; `run` then ends."""
        if self._stop is not None:
            self._stop()

    def _run(self, spec: ShardSpec, report: Report) -> None:
        asyncio.set_event_loop_policy(None)  # Ray chose uvloop's, which cannot start a process group
        code = int(ExitCode.BUG)
        try:
            code = int(asyncio.run(self._start(spec, report)))
        except (ExceptionGroup, OSError) as error:
            reason = "".join(traceback.format_exception(error)).encode()
            lines = (label(line, spec.name, json_output=spec.config.json_output) for line in reason.split(b"\n"))
            report(("log", b"".join(lines)))
        finally:
            report(("ended", code))

    async def _start(self, spec: ShardSpec, report: Report) -> int:
        described: asyncio.Future[pb.InfoResponse] = asyncio.get_running_loop().create_future()

        def serves(done: asyncio.Future[pb.InfoResponse]) -> None:
            if not done.cancelled():
                report(("serves", done.result().SerializeToString()))

        described.add_done_callback(serves)
        host = ray.util.get_node_ip_address()
        log_writer = TextIOWrapper(_LogEvents(report), write_through=True)  # type: ignore[type-var]
        with _reserved_port(host) as port, open_lifeline() as lifeline_fd, redirect_stderr(log_writer):
            address = join_host_port(host, port)
            report(("address", address))
            here = _on_this_node(spec, address, lifeline_fd, os.environ)
            async with asyncio.TaskGroup() as tasks:
                shard = tasks.create_task(run_to_end(here, _limit, described=described))
                self._stop = partial(asyncio.get_running_loop().call_soon_threadsafe, shard.cancel)
                await asyncio.wait((shard,))
        return ExitCode.STOPPED if shard.cancelled() else shard.result()


_ACTOR: Handle = ray.remote(ShardActor)


@asynccontextmanager
async def _limit(seconds: float, _terminate: Callable[[], None]) -> AsyncIterator[None]:
    async with asyncio.timeout(seconds):
        yield


def _on_this_node(spec: ShardSpec, address: str, lifeline_fd: int, environ: Mapping[str, str]) -> ShardSpec:
    """Return the shard as it is to be started here: the last of two equal flags counts."""
    return dataclasses.replace(
        spec,
        argv=(sys.executable, *spec.argv[1:], "--address", address, "--lifeline-fd", str(lifeline_fd)),
        env={**spec.env, **{name: environ[name] for name in NODE_VARIABLES if name in environ}},
        inherited_fds=(lifeline_fd,),
        address=address,
    )


@contextmanager
def _reserved_port(host: str) -> Iterator[int]:
    """Yield a port that is reserved for processes that listen with SO_REUSEADDR, as gRPC does."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        port: int = holder.getsockname()[1]
        yield port
