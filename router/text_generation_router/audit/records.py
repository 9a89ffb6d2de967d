"""Records: findings as JSON files, each with the order that replays it on a shard."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from math import nan
from pathlib import Path
from tempfile import TemporaryFile

import orjson
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from text_generation_common.exit_codes import CannotServe
from text_generation_common.log import log
from text_generation_common.one_line import one_line
from text_generation_proto import convert
from text_generation_proto.client import ShardClient
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.audit.served import Served
from text_generation_router.audit.verdict import Bounds, Judgement, judge
from text_generation_router.scheduling.messages import Placement, SchedulerOutput
from text_generation_router.shards.convert import orders_to_pb

MAX_RECORDS = 100
"""Files that one process writes: a fault that makes every text different must not fill the disk."""


def record_of(
    served: Served, judgement: Judgement, scores: pb.TokenScores, info: pb.InfoResponse, suspect: str
) -> bytes:
    """Return a finding as JSON, with null or "NaN" for numbers that it does not have. It holds token ids, images, the text of a grammar."""
    replay = served.replay(len(served.request.prompt) + len(scores.logprobs) + 1)  # as far as it was replayed
    orders = SchedulerOutput(1, placements=(Placement(0, replay, (), ()),))
    (order,) = orders_to_pb(orders, info.eos_token_ids).placements
    record = {
        "request": served.request.id,
        "engine": {name: getattr(info, name) for name in ("engine", "version", "model_id", "dtype", "device")},
        "order": MessageToDict(order, preserving_proto_field_name=True),
        "served_logprobs": list(served.logprobs[: replay.replayed]),
        "replayed": MessageToDict(scores, preserving_proto_field_name=True),
        "verdict": asdict(judgement),
        "suspect": suspect,
        "replica": served.replica,
        "used": served.used,
    }
    return orjson.dumps(record, option=orjson.OPT_INDENT_2)


def make_folder(folder: str) -> None:
    """Make the folder of the records. Raises CannotServe if nothing can be written there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CannotServe(f"--audit-folder {folder}: {error.strerror or error}") from error


def write_record(folder: str, request_id: int, record: bytes) -> None:
    """Write a record, and log its path. It may take long."""
    # A router that starts again counts requests from 1.
    path = Path(folder, f"audit-{time.time_ns()}-{request_id}.json")
    try:
        path.touch(mode=0o600, exist_ok=False)  # it holds what clients wrote, as token ids
        path.write_bytes(record)
        log.info("audit record written", path=str(path))
    except OSError as error:
        log.warning("audit record cannot be written", reason=str(error))


def read_record(path: Path) -> tuple[pb.NewSequence, Sequence[float]]:
    """Return the order of a record, and the log-probabilities with which its text was served. Raises CannotServe."""
    try:
        if not path.is_file():  # reading a pipe would not end
            raise ValueError("it is not a file")
        match orjson.loads(path.read_bytes()):
            case {"order": dict(placed), "served_logprobs": list(served)}:
                order = ParseDict(placed, pb.NewSequence())
                logprobs = [nan if each is None else float(each) for each in served]
            case _:
                raise ValueError("it has no order, or no list served_logprobs")
        if not order.logprobs.generated or not 0 < order.generated_tokens == len(logprobs):
            raise ValueError("its order scores no generated tokens, or others than those of served_logprobs")
        return order, logprobs
    except (OSError, ValueError, TypeError, ParseError) as error:
        raise CannotServe(f"{path} is no record of an audit: {one_line(error)}") from error


async def replay_record(order: pb.NewSequence, logprobs: Sequence[float], client: ShardClient) -> Judgement:
    """Replay a record in one step on a shard that no router drives. Raises CannotServe, grpc.aio.AioRpcError."""
    info, tokens = await client.info(), len(order.prompt)
    too_long = f"the record is too long: {tokens} tokens and one more do not fit in"
    if tokens >= info.max_sequence_length:
        raise CannotServe(f"{too_long} a context of {info.max_sequence_length}")
    pool = await client.warm_up(max_batch_prefill_tokens=tokens)
    blocks = range(-(-(tokens + 1) // pool.block_size))
    if len(blocks) > pool.num_blocks:
        raise CannotServe(f"{too_long} a KV cache of {pool.num_blocks * pool.block_size}")
    order.blocks[:] = blocks
    groups = (pb.GroupBlocks(blocks=blocks[:1] if group.state else blocks) for group in pool.further_groups)
    order.further_blocks.extend(groups)
    call = client.run()
    await call.write(pb.Orders(number=1, placements=[order], prefill_slots=[order.slot], prefill_tokens=[tokens]))
    async for report in call:
        if report.failed:
            raise CannotServe(f"the replay failed: {report.failed[0].message}")
        if report.generated_scores:
            served, sampling = order.prompt[-order.generated_tokens :], convert.sampling_from_pb(order.sampling)
            bounds = Bounds.of(info, has_states=any(group.state for group in pool.further_groups))
            return judge(served, logprobs, report.generated_scores[0], sampling, bounds)
    raise CannotServe("the shard ended its stream")
