"""AdapterChanges: loads and unloads LoRA adapters beside the sequences of an engine, one after the other."""

import asyncio
from dataclasses import dataclass, field

from grpc import StatusCode

from text_generation_common.lora import AdapterSource
from text_generation_shard.adapters import LoraAdapter, module_folder, read_adapter
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, EngineError
from text_generation_shard.session import SessionOwner

ADVANCE_S = 0.02
"""Seconds between two step boundaries at which a change goes on."""


_ENDED = object()


@dataclass(slots=True)
class AdapterChanges:
    """The adapters that were loaded, and their changes."""

    config: ShardConfig
    owner: SessionOwner
    loaded: dict[str, str] = field(default_factory=dict)
    """The paths asked for, by name."""
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def change(self, engine: Engine, name: str, path: str | None) -> tuple[StatusCode, str] | None:
        """Load an adapter; without a path, unload it after its last sequence. Return the reason why it cannot be."""
        async with self._changing:
            names, limit = engine.info.adapters, self.config.lora_limit
            if not self.config.lora_modules_dir:
                return StatusCode.UNIMPLEMENTED, "the shard was started without --lora-modules-dir"
            if path is None and name not in names:
                return StatusCode.NOT_FOUND, "it is not loaded"
            if path is not None and name in names:
                return StatusCode.ALREADY_EXISTS, f"the LoRA adapter {name} is loaded"
            if path is not None and len(names) >= limit:
                return StatusCode.RESOURCE_EXHAUSTED, f"--max-cpu-loras allows {limit} LoRA adapters: unload one first"
            try:
                adapter = None if path is None else await asyncio.to_thread(self._read, engine.info.engine, name, path)
                change = engine.set_adapter(name, adapter)
                while await self.owner.at_boundary(next, change, _ENDED) is not _ENDED:  # noqa: ASYNC110 - a step is no event
                    await asyncio.sleep(ADVANCE_S)
            except FileNotFoundError as error:
                return StatusCode.NOT_FOUND, str(error)
            except EngineError as error:
                return StatusCode.INVALID_ARGUMENT, str(error)
            self.loaded.pop(name, None)
            if path is not None:
                self.loaded[name] = path
            return None

    def _read(self, engine: str, name: str, path: str) -> LoraAdapter:
        folder = module_folder(self.config, path)
        if engine == "echo":  # it has no model that an adapter could fit
            return LoraAdapter(name, folder, {})
        return read_adapter(AdapterSource(name, str(folder)), self.config)
