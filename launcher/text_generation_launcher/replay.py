"""`text-generation-launcher replay RECORD [flags]`: compute a text again that an audit found to differ, on a fresh shard.

The shard is the one that the flags would start first, or with --parts router the first of --shards, which no router may drive.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import structlog

from text_generation_common.command_line import print_to_end
from text_generation_common.cpus import usable_cpus
from text_generation_common.exit_codes import CannotServe, ExitCode
from text_generation_common.lifeline import open_lifeline
from text_generation_launcher.child import run_to_end
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.launch import START_ERRORS, check_settings, devices_for_shards, socket_folder
from text_generation_launcher.model import resolve_model
from text_generation_launcher.plan import LaunchContext, ShardSpec, make_plan
from text_generation_launcher.shutdown import GracefulShutdown
from text_generation_proto.client import ShardClient
from text_generation_router.audit.records import BadRecord, read_record, replay_record
from text_generation_router.audit.verdict import Verdict
from text_generation_router.waiting import background

log = structlog.get_logger()


ERRORS = (*START_ERRORS, BadRecord, grpc.aio.AioRpcError, TimeoutError)


async def replay(path: str, config: LauncherConfig, environ: Mapping[str, str]) -> ExitCode:
    """Replay a record, print the result and return the exit code: FAILED unless it is the same text."""
    code = ExitCode.FAILED
    try:
        record = read_record(Path(path))
        async with AsyncExitStack() as stack:
            address, access = config.shards, config
            if not address:
                address, access = await _start_shard(config, environ, stack)
            client = await stack.enter_async_context(ShardClient.connect(address, access))
            await client.ready(config.shard_connect_timeout)
            judgement = await replay_record(record, client)
            text = judgement.verdict.value
            if judgement.verdict is Verdict.SAME:
                code = ExitCode.STOPPED
            elif judgement.verdict is Verdict.DIFFERENT:
                text += f": new token {judgement.position}: served {judgement.served}, drawn {judgement.drawn}, "
                text += f"log-probabilities differ by {judgement.difference:.6f}"
            print_to_end(f"{text}\n")
    except* ERRORS as group:
        error = group.exceptions[0]
        log.error("cannot replay", reason=error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error))
    return code


async def _start_shard(
    config: LauncherConfig, environ: Mapping[str, str], stack: AsyncExitStack
) -> tuple[str, LauncherConfig]:
    """Start the shards of the first replica until `stack` is left; return the address of the first, and its settings."""
    stop = GracefulShutdown()
    devices = await devices_for_shards(config, environ)
    checked = check_settings(config, environ, devices)
    lifeline_fd = stack.enter_context(open_lifeline())
    folder = stack.enter_context(socket_folder(environ))
    model_path = await resolve_model(checked, environ, stop, lifeline_fd)
    is_root = os.geteuid() == 0
    context = LaunchContext(devices, usable_cpus(), model_path, folder, lifeline_fd, environ, is_root=is_root)

    async def run(spec: ShardSpec) -> None:
        raise CannotServe(f"a shard ended with exit code {await run_to_end(spec, stop.grace_period)}")

    shards = make_plan(checked, context).groups[0]
    await stack.enter_async_context(background(*map(run, shards)))
    return shards[0].address, checked
