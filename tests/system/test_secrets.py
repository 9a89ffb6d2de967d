"""Secrets between the launcher and its children: the token of the shards, keys, cloud credentials, TLS."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import grpc
import psutil
import pytest
from certificates import tls_arguments, write_certificates
from ports import free_port
from stack import generate, running

from text_generation_proto.client import ShardClient

SECRETS = {"HF_TOKEN": "hf-secret", "AWS_SECRET_ACCESS_KEY": "aws-secret", "DB_PASSWORD": "db-secret"}


def readable(process: psutil.Process) -> str:
    """Return what every process of the same user can read: command line and environment."""
    files = (Path(f"/proc/{process.pid}/{name}") for name in ("cmdline", "environ"))
    return b"\0".join(file.read_bytes() for file in files).decode(errors="replace")


async def test_no_process_shows_a_secret_and_shards_serve_only_holders_of_token_and_certificate(
    echo_model: Path, tmp_path: Path
) -> None:
    port = free_port()
    access = write_certificates(tmp_path / "tls", token="token-of-this-test")
    environ = {
        **SECRETS,
        "OTEL_EXPORTER_OTLP_HEADERS": "key=otlp-secret",
        "API_KEY": "key-of-this-test",
        "SHARD_TOKEN": access.shard_token,
        "NCCL_DEBUG": "WARN",
    }
    flags = (f"--shard-tcp-port={port}", *tls_arguments(access))
    with running(echo_model, *flags, environ=environ) as stack:
        headers = {"authorization": "Bearer key-of-this-test"}
        async with aiohttp.ClientSession(headers=headers) as session:
            assert await generate(session, stack.url)
        processes = [psutil.Process(stack.launcher.pid), *stack.children()]
        for process in processes:
            shown = readable(process)
            for secret in (*SECRETS.values(), "otlp-secret", "key-of-this-test", "token-of-this-test"):
                assert secret not in shown, process.cmdline()
        assert sum("NCCL_DEBUG" in readable(process) for process in processes) >= 3
        for token, code in (
            ("", grpc.StatusCode.UNAUTHENTICATED),
            (access.shard_token, grpc.StatusCode.FAILED_PRECONDITION),
        ):
            async with ShardClient.connect(
                f"127.0.0.1:{port}", access.model_copy(update={"shard_token": token})
            ) as thief:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await thief.warm_up(max_batch_size=1, timeout=20)  # other limits than those of the session
                assert error.value.code() is code
        # A restarted shard is served with the same token and certificates.
        stack_shard = next(child for child in stack.children() if "text_generation_shard" in child.cmdline())
        stack_shard.kill()
        await asyncio.to_thread(stack.wait_for, "shard joined again", "router")
