"""Records: findings as JSON files, and the order that replays one on a shard."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import Any

import orjson
import structlog
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from text_generation_proto import convert
from text_generation_proto.client import ShardClient
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.audit.served import Served
from text_generation_router.audit.verdict import Judgement, Scores, bounds_of, judge
from text_generation_router.scheduling.messages import Placement, SchedulerOutput
from text_generation_router.shards.convert import orders_to_pb

MAX_RECORDS = 100
"""Files that one process writes: a fault that makes every text different must not fill the disk."""

log = structlog.get_logger()


class BadRecord(Exception):
    """The file is no record; the message is one line."""


def record_of(served: Served, judgement: Judgement, scores: Scores, info: pb.InfoResponse, suspect: str) -> bytes:
    """Return a finding as JSON. It holds token ids, images, and the text of a grammar."""
    request = served.replay(info.max_sequence_length)
    orders = SchedulerOutput(1, placements=(Placement(0, request, (), ()),))
    (order,) = orders_to_pb(orders, info.eos_token_ids).placements
    record = {
        "request": served.request.id,
        "engine": {name: getattr(info, name) for name in ("engine", "version", "model_id", "dtype", "device")},
        "order": MessageToDict(order, preserving_proto_field_name=True),
        "served_logprobs": _finite(served.logprobs),
        "replayed_logprobs": _finite(scores.logprobs),
        "drawn_ids": list(scores.drawn_ids),
        "drawn_logprobs": _finite(scores.drawn_logprobs),
        "verdict": asdict(judgement) | {"verdict": judgement.verdict.value},
        "suspect": suspect,
        "used": used(served),
    }
    return orjson.dumps(record, option=orjson.OPT_INDENT_2)


def used(served: Served) -> dict[str, Any]:
    """Return the numbers of what a request used, for a log line and a record."""
    names = ("replica", "cached_tokens", "preemptions", "moves", "chunks", "drafts", "rows")
    counts = {name: getattr(served, name) for name in names}
    return counts | {"adapter": served.request.adapter, "grammar": served.request.grammar is not None}


def read_record(path: Path) -> Mapping[str, Any]:
    """Read a record. Raises BadRecord."""
    try:
        record: dict[str, Any] = orjson.loads(path.read_bytes())
        record["order"] = ParseDict(record["order"], pb.NewSequence())
        record["served_logprobs"] = [nan if each is None else float(each) for each in record["served_logprobs"]]
    except (OSError, ValueError, KeyError, TypeError, ParseError) as error:
        raise BadRecord(f"{path} is no record of an audit: {error}") from error
    return record


async def replay_record(record: Mapping[str, Any], client: ShardClient) -> Judgement:
    """Replay a record in one step on a shard that no router drives. Raises BadRecord, grpc.aio.AioRpcError."""
    info = await client.info()
    if not info.scores_generated:
        raise BadRecord(f"the engine {info.engine} does not score generated tokens")
    order: pb.NewSequence = record["order"]
    tokens = len(order.prompt)
    pool = await client.warm_up(max_batch_prefill_tokens=tokens)
    needed = -(-(tokens + 1) // pool.block_size)
    if needed > min([pool.num_blocks, *(group.num_blocks for group in pool.further_groups if not group.state)]):
        raise BadRecord(f"its {tokens} tokens do not fit the KV cache of the shard")
    order.blocks[:] = range(needed)
    del order.further_blocks[:]
    order.further_blocks.extend(
        pb.GroupBlocks(blocks=range(1 if group.state else needed)) for group in pool.further_groups
    )
    call = client.run()
    await call.write(pb.Orders(number=1, placements=[order], prefill_slots=[order.slot], prefill_tokens=[tokens]))
    async for report in call:
        if report.failed:
            raise BadRecord(f"the replay failed: {report.failed[0].message}")
        if report.generated_scores:
            call.cancel()
            served, sampling = order.prompt[tokens - order.generated_tokens :], convert.sampling_from_pb(order.sampling)
            bounds = bounds_of(info.engine, info.dtype, info.kv_cache_dtype)
            return judge(served, record["served_logprobs"], scores_of(report.generated_scores[0]), sampling, bounds)
    raise BadRecord("the shard ended its stream")


def scores_of(message: pb.TokenScores) -> Scores:
    """Convert scores from protobuf."""
    return Scores(message.logprobs, message.drawn_ids, message.drawn_logprobs)


async def write_record(folder: str, request_id: int, record: bytes) -> None:
    """Write a record beside the event loop, and log its path."""
    path = Path(
        folder, f"audit-{time.time_ns()}-{request_id}.json"
    )  # a router that starts again counts requests from 1
    try:
        await asyncio.to_thread(_write, path, record)
        log.info("audit record written", path=str(path))
    except OSError as error:
        log.warning("audit record cannot be written", reason=str(error))


def _write(path: Path, record: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:  # it holds what clients wrote, as token ids
        file.write(record)


def _finite(numbers: Iterable[float]) -> list[float | None]:
    """Return numbers for JSON, None for what it does not have."""
    return [number if isfinite(number) else None for number in numbers]
