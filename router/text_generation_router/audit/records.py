"""Records: findings as JSON files, each with the order that replays it on a shard."""

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from google.protobuf.json_format import MessageToDict

from text_generation_common.log import log
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.audit.served import Served
from text_generation_router.audit.verdict import Judgement, Scores
from text_generation_router.scheduling.messages import Placement, SchedulerOutput
from text_generation_router.shards.convert import orders_to_pb

MAX_RECORDS = 100
"""Files that one process writes: a fault that makes every text different must not fill the disk."""


def record_of(served: Served, judgement: Judgement, scores: Scores, info: pb.InfoResponse, suspect: str) -> bytes:
    """Return a finding as JSON, null for numbers that it does not have. It holds token ids, images, the text of a grammar."""
    request = served.replay(info.max_sequence_length)
    orders = SchedulerOutput(1, placements=(Placement(0, request, (), ()),))
    (order,) = orders_to_pb(orders, info.eos_token_ids).placements
    record = {
        "request": served.request.id,
        "engine": {name: getattr(info, name) for name in ("engine", "version", "model_id", "dtype", "device")},
        "order": MessageToDict(order, preserving_proto_field_name=True),
        "served_logprobs": list(served.logprobs),
        "replayed_logprobs": list(scores.logprobs),
        "drawn_ids": list(scores.drawn_ids),
        "drawn_logprobs": list(scores.drawn_logprobs),
        "verdict": asdict(judgement),
        "suspect": suspect,
        "used": used(served),
    }
    return orjson.dumps(record, option=orjson.OPT_INDENT_2)


def used(served: Served) -> dict[str, Any]:
    """Return the numbers of what a request used, for a log line and a record."""
    names = ("replica", "cached_tokens", "preemptions", "moves", "chunks", "drafts", "rows")
    counts = {name: getattr(served, name) for name in names}
    return counts | {"adapter": served.request.adapter, "grammar": served.request.grammar is not None}


async def write_record(folder: str, request_id: int, record: bytes) -> None:
    """Write a record beside the event loop, and log its path."""
    # A router that starts again counts requests from 1.
    path = Path(folder, f"audit-{time.time_ns()}-{request_id}.json")

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=False)  # it holds what clients wrote, as token ids
        path.write_bytes(record)

    try:
        await asyncio.to_thread(write)
        log.info("audit record written", path=str(path))
    except OSError as error:
        log.warning("audit record cannot be written", reason=str(error))
