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
from text_generation_router.audit.records import read_record, replay_record
from text_generation_router.audit.verdict import Judgement, Verdict


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
        with socket_folder(environ) as folder:
            folder.mkdir(mode=0o700)
            own = config.model_copy(update=alone | {"shard_uds_path": f"{folder}/replay"})
            rank = "-0" if own.sharded or (own.num_shard or 1) > 1 else ""
            await first_of(launch(own, environ), judge(f"unix://{folder}/replay-0{rank}"))
    except* (CannotServe, grpc.aio.AioRpcError, TimeoutError) as group:
        error = first_error(group)
        told = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        log.error("cannot replay", reason=told or type(error).__name__)
    return ExitCode.STOPPED if judgement.verdict is Verdict.SAME else ExitCode.FAILED
