"""The processes of the router as units of restarts.

One process, or the scheduler process and the HTTP workers. Each is restarted alone, and the shards keep their weights. The
processes find each other again by themselves.
"""

import asyncio
import signal
from contextlib import suppress

from text_generation_common.descriptors import DescriptorReserve
from text_generation_launcher.child import run_to_end
from text_generation_launcher.plan import ChildSpec
from text_generation_launcher.restarts import Unit, UnitExit
from text_generation_launcher.shutdown import GracefulShutdown
from text_generation_proto.v1 import shard_pb2 as pb


class RouterUnit(Unit):
    def __init__(self, spec: ChildSpec, stop: GracefulShutdown, reserve: DescriptorReserve) -> None:
        super().__init__("router", {"child": spec.name}, stop, reserve)
        self._spec = spec

    async def run(self) -> UnitExit:
        serves: asyncio.Future[pb.InfoResponse] = asyncio.get_running_loop().create_future()
        serves.add_done_callback(lambda _: self.mark_serving())
        running = run_to_end(
            self._spec,
            self._stop.grace_period,
            described=serves,
            reserve=self._reserve,
            beside=self._forward_hangups,
        )
        return await self.run_process(running, self._spec.name)

    async def _forward_hangups(self, process: asyncio.subprocess.Process) -> None:
        """Pass SIGHUP on. One that arrives while the process starts is passed on when it serves and has a handler."""
        hangup = self._stop.reload
        await self.serving.wait()
        while True:
            await hangup.wait()
            hangup = self._stop.reload
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGHUP)
