"""Asks the sandbox whether a grammar is harmless, and remembers what it said."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import structlog

from text_generation_proto.values import Grammar
from text_generation_router.errors import InvalidRequest, Unhealthy
from text_generation_router.grammar.refusals import not_compilable
from text_generation_router.sandbox.pool import (
    Sandbox,
    SandboxBroken,
    SandboxError,
    SandboxOutOfMemory,
    SandboxTimeout,
)

log = structlog.get_logger()

TIMEOUT_S = 1.5
"""Of one compile; a refusal must be there within three seconds."""
MEMORY_BYTES = 768 * 1024 * 1024
"""Of one worker; most of it is the tokenizer."""
MAX_WAITING = 64
REMEMBERED = 1024
"""Verdicts kept, each some hundred bytes."""
TIMEOUT_REMEMBERED_S = 30.0
"""A compile may have been slow because the machine was busy."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    error: str | None
    """TGI's words, without their prefix; None: the grammar is fine."""
    until: float = math.inf
    """On the event loop's clock."""


def grammar_sandbox(tokenizer: Path, *, workers: int = 2, timeout_s: float = TIMEOUT_S) -> Sandbox:
    """The sandbox of `GrammarCompiler`, to be started and closed by the caller; `tokenizer` is a tokenizer.json."""
    return Sandbox(
        "text_generation_router.grammar.job:compile_job",
        {"tokenizer": str(tokenizer)},
        workers=workers,
        timeout_s=timeout_s,
        memory_bytes=MEMORY_BYTES,
        max_waiting=MAX_WAITING,
        max_output=4096,
    )


class GrammarCompiler:
    """Proves grammars in a sandbox. Equal grammars are compiled once, also when they come at the same time."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Event] = {}

    async def prove(self, grammar: Grammar) -> None:
        """Return when the engine can follow this grammar. Raises InvalidRequest; Overloaded if too many wait."""
        key = hashlib.sha256(f"{grammar.kind.value}\0{grammar.text}".encode()).digest()
        while (verdict := self._remembered(key)) is None:
            if (other := self._under_way.get(key)) is not None:
                await other.wait()  # and look again: whoever asked may have been cancelled
                continue
            done = self._under_way[key] = asyncio.Event()
            try:
                self._remember(key, await self._ask(grammar))
            finally:
                del self._under_way[key]
                done.set()
        if verdict.error is not None:
            raise InvalidRequest(verdict.error)

    async def _ask(self, grammar: Grammar) -> _Verdict:
        payload = json.dumps({"kind": grammar.kind.value, "text": grammar.text}).encode()
        try:
            answer = await self._sandbox.call(payload)
        except SandboxTimeout:
            return self._for_a_while("it takes too long")
        except SandboxOutOfMemory:
            return self._for_a_while("it takes too much memory")
        except SandboxBroken as error:
            log.error("grammars cannot be judged", reason=str(error))
            raise Unhealthy("grammars cannot be compiled now") from error
        except SandboxError as error:
            log.warning("grammar could not be judged", reason=str(error))
            return self._for_a_while("it cannot be judged now")
        return _Verdict(answer.decode() or None)

    def _for_a_while(self, detail: str) -> _Verdict:
        error = str(not_compilable(detail)).removeprefix(InvalidRequest.prefix)
        return _Verdict(error, asyncio.get_running_loop().time() + TIMEOUT_REMEMBERED_S)

    def _remembered(self, key: bytes) -> _Verdict | None:
        verdict = self._verdicts.get(key)
        if verdict is None:
            return None
        if verdict.until < asyncio.get_running_loop().time():
            del self._verdicts[key]
            return None
        self._verdicts.move_to_end(key)
        return verdict

    def _remember(self, key: bytes, verdict: _Verdict) -> None:
        self._verdicts[key] = verdict
        if len(self._verdicts) > REMEMBERED:
            self._verdicts.popitem(last=False)
