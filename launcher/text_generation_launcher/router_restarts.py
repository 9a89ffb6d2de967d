"""The processes of the router as units of restarts.

One process, or the scheduler process and the HTTP workers. Each is restarted alone, and the shards keep their weights. The
processes find each other again by themselves.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import structlog

from text_generation_launcher.child import ChildLost, run_to_end
from text_generation_launcher.plan import ChildSpec
from text_generation_launcher.restarts import RestartPolicy, Restarts, Unit, UnitExit
from text_generation_launcher.shutdown import GracefulShutdown
from text_generation_proto.descriptors import DescriptorReserve
from text_generation_proto.exit_codes import ExitCode
from text_generation_proto.v1 import shard_pb2 as pb

log = structlog.get_logger()


class RouterUnit(Unit):
    """One process of the router."""

    def __init__(
        self, spec: ChildSpec, stop: GracefulShutdown, reserve: DescriptorReserve, *, json_output: bool
    ) -> None:
        super().__init__("router", {"child": spec.name})
        self._spec = spec
        self._stop = stop
        self._reserve = reserve
        self._json_output = json_output

    async def run(self) -> UnitExit:
        """Run the process once."""
        serves: asyncio.Future[pb.InfoResponse] = asyncio.get_running_loop().create_future()
        serves.add_done_callback(lambda _: self.mark_serving())
        try:
            code = await run_to_end(
                self._spec,
                self._stop.grace_period,
                json_output=self._json_output,
                described=serves,
                reserve=self._reserve,
                beside=self._forward_hangups,
            )
        except OSError as error:  # no memory or file descriptors for another process, perhaps only now
            log.error("router cannot be started", **self.fields, reason=str(error))
            code = ExitCode.FAILED
        return UnitExit(self._spec.name, code)

    async def _forward_hangups(self, process: asyncio.subprocess.Process) -> None:
        """Pass SIGHUP on. One that arrives while the process starts is passed on when it serves and has a handler."""
        hangup = self._stop.reload
        await self.serving.wait()
        while True:
            await hangup.wait()
            hangup = self._stop.reload
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGHUP)


def supervise_router(
    specs: Sequence[ChildSpec],
    stop: GracefulShutdown,
    policy: RestartPolicy,
    answers: Callable[[], bool],
    reserve: DescriptorReserve,
    *,
    json_output: bool,
) -> Restarts:
    """Return what keeps equal processes of the router running. Its final error is ChildLost."""
    units = [RouterUnit(spec, stop, reserve, json_output=json_output) for spec in specs]

    def give_up(child: str) -> Exception:
        if policy.max_restarts:
            log.error("giving up: the router does not serve, and is not worth another restart", child=child)
        return ChildLost(child)

    # Any serving ends the streak: a start takes a second and no weights, and a request that kills the processes which run it
    # is given up after a few of them.
    return Restarts(units, replace(policy, stable_after=0.0), stop, answers, give_up)
