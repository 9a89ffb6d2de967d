"""The host cache of a launcher: kill -9 of a shard loses nothing that was stored, and of the launcher leaves no memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from byte_tokenizer import write_tokenizer
from full_grid import full
from stack import Stack, running, still_running
from tiny_transformers import SHAPE, random_model, save
from transformers import LlamaConfig

pytestmark = pytest.mark.system

BLOCK = 16


async def ask(session: aiohttp.ClientSession, stack: Stack, text: str) -> tuple[str, int]:
    """Return the answer to a text, and its tokens that were not cached."""
    body = {"inputs": text, "parameters": {"max_new_tokens": 20, "ignore_eos_token": True}}
    async with session.post(f"{stack.url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        computed = int(response.headers["x-prompt-tokens"]) - int(response.headers["x-cached-tokens"])
        return str((await response.json())["generated_text"]), computed


def kill(stack: Stack, ranks: str) -> None:
    """Kill a shard, and wait until it serves again."""
    name = f"/shard-0{'-1' if ranks == '2' else ''}"
    lines = {" ".join(each.cmdline()): each for each in stack.children()}
    next(each for line, each in lines.items() if "text_generation_shard" in line and name in line).kill()
    stack.wait_for("shard joined again", "router")


@pytest.mark.parametrize("ranks", ["1", full("2")])
async def test_a_killed_shard_comes_back_to_a_warm_cache(
    session: aiohttp.ClientSession, tmp_path: Path, ranks: str
) -> None:
    shape = SHAPE | {"vocab_size": 264, "max_position_embeddings": 1024}
    model, other = (Path(save(random_model(LlamaConfig(**shape)), tmp_path / name)) for name in ("model", "other"))
    write_tokenizer(model)
    flags = ("--num-shard", ranks, "--device", "cpu", "--dtype", "float32", "--max-batch-total-tokens", "1024")
    text, new = "".join(map(chr, range(33, 127))) * 5, " and 20 characters more"
    with running(model, *flags, "--host-cache-size", "8MiB", engine="torch") as stack:
        answer, computed = await ask(session, stack, text)
        assert computed > len(text) - BLOCK
        again, _ = await ask(session, stack, text + new)
        kill(stack, ranks)
        after, computed = await ask(session, stack, text + new)
        assert (after, computed <= len(new) + BLOCK) == (again, True), computed
        assert (await ask(session, stack, text))[0] == answer
        (other / "model.safetensors").rename(model / "model.safetensors")
        kill(stack, ranks)
        _, computed = await ask(session, stack, text + new)
        assert computed > len(text) - BLOCK, "these are other weights"
        children = stack.children()
        stack.kill("launcher")
        assert not still_running(children, 10.0), "who maps the memory has ended"


async def metric(session: aiohttp.ClientSession, stack: Stack, name: str) -> float:
    async with session.get(f"{stack.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


@pytest.mark.full
async def test_sequences_of_a_shard_that_stops_move_without_being_computed_again(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    shape = SHAPE | {"vocab_size": 264, "max_position_embeddings": 2048}
    model = Path(save(random_model(LlamaConfig(**shape)), tmp_path / "model"))
    write_tokenizer(model)
    flags = ("--num-replicas", "2", "--device", "cpu", "--dtype", "float32", "--drain-timeout", "30")

    async def answer(stack: Stack, number: int) -> str:
        parameters = {"max_new_tokens": 600, "ignore_eos_token": True}
        body = {"inputs": f"{number} is a number and a text. " * 8, "parameters": parameters}
        async with session.post(f"{stack.url}/generate", json=body) as response:
            assert response.status == 200, await response.text()
            return str((await response.json())["generated_text"])

    async def stop_a_shard(stack: Stack) -> None:
        while await metric(session, stack, "tgi_batch_current_size") < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        stack.shard(0).terminate()
        stack.wait_for("shard stopped", "router")

    async def answers(stack: Stack, numbers: range, *, stopping: bool = False) -> list[str]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(stack, number)) for number in numbers]
            if stopping:
                await stop_a_shard(stack)
        return [task.result() for task in tasks]

    with running(model, *flags, "--host-cache-size", "32MiB", engine="torch") as stack:
        loaded = await metric(session, stack, "text_generation_host_cache_loaded_blocks_total")
        texts = await answers(stack, range(6), stopping=True)
        assert await metric(session, stack, "text_generation_host_cache_loaded_blocks_total") > loaded
        assert await metric(session, stack, "text_generation_request_moves_total") == 0, "none lost its shard"
        stack.wait_for("shard joined again", "router")
        assert await answers(stack, range(6)) == texts
