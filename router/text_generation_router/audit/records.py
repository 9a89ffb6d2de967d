"""Records: findings as JSON files, and the order that replays one on a shard."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from math import isfinite, nan
from pathlib import Path
from typing import Any

import orjson
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from text_generation_proto import convert
from text_generation_proto.client import ShardClient
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.audit.served import Served
from text_generation_router.audit.verdict import Judgement, Scores, bounds_of, judge
from text_generation_router.request import RequestId
from text_generation_router.scheduling.messages import Placement, SchedulerOutput
from text_generation_router.shards.convert import orders_to_pb

MAX_RECORDS = 100
"""Files that one process writes: a fault that makes every text different must not fill the disk."""
REPLAYED = RequestId(-1)


class BadRecord(Exception):
    """The file is no record; the message is one line."""


def record_of(served: Served, judgement: Judgement, scores: Scores, info: pb.InfoResponse, suspect: str) -> bytes:
    """Return a finding as JSON. It holds token ids, and the text of a grammar."""
    request = served.replay(REPLAYED, info.max_sequence_length)
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
    names = ("replica", "cached_tokens", "preemptions", "moves", "chunks", "rows")
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
    """Replay a record on a shard that no router drives. Raises BadRecord, grpc.aio.AioRpcError."""
    info = await client.info()
    if not info.scores_generated:
        raise BadRecord(f"the engine {info.engine} does not score generated tokens")
    pool = await client.warm_up()
    order: pb.NewSequence = record["order"]
    needed = -(-(len(order.prompt) + 1) // pool.block_size)
    if needed > pool.num_blocks:
        raise BadRecord(f"its {len(order.prompt)} tokens do not fit the KV cache of the shard")
    del order.blocks[:]
    order.blocks.extend(range(needed))
    call = client.run()
    orders = pb.Orders(number=1, placements=[order])
    left, at_once = len(order.prompt), info.suggested_prefill_tokens or len(order.prompt)
    while True:
        if left > 0:
            orders.prefill_slots.append(order.slot)
            orders.prefill_tokens.append(chunk := min(left, at_once))
            left -= chunk
            await call.write(orders)
            orders = pb.Orders(number=orders.number + 1)
        async for report in call:
            if report.failed:
                raise BadRecord(f"the replay failed: {report.failed[0].message}")
            if report.generated_scores:
                call.cancel()
                return _judged(record, order, report.generated_scores[0], info)
            if left > 0 and report.prefilled_slots:
                break
        else:
            raise BadRecord("the shard ended its stream")


def _judged(
    record: Mapping[str, Any], order: pb.NewSequence, scores: pb.TokenScores, info: pb.InfoResponse
) -> Judgement:
    tokens = order.prompt[len(order.prompt) - order.generated_tokens :]
    bounds, sampling = bounds_of(info.engine, info.dtype), convert.sampling_from_pb(order.sampling)
    return judge(tokens, record["served_logprobs"], scores_of(scores), sampling, bounds)


def scores_of(message: pb.TokenScores) -> Scores:
    """Convert scores from protobuf."""
    return Scores(message.logprobs, message.drawn_ids, message.drawn_logprobs)


class RecordWriter:
    """Writes findings to a folder, beside the event loop; none without a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder) if folder else None
        self._written = 0

    async def write(self, request_id: int, record: bytes) -> str:
        """Write a record. Return its path; "" if none is written. Raises OSError."""
        if self._folder is None or self._written >= MAX_RECORDS:
            return ""
        self._written += 1
        path = self._folder / f"audit-{request_id}.json"
        await asyncio.to_thread(_write, path, record)
        return str(path)


def _write(path: Path, record: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)  # it holds what clients wrote, as token ids
    path.write_bytes(record)


def _finite(numbers: Iterable[float]) -> list[float | None]:
    """Return numbers for JSON, None for what it does not have."""
    return [number if isfinite(number) else None for number in numbers]
