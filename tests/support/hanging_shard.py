"""A shard that stops to answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_shard.servicer import ShardServicer


class Hanging(ShardServicer):
    """A shard that answers nothing any more once an adapter is loaded, until it goes on."""

    goes_on = asyncio.Event()

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Any) -> pb.LoadAdapterResponse:  # noqa: ANN401
        self.goes_on.clear()
        await self.goes_on.wait()
        return await super().LoadAdapter(request, context)


@asynccontextmanager
async def between(path: Path, target: str) -> AsyncIterator[str]:
    """A socket whose connections lead to the one at `target`, and are silent while `Hanging` does not go on."""

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await Hanging.goes_on.wait()
            sink.write(data)
        sink.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_unix_connection(target.removeprefix("unix://"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(copy(reader, ours))
            tasks.create_task(copy(theirs, writer))

    server = await asyncio.start_unix_server(connect, path)
    try:
        yield f"unix://{path}"
    finally:
        server.close()
