"""Asks the sandbox whether an engine can follow a grammar, and caches the answers."""

import asyncio
import hashlib
import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import orjson

from text_generation_common.grammar_options import MAX_GRAMMAR_TEXT
from text_generation_common.log import log
from text_generation_proto.values import Grammar, GrammarKind
from text_generation_router.admission_queue import PendingWork
from text_generation_router.errors import InvalidRequest, Unhealthy
from text_generation_router.grammar.schema import not_compilable
from text_generation_router.request import DEFAULT_TENANT, TenantId
from text_generation_router.sandbox import pool

TIMEOUT_S = 1.5
"""CPU time of one compile; a refusal must come within three seconds."""
MEMORY_BYTES = 768 * 1024 * 1024
"""Memory of one worker, most of it for the tokenizer."""
MAX_CACHED = 1024
"""Verdicts in the cache, about a hundred bytes each, without translated grammars."""
MAX_CACHED_TEXT = 4 << 20
"""Characters of all translated grammars in the cache."""
TIMEOUT_CACHED_S = 30.0
"""Life of the verdict of a compile that was too slow or too large."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    error: str | None
    """TGI's text without its prefix; None if the grammar is accepted."""
    translated: str = ""
    """The Lark rules that the engine gets in place of the grammar; empty if it gets the grammar itself."""
    until: float = math.inf
    """Time on the event loop's clock."""


def grammar_sandbox(
    tokenizer: Path, *, workers: int = 2, timeout_s: float = TIMEOUT_S, stage: PendingWork | None = None
) -> pool.Sandbox:
    """Return the sandbox of `GrammarCompiler`, which the caller starts and closes; `tokenizer` is a tokenizer.json."""
    return pool.Sandbox(
        "text_generation_router.grammar.proof:compile_job",
        {"tokenizer": str(tokenizer)},
        workers=workers,
        timeout_s=timeout_s,
        memory_bytes=MEMORY_BYTES,
        max_output=8 * MAX_GRAMMAR_TEXT,
        stage=stage,
    )


class GrammarCompiler:
    """Proves grammars in a sandbox. Equal grammars are compiled once, also if they arrive at the same time."""

    def __init__(self, sandbox: pool.Sandbox) -> None:
        self._sandbox = sandbox
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._cached_text = 0
        self._running: dict[tuple[TenantId, bytes], asyncio.Event] = {}
        """By tenant: the turn of one must not wait in the line of another."""

    async def prove(self, grammar: Grammar, tenant: TenantId = DEFAULT_TENANT) -> Grammar:
        """Return the grammar, translated if its kind is, if the engine can follow it.

        Raises InvalidRequest; Overloaded, CannotKeepUp, Unhealthy.
        """
        key = hashlib.sha256(f"{grammar.kind.value}\0{grammar.text}".encode()).digest()
        while (verdict := self._cached(key)) is None:
            if (other := self._running.get((tenant, key))) is not None:
                await other.wait()  # then look again: that request may have been cancelled
                continue
            done = self._running[tenant, key] = asyncio.Event()
            try:
                verdict = await self._ask(grammar, tenant)
                self._cache(key, verdict)
                break
            finally:
                del self._running[tenant, key]
                done.set()
        if verdict.error is not None:
            raise InvalidRequest(verdict.error)
        return Grammar(GrammarKind.LARK, verdict.translated) if verdict.translated else grammar

    async def _ask(self, grammar: Grammar, tenant: TenantId) -> _Verdict:
        payload = json.dumps({"kind": grammar.kind.value, "text": grammar.text}).encode()
        try:
            answer = await self._sandbox.call(payload, tenant)
        except pool.SandboxTimeout:
            return self._refuse_for_now("it takes too long")
        except pool.SandboxOutOfMemory:
            return self._refuse_for_now("it takes too much memory")
        except pool.SandboxStackOverflow:
            return self._refuse_for_now("its rules are nested too deeply")
        except pool.SandboxBroken as error:
            log.error("grammars cannot be compiled", reason=str(error))
            raise Unhealthy("grammars cannot be compiled now") from error
        except pool.SandboxError as error:
            log.warning("a grammar could not be compiled", reason=str(error))
            return self._refuse_for_now("it cannot be judged now")
        result = orjson.loads(answer)
        return _Verdict(result.get("error"), result.get("lark", ""))

    def _refuse_for_now(self, detail: str) -> _Verdict:
        error = str(not_compilable(detail)).removeprefix(InvalidRequest.prefix)
        return _Verdict(error, until=asyncio.get_running_loop().time() + TIMEOUT_CACHED_S)

    def _cached(self, key: bytes) -> _Verdict | None:
        verdict = self._verdicts.get(key)
        if verdict is None:
            return None
        if verdict.until < asyncio.get_running_loop().time():
            del self._verdicts[key]  # a refusal: it has no text
            return None
        self._verdicts.move_to_end(key)
        return verdict

    def _cache(self, key: bytes, verdict: _Verdict) -> None:
        if (before := self._verdicts.pop(key, None)) is not None:  # another tenant asked at the same time
            self._cached_text -= len(before.translated)
        self._verdicts[key] = verdict
        self._cached_text += len(verdict.translated)
        while len(self._verdicts) > MAX_CACHED or self._cached_text > MAX_CACHED_TEXT:
            _, oldest = self._verdicts.popitem(last=False)
            self._cached_text -= len(oldest.translated)
