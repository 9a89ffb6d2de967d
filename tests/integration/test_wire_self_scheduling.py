"""shard.proto as an engine speaks it that schedules for itself, against a real shard process over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from shard_process import shard

from text_generation_proto.client import RunCall, ShardClient
from text_generation_proto.v1 import shard_pb2 as pb

FLAGS = ("--echo-self-scheduling", "--echo-tokens-per-report=4")


def whole(number: int, slot: int, prompt: list[int], new: int) -> pb.Orders:
    """Admit one sequence: a prompt and nothing more."""
    admission = pb.NewSequence(
        slot=slot,
        prompt=prompt,
        sampling=pb.Sampling(greedy=True),
        stopping=pb.Stopping(max_new_tokens=new),
    )
    return pb.Orders(number=number, admit=[admission])


@asynccontextmanager
async def running(client: ShardClient) -> AsyncIterator[RunCall]:
    call = client.run()
    try:
        yield call
    finally:
        call.cancel()


async def report(call: RunCall) -> pb.StepReport:
    async with asyncio.timeout(10):
        read = await call.read()
    assert isinstance(read, pb.StepReport)
    return read


async def until_finished(call: RunCall, slot: int) -> list[pb.StepReport]:
    """The reports up to that in which a slot finishes."""
    reports = [await report(call)]
    while slot not in [finish.slot for finish in reports[-1].finished]:
        reports.append(await report(call))
    return reports


def tokens_of(reports: list[pb.StepReport], slot: int) -> list[int]:
    tokens: list[int] = []
    for each in reports:
        at = 0
        for owner, count in zip(each.slots, each.token_counts, strict=True):
            tokens += each.token_ids[at : at + count] if owner == slot else []
            at += count
        assert at == len(each.token_ids) == len(each.logprobs)
    return tokens


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ShardClient]:
    async with shard(f"unix://{tmp_path}/s", *FLAGS) as (connected, _):
        yield connected


async def test_info_says_so_and_the_pool_is_told_to_plan_with(client: ShardClient) -> None:
    assert (await client.info()).scheduling == pb.SCHEDULING_SELF
    pool = await client.warm_up(max_batch_total_tokens=64 * 16)
    assert (pool.num_blocks, pool.block_size) == (64, 16)


async def test_tokens_come_several_a_report_and_a_report_tells_of_several_steps(client: ShardClient) -> None:
    await client.warm_up(max_batch_total_tokens=64 * 16)
    async with running(client) as call:
        await call.write(whole(1, slot=3, prompt=[5, 6, 7], new=42))
        reports = await until_finished(call, 3)
    assert tokens_of(reports, 3) == [5, 6, 7] * 14
    assert [list(each.token_counts) for each in reports if each.slots] == [[4]] * 10 + [[2]]
    # The orders taken, the prompt computed, eleven times tokens; the steps in between said nothing.
    assert len(reports) == 13
    assert [each.step for each in reports if each.slots] == [*range(4, 42, 4), 42]
    assert [list(each.prefilled_tokens) for each in reports if each.prefilled_slots] == [[3]]
    assert all(each.step_ns > 0 for each in reports[1:])
    assert reports[0].step_ns == 0
    assert [each.used_blocks for each in reports[:2]] == [0, 1]


async def test_a_sequence_is_released_while_it_runs_and_while_it_waits(client: ShardClient) -> None:
    await client.warm_up(max_batch_total_tokens=64 * 16, max_batch_size=1)
    async with running(client) as call:
        await call.write(whole(1, slot=0, prompt=[1], new=1000))
        await call.write(whole(2, slot=1, prompt=[2], new=1000))
        while not (step := await report(call)).slots or step.orders_applied < 2:
            pass
        assert (step.running, list(step.slots)) == (2, [0])
        await call.write(pb.Orders(number=3, release=[0, 1]))
        while (step := await report(call)).orders_applied < 3:
            pass
        assert (step.running, step.used_blocks) == (0, 0)
        await call.write(whole(4, slot=0, prompt=[9], new=2))
        assert tokens_of(await until_finished(call, 0), 0) == [9, 9]


async def test_what_only_step_engines_take_fails_its_sequence_alone(client: ShardClient) -> None:
    await client.warm_up(max_batch_total_tokens=64 * 16)
    async with running(client) as call:
        orders = whole(1, slot=0, prompt=[7, 8], new=3)
        orders.admit.extend([whole(0, slot, [1, 2], 3).admit[0] for slot in (1, 2, 3)])
        orders.admit[1].blocks.append(5)
        orders.grant_slots.append(2)
        orders.grant_counts.append(1)
        orders.grant_blocks.append(6)
        orders.prefill_slots.append(3)
        orders.prefill_tokens.append(2)
        await call.write(orders)
        reports = await until_finished(call, 0)
    failed = {failure.slot: (failure.code, failure.message) for each in reports for failure in each.failed}
    blocks, prefill = (
        f"the engine schedules for itself: it takes no {what}" for what in ("KV blocks", "prefill orders")
    )
    invalid = pb.FAILURE_CODE_INVALID
    assert failed == {1: (invalid, blocks), 2: (invalid, blocks), 3: (invalid, prefill)}
    assert tokens_of(reports, 0) == [7, 8, 7]
