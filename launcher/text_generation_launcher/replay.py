"""`text-generation-launcher replay RECORD [flags]`: compute a text again that an audit found to differ, on shards of its own."""

import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import grpc
import orjson

from text_generation_common.command_line import print_to_end
from text_generation_common.exit_codes import CannotServe, ExitCode, first_error
from text_generation_common.log import log
from text_generation_common.waiting import first_of
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.launch import launch, socket_folder
from text_generation_proto.client import ShardClient
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import GrammarKind
from text_generation_router.audit.records import read_record, replay_record
from text_generation_router.audit.verdict import Judgement, Verdict
from text_generation_shard.convert import InvalidOrders, orders_from_pb
from text_generation_shard.engine import EngineInfo, Scheduling
from text_generation_shard.sequence_checks import sequence_problem

ANY = 1 << 32
"""A size of an engine that no order exceeds."""


async def replay(path: str, config: LauncherConfig, environ: Mapping[str, str]) -> ExitCode:
    """Print the verdict about a record; return FAILED unless its text is the same."""
    judgement = Judgement(Verdict.FAILED)
    alone = {"parts": "shards", "num_replicas": 1, "max_shard_restarts": 0, "shard_tcp_port": 0}
    alone |= {"places": "local", "shard_token": config.shard_token or secrets.token_hex(32)}

    async def judge(address: str) -> None:
        nonlocal judgement
        async with ShardClient.connect(address, own) as client:
            await client.ready(config.shard_connect_timeout)
            judgement = await replay_record(*record, client)
        print_to_end(f"{orjson.dumps(asdict(judgement)).decode()}\n")

    try:
        record = read_record(Path(path))
        if problem := order_problem(record[0]):
            raise CannotServe(f"{path} has an order that no shard takes: {problem}")
        with socket_folder(environ) as folder:
            folder.mkdir(mode=0o700)
            own = config.model_copy(update=alone | {"shard_uds_path": f"{folder}/replay"})
            rank = "-0" if own.sharded or (own.num_shard or 1) > 1 else ""
            await first_of(launch(own, environ), judge(f"unix://{folder}/replay-0{rank}"))
    except* (CannotServe, grpc.aio.AioRpcError, TimeoutError) as group:
        error = first_error(group)
        log.error("cannot replay", reason=str(error) or type(error).__name__)
    return ExitCode.STOPPED if judgement.verdict is Verdict.SAME else ExitCode.FAILED


def order_problem(order: pb.NewSequence) -> str | None:
    """Return why an order is refused whatever the model is; None if a shard may take it."""
    try:
        (sequence,) = orders_from_pb(pb.Orders(placements=[order])).placements
    except InvalidOrders as error:
        return str(error)
    takes_any = EngineInfo(
        engine="",
        model_id="",
        model_type="",
        dtype="",
        device="",
        scheduling=Scheduling.STEP,
        vocab_size=ANY,
        max_sequence_length=ANY,
        max_slots=ANY,
        block_size=ANY,
        eos_token_ids=(),
        suggested_prefill_tokens=ANY,
        max_top_n_tokens=ANY,
        grammar_kinds=tuple(GrammarKind),
        adapters=(order.adapter,),
        scores_generated=True,
        max_images=ANY,
    )
    return sequence_problem(sequence, takes_any)
