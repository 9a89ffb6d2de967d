"""AdapterChanges: loads and unloads LoRA adapters beside the sequences of an engine, one after the other."""

from __future__ import annotations

import asyncio

from grpc import StatusCode

from text_generation_common.lora import AdapterSource, is_adapter_name
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_shard.adapters import LoraAdapter, module_folder, read_adapter
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, EngineError
from text_generation_shard.session import SessionOwner

ADVANCE_S = 0.02
"""Seconds between two step boundaries at which a change goes on."""


_ENDED = object()


class Refused(Exception):
    """An adapter cannot be loaded or unloaded."""

    def __init__(self, code: StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class AdapterChanges:
    """The adapters that were loaded, and their changes."""

    def __init__(self, config: ShardConfig, owner: SessionOwner) -> None:
        self.loaded: dict[str, str] = {}
        """The paths asked for, by name."""
        self.permitted = bool(config.lora_modules_dir)
        self._config = config
        self._owner = owner
        self._changing = asyncio.Lock()

    async def load(self, engine: Engine, request: pb.LoadAdapterRequest) -> None:
        """Load an adapter. Raises Refused."""
        async with self._changing:
            self._check_permission()
            name, limit = request.name, self._config.lora_limit
            if not is_adapter_name(name):
                raise Refused(StatusCode.INVALID_ARGUMENT, "`lora_name` is not the name of an adapter")
            if name in engine.info.adapters:
                raise Refused(StatusCode.ALREADY_EXISTS, f"the LoRA adapter {name} is loaded")
            if len(engine.info.adapters) >= limit:
                reason = f"{limit} LoRA adapters are loaded, as many as --max-cpu-loras allows: unload one first"
                raise Refused(StatusCode.RESOURCE_EXHAUSTED, reason)
            try:
                adapter = await asyncio.to_thread(self._read, engine.info.engine, name, request.path)
            except FileNotFoundError as error:
                raise Refused(StatusCode.NOT_FOUND, str(error)) from None
            except EngineError as error:
                raise Refused(StatusCode.INVALID_ARGUMENT, str(error)) from None
            await self._advance(engine, name, adapter)
            self.loaded[name] = request.path

    async def unload(self, engine: Engine, name: str) -> None:
        """Unload an adapter after its last sequence. Raises Refused."""
        async with self._changing:
            self._check_permission()
            if name not in engine.info.adapters:
                raise Refused(StatusCode.NOT_FOUND, "it is not loaded")
            await self._advance(engine, name, None)
            self.loaded.pop(name, None)

    def _check_permission(self) -> None:
        if not self.permitted:
            reason = "the server loads and unloads no LoRA adapters while it runs: start it with --lora-modules-dir"
            raise Refused(StatusCode.UNIMPLEMENTED, reason)

    def _read(self, engine: str, name: str, path: str) -> LoraAdapter:
        folder = module_folder(self._config, path)
        # The echo engine has no model that an adapter could fit.
        return (
            LoraAdapter(name, folder, {})
            if engine == "echo"
            else read_adapter(AdapterSource(name, str(folder)), self._config)
        )

    async def _advance(self, engine: Engine, name: str, adapter: LoraAdapter | None) -> None:
        try:
            change = engine.set_adapter(name, adapter)
            while await self._owner.at_boundary(next, change, _ENDED) is not _ENDED:  # noqa: ASYNC110 - a step is no event
                await asyncio.sleep(ADVANCE_S)
        except EngineError as error:
            raise Refused(StatusCode.INVALID_ARGUMENT, str(error)) from None
