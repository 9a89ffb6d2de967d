"""shard.proto with a self-scheduling engine, against a real shard process over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from shard_process import report, running, shard

from text_generation_proto.client import RunCall, ShardClient
from text_generation_proto.v1 import shard_pb2 as pb


def whole(number: int, slot: int, prompt: list[int], new: int) -> pb.Orders:
    """Admit one sequence, without blocks or prefill orders."""
    admission = pb.NewSequence(
        slot=slot,
        prompt=prompt,
        sampling=pb.Sampling(greedy=True),
        stopping=pb.Stopping(max_new_tokens=new),
    )
    return pb.Orders(number=number, placements=[admission])


async def until_finished(call: RunCall, slot: int) -> list[pb.StepReport]:
    """Read reports up to the one in which the slot finishes."""
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
    async with shard(f"unix://{tmp_path}/s", "--echo-step-ms=1", tokens_per_report=4) as (connected, _):
        yield connected


async def test_a_report_has_several_tokens_and_several_steps(client: ShardClient) -> None:
    assert (await client.info()).scheduling == pb.SCHEDULING_SELF
    pool = await client.warm_up(max_batch_total_tokens=64 * 16)
    assert (pool.num_blocks, pool.block_size) == (64, 16)
    async with running(client) as call:
        await call.write(whole(1, slot=3, prompt=[5, 6, 7], new=42))
        reports = await until_finished(call, 3)
    assert tokens_of(reports, 3) == [5, 6, 7] * 14
    assert [list(each.token_counts) for each in reports if each.slots] == [[4]] * 10 + [[2]]
    # One report when the orders were taken, one when the prompt was computed, then eleven reports with tokens; the other steps have no report.
    assert len(reports) == 13
    assert [each.step for each in reports if each.slots] == [*range(4, 42, 4), 42]
    assert [list(each.prefilled_tokens) for each in reports if each.prefilled_slots] == [[3]]
    assert all(each.step_ns > 0 for each in reports[1:])
    assert reports[0].step_ns == 0
    assert [each.used_blocks for each in reports[:2]] == [0, 3]


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
