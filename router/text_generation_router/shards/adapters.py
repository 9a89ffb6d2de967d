"""ReplicaAdapters: LoRA adapters that are loaded and unloaded while the server runs, on all replicas alike.

A load that fails on one replica is undone on the others. Replicas that join later, or again, get the adapters that were loaded,
and lose those that were unloaded, before they serve. An unloaded adapter takes no new requests at once; replicas drop it after its
last request, which may still move to replicas that join. A replica that is silent is not waited for: the load fails.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import grpc

from text_generation_common.log import log
from text_generation_proto.client import ShardClient
from text_generation_router.errors import InvalidRequest, NotFound, ServingError, Unhealthy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.join import ReplicaInfo

Error = tuple[grpc.StatusCode, str]
LOOK_S = 0.05
"""Seconds between two looks at the requests of adapters that are unloaded."""
_ERRORS: dict[grpc.StatusCode, type[ServingError]] = {
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNIMPLEMENTED: NotFound,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidRequest,
}


@dataclass(slots=True, eq=False)
class ReplicaAdapters:
    scheduler: Scheduler
    is_silent: Callable[[int], bool]
    """Returns True for a replica that does not answer."""
    _clients: dict[tuple[int, ...], ShardClient] = field(default_factory=dict)
    """The clients of the shards that have a session, by the scheduler's numbers of their ranks."""
    _paths: dict[str, str] = field(default_factory=dict)
    """Folders of the adapters that were loaded, by name; also of those that leave."""
    _unloaded: set[str] = field(default_factory=set)
    """Names that replicas may still have from their start."""
    _leaving: dict[str, None] = field(default_factory=dict)
    """Adapters that are unloaded after their last request."""
    _permitted: bool = False
    """Replicas load and unload adapters."""
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tasks: asyncio.TaskGroup = field(init=False)
    """The loads under way."""
    _look: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def names(self) -> Collection[str]:
        """The adapters that requests may name."""
        return [name for name in self.scheduler.capacity.adapters if name not in self._leaving]

    async def equip(self, ranks: tuple[int, ...], client: ShardClient, info: ReplicaInfo) -> ReplicaInfo:
        """Give a replica that joins the same adapters as the others, as far as it can; return its new description."""
        async with self._changing:
            self._permitted, had = info.info.loads_adapters, set(info.info.adapters)
            for each in info.info.loaded_adapters:  # another router had them loaded, or this one before its restart
                if each.name not in self._unloaded:
                    self._paths.setdefault(each.name, each.path)
                    self.scheduler.versions.setdefault(each.name, 1)
            changes: list[tuple[str, str | None]] = [(name, None) for name in had & self._unloaded]
            changes += [(name, path) for name, path in self._paths.items() if name not in had]
            for change in changes:
                if (error := await self._set(ranks, client, *change)) is not None:
                    log.warning("a replica has other LoRA adapters", replica=ranks[0], reason=error[1])
            if changes and not self.is_silent(ranks[0]):
                info = replace(info, info=await client.info())
            self._clients[ranks] = client
            return info

    def lost(self, ranks: tuple[int, ...]) -> None:
        """Forget the session of a replica."""
        self._clients.pop(ranks, None)

    async def change(self, name: str, path: str | None) -> None:
        """Load an adapter on all replicas, or on none; None: unload it after its last request. Raises ServingError."""
        if not self._permitted:
            raise NotFound(
                "This server loads and unloads no LoRA adapters: the operator has not set --lora-modules-dir"
            )
        if path is None:
            self._unload(name)
        # A change is made to its end, also if the client that asked leaves.
        elif (error := await asyncio.shield(self._tasks.create_task(self._load(name, path)))) is not None:
            raise error

    def _unload(self, name: str) -> None:
        if name not in self.names:
            raise NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        self._leaving[name] = None
        self._look.set()

    async def _load(self, name: str, path: str) -> ServingError | None:
        """Return the error of a load that failed."""
        await self._drop_unused()
        async with self._changing:
            if name in self._leaving:
                return InvalidRequest(f"The lora adapter '{name}' is being unloaded.", param="lora_name")
            if name in self.scheduler.capacity.adapters:
                return InvalidRequest(f"The lora adapter '{name}' has already been loaded.", param="lora_name")
            if errors := await self._on_all(name, path):
                self._unloaded.add(name)
                await self._on_all(name, None)
                code, reason = next((each for each in errors if each[0] in _ERRORS), errors[0])
                return _ERRORS.get(code, Unhealthy)(reason, param="lora_path")
            if not self._clients:
                self._unloaded.add(name)  # a shard that comes back may have loaded it
                return Unhealthy("no shard serves now")
            self._paths[name] = path
            self._unloaded.discard(name)
            self.scheduler.set_adapter(name, [number for ranks in self._clients for number in ranks])
        log.info("LoRA adapter loaded", adapter=name, path=path, replicas=len(self._clients))
        return None

    async def run(self) -> None:
        """Make the changes, until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            while True:
                await self._look.wait()
                await self._drop_unused()
                await asyncio.sleep(LOOK_S)
                if not self._leaving:
                    self._look.clear()

    async def _drop_unused(self) -> None:
        used = {each.request.adapter for each in self.scheduler.requests.values()}
        for name in [each for each in self._leaving if each not in used]:
            await self._drop(name)

    async def _drop(self, name: str) -> None:
        async with self._changing:
            if name not in self._leaving:
                return
            self._paths.pop(name, None)
            self._unloaded.add(name)
            self.scheduler.set_adapter(name, ())  # before it leaves the replicas: no replay begins without it
            for code, reason in await self._on_all(name, None):
                if code is not grpc.StatusCode.NOT_FOUND:  # not all replicas need have it
                    log.warning("a replica did not unload an adapter", adapter=name, reason=reason)
            del self._leaving[name]
        log.info("LoRA adapter unloaded", adapter=name)

    async def _on_all(self, name: str, path: str | None) -> list[Error]:
        """Load or unload an adapter on all replicas at once; return the errors."""
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(self._set(ranks, client, name, path)) for ranks, client in self._clients.items()]
        return [error for call in calls if (error := call.result()) is not None]

    async def _set(self, ranks: tuple[int, ...], client: ShardClient, name: str, path: str | None) -> Error | None:
        """Load or unload an adapter on a replica; return the error. The loss of the replica, and its silence, cancel the call."""
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(_set_adapter(client, name, path))
            while not (await asyncio.wait((call,), timeout=LOOK_S))[0]:
                if self.is_silent(ranks[0]):
                    call.cancel()
                    return grpc.StatusCode.UNAVAILABLE, "a replica does not answer"
        return None if call.cancelled() else call.result()


async def _set_adapter(client: ShardClient, name: str, path: str | None) -> Error | None:
    try:
        try:
            await client.set_adapter(name, path)
        except grpc.aio.AioRpcError as error:
            if path is None or error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise
            await client.set_adapter(name, None)  # it is left from a load that failed elsewhere
            await client.set_adapter(name, path)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    except grpc.aio.UsageError:
        return None  # the channel was closed: the replica is lost, and gets its adapters when it joins again
    return None
