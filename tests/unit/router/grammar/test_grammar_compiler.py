"""Proofs in child processes: results, refusals in time, and one compile for equal grammars."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandbox_state import pids, waiting_calls

from text_generation_proto.values import Grammar, GrammarKind
from text_generation_router.errors import CannotKeepUp, InvalidRequest, Unhealthy
from text_generation_router.grammar import compiler as compiler_module
from text_generation_router.grammar.compiler import GrammarCompiler, grammar_sandbox
from text_generation_router.grammar.forms import regex_grammar, schema_grammar
from text_generation_router.grammar.schema import read_schema
from text_generation_router.sandbox import pool
from text_generation_router.sandbox.pool import Sandbox

GOOD = regex_grammar("[a-z]+")
UNREAD = Grammar(GrammarKind.JSON_SCHEMA, "{")
"""A text that no form produces: the job raises an error."""


@pytest.fixture
async def sandbox(demo_model: Path) -> AsyncIterator[Sandbox]:
    async with grammar_sandbox(demo_model / "tokenizer.json", workers=1) as started:
        await started.ready()
        yield started


async def test_good_grammars_pass_and_bad_ones_are_refused_with_tgis_text_again_and_again(sandbox: Sandbox) -> None:
    compiler = GrammarCompiler(sandbox)
    await compiler.prove(GOOD)
    recursive = schema_grammar(read_schema({"properties": {"a": {"$ref": "#"}}}))
    for _ in range(2):
        with pytest.raises(InvalidRequest) as refusal:
            await compiler.prove(recursive)
        assert str(refusal.value) == (
            "Input validation error: cannot compile regex from schema: recursive references are not supported"
        )


async def test_verdicts_are_cached_and_a_closed_sandbox_gives_none(sandbox: Sandbox) -> None:
    compiler = GrammarCompiler(sandbox)
    await compiler.prove(GOOD)
    await sandbox.close()
    await compiler.prove(GOOD)
    with pytest.raises(Unhealthy, match="grammars cannot be compiled now"):
        await compiler.prove(regex_grammar("other"))


async def test_translated_grammars_are_cached_up_to_a_size_of_all(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Grammar(GrammarKind.EBNF, f'root ::= "{letter}"\n' + 'x ::= "a"\n' * 3000) for letter in "ab")
    compiler = GrammarCompiler(sandbox)
    large = await compiler.prove(first)
    assert (large.kind, await compiler.prove(first)) == (GrammarKind.LARK, large)
    monkeypatch.setattr(compiler_module, "MAX_CACHED_TEXT", len(large.text) + 1)
    await compiler.prove(second)
    await sandbox.close()
    await compiler.prove(second)
    with pytest.raises(Unhealthy):
        await compiler.prove(first)


async def test_equal_grammars_are_compiled_once(sandbox: Sandbox) -> None:
    compiler = GrammarCompiler(sandbox)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(500):
            tasks.create_task(compiler.prove(GOOD))
        await asyncio.sleep(0)
        assert waiting_calls(sandbox) == 0


async def test_the_first_of_equal_requests_may_be_cancelled(sandbox: Sandbox) -> None:
    compiler = GrammarCompiler(sandbox)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(compiler.prove(GOOD))
        second = tasks.create_task(compiler.prove(GOOD))
        await asyncio.sleep(0)
        first.cancel()
    assert first.cancelled()
    assert second.exception() is None


async def test_a_refusal_because_of_an_error_expires(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "TIMEOUT_CACHED_S", 0.05)
    compiler = GrammarCompiler(sandbox)
    with pytest.raises(InvalidRequest, match="it cannot be judged now"):
        await compiler.prove(UNREAD)
    await sandbox.close()
    async with asyncio.timeout(60):
        while True:
            try:
                await compiler.prove(UNREAD)
            except InvalidRequest:
                await asyncio.sleep(0.01)
            except Unhealthy:
                break


async def test_a_compile_that_takes_too_long_is_refused(demo_model: Path) -> None:
    properties = {f"p{i}": {"type": "string", "pattern": f"^[a-z]*{i}[^{i % 9}]+$"} for i in range(2600)}
    async with grammar_sandbox(demo_model / "tokenizer.json", workers=1, timeout_s=0.1) as sandbox:
        await sandbox.ready()
        with pytest.raises(InvalidRequest) as refusal:
            await GrammarCompiler(sandbox).prove(schema_grammar(read_schema({"properties": properties})))
    assert str(refusal.value) == "Input validation error: cannot compile regex from schema: it takes too long"


async def test_a_worker_without_cpu_time_is_no_verdict(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(sandbox)
    [pid] = pids(sandbox)
    os.kill(pid, signal.SIGSTOP)
    with monkeypatch.context() as patch, pytest.raises(CannotKeepUp):
        patch.setattr(pool, "WALL_TIMES", 0)
        patch.setattr(pool, "MIN_WALL_S", 0.1)
        await compiler.prove(GOOD)
    await compiler.prove(GOOD)
