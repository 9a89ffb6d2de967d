"""An engine that breaks its contract ends its session and its shard with an error; no request waits forever."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from pathlib import Path

import grpc
import pytest
from full_grid import full
from shard_server import serve_engine

from text_generation_common.exit_codes import ExitCode
from text_generation_proto.client import ShardClient
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.echo import EchoEngine

CRASHING = """
    import sys
    from text_generation_shard.__main__ import main
    from text_generation_shard.engine import EngineError
    from text_generation_shard.engines.echo import EchoEngine

    working = EchoEngine.step

    def step(self):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 3:
            raise {error}("the device is gone")
        return working(self)

    EchoEngine.step = step
    main()
"""


@pytest.mark.parametrize(
    ("raised", "log_format"),
    [("RuntimeError", "--json-output"), ("EngineError", "--no-json-output"), full("RuntimeError", "--no-json-output")],
)
async def test_a_crash_ends_the_session_and_the_process(tmp_path: Path, raised: str, log_format: str) -> None:
    address = f"unix://{tmp_path}/s"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        textwrap.dedent(CRASHING).format(error=raised),
        "--engine=echo",
        f"--address={address}",
        log_format,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    async with ShardClient.connect(address) as client:
        await client.ready(30)
        await client.warm_up()
        call = client.run()
        admission = pb.NewSequence(
            prompt=[1], blocks=range(10), sampling=pb.Sampling(greedy=True), stopping=pb.Stopping(max_new_tokens=100)
        )
        await call.write(pb.Orders(number=1, placements=[admission], prefill_slots=[0], prefill_tokens=[1]))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async with asyncio.timeout(10):
                while await call.read() is not grpc.aio.EOF:
                    pass
        assert error.value.code() is grpc.StatusCode.INTERNAL
        assert "device" not in (error.value.details() or "")
    async with asyncio.timeout(10):
        logged = (await process.stderr.read()).decode()
        assert await process.wait() == ExitCode.BUG
    [record] = [line for line in logged.splitlines() if "the engine failed" in line]
    assert "the device is gone" in record
    # An error that the engine explains in one line needs no traceback.
    assert ("session.py" in record) == (raised == "RuntimeError")
    assert not (tmp_path / "s").exists()


async def test_a_fault_of_a_gpu_ends_the_session_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """The results of that step cannot be trusted."""
    config = ShardConfig.of(engine="echo", echo_step_ms=10_000)
    async with serve_engine(EchoEngine.build(config), f"unix://{tmp_path}/s") as shard:
        await shard.client.warm_up()
        call = shard.client.run()
        admission = pb.NewSequence(
            prompt=[1], blocks=range(10), sampling=pb.Sampling(greedy=True), stopping=pb.Stopping(max_new_tokens=100)
        )
        await shard.client.opened(call)
        await call.write(pb.Orders(number=1, placements=[admission], prefill_slots=[0], prefill_tokens=[1]))
        await call.read()  # the orders were applied: the step begins
        shard.fail("Xid 79")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async with asyncio.timeout(5):
                await call.read()
        assert (error.value.code(), error.value.details()) == (grpc.StatusCode.INTERNAL, "the engine failed")
