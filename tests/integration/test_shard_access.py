"""A shard serves only calls that carry its token, and takes no memory for others."""

from __future__ import annotations

import asyncio
import shutil
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
import pytest
from certificates import tls_arguments, write_certificates
from grpc_health.v1 import health_pb2_grpc
from ports import free_port
from shard_process import running, shard
from shard_session import open_session

from text_generation_common.shard_access import ShardAccess
from text_generation_proto import client as client_module
from text_generation_proto.access import token_metadata
from text_generation_proto.addresses import split_host_port
from text_generation_proto.channel import CLIENT_OPTIONS, MAX_MESSAGE_BYTES, read_certificates
from text_generation_proto.client import ShardClient
from text_generation_proto.parts import Joiner, most_orders, split
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.v1 import shard_pb2_grpc
from text_generation_shard.guard import MAX_STREAMS, create_server, server_credentials
from text_generation_shard.health import ShardHealth

ACCESS = ShardAccess.of(shard_token="open-sesame")
METHODS = (
    *(f"/text_generation.v1.Shard/{name}" for name in ("Info", "WarmUp", "Run")),
    *(f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch")),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/no.such/Method",
)


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


async def code(channel: grpc.aio.Channel, method: str, request: bytes, token: str | None) -> grpc.StatusCode:
    """Call a method with bytes as the request; return the status after the first reply."""
    metadata = () if token is None else (("x-shard-token", token),)
    call = channel.unary_stream(method)(request, metadata=metadata, timeout=20)
    try:
        if await call.read() is not grpc.aio.EOF:
            call.cancel()
            return grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        return error.code()
    return await call.code()


@pytest.mark.parametrize(
    "tcp", [pytest.param(True, id="tcp"), pytest.param(False, id="unix socket", marks=pytest.mark.full)]
)
async def test_no_service_answers_without_the_token(tmp_path: Path, *, tcp: bool) -> None:
    address = free_address() if tcp else f"unix://{tmp_path}/s"
    async with (
        shard(address, "--reflection", access=ACCESS) as (client, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        for token in (None, "", "open-sesam", "open-sesame!"):
            got = {method: await code(channel, method, b"", token) for method in METHODS}
            assert got == dict.fromkeys(METHODS, grpc.StatusCode.UNAUTHENTICATED)
        await client.warm_up()
        got = {method: await code(channel, method, b"", ACCESS.shard_token) for method in METHODS}
        assert grpc.StatusCode.UNAUTHENTICATED not in got.values()
    with pytest.raises(grpc.aio.AioRpcError, match="carries no valid shard token"):
        async with shard(address, access=ACCESS), ShardClient.connect(address, ShardAccess.of()) as thief:
            await thief.ready(30)


@pytest.mark.full
async def test_calls_without_the_token_take_neither_memory_nor_the_session() -> None:
    address = free_address()
    large = bytes(201 << 20)

    async def attack(channel: grpc.aio.Channel) -> None:
        codes = [code(channel, "/text_generation.v1.Shard/WarmUp", large, None) for _ in range(6)]
        for refused in asyncio.as_completed(codes):
            assert await refused is grpc.StatusCode.UNAUTHENTICATED
        run = shard_pb2_grpc.ShardStub(channel).Run
        async with asyncio.timeout(30):
            for _ in range(100):
                calls = [run() for _ in range(50)]
                await asyncio.sleep(0)
                for call in calls:
                    call.cancel()

    async with shard(address, "--echo-step-ms=1", access=ACCESS) as (client, process):
        pool = await client.warm_up()
        async with open_session(client, pool) as session:
            tokens = session.generate([1, 2], max_new_tokens=20_000)
            await anext(tokens)
            before = psutil.Process(process.pid).memory_info().rss
            most = before

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, psutil.Process(process.pid).memory_info().rss)
                    await anext(tokens)

            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(watch())
                async with grpc.aio.insecure_channel(address, CLIENT_OPTIONS) as channel:
                    await attack(channel)
                watching.cancel()
    assert most - before < 32 << 20


def reset_calls(port: int, connections: int, count: int) -> None:
    """Open and reset calls over one connection after the other, without waiting for the server."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload

    fields = {":method": "POST", ":scheme": "http", ":path": "/no.such/Method", ":authority": "a", "te": "trailers"}
    fields["content-type"] = "application/grpc"
    pairs = [(name.encode(), value.encode()) for name, value in fields.items()]
    head = b"".join(b"\0%c%b%c%b" % (len(name), name, len(value), value) for name, value in pairs)
    resets = [frame(1, 4, number, head) + frame(3, 0, number, b"\0\0\0\x08") for number in range(1, 2 * count, 2)]
    for _ in range(connections):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection, suppress(OSError):
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
            for reset in resets:  # one by one: of a connection that is closed soon the rest is not read
                connection.sendall(reset)


async def test_calls_that_are_reset_at_once_take_no_memory() -> None:
    address = free_address()
    async with shard(address, access=ACCESS) as (client, process):
        before = psutil.Process(process.pid).memory_info().rss
        await asyncio.to_thread(reset_calls, split_host_port(address)[1], 15, 6000)
        assert psutil.Process(process.pid).memory_info().rss - before < 32 << 20
        await client.info()


async def test_a_call_that_was_refused_counts_no_more_as_one_of_its_connection() -> None:
    address = free_address()
    info = "/text_generation.v1.Shard/Info"
    async with shard(address, access=ACCESS) as (client, _), open_session(client, await client.warm_up()):
        async with ShardClient.connect(address, ACCESS) as other:
            details = [await other.run().details() for _ in range(2 * MAX_STREAMS)]
            assert set(details) == {"another Run session is open"}
        async with grpc.aio.insecure_channel(address) as channel:
            for size, token, expected in (
                (5000, ACCESS.shard_token, grpc.StatusCode.RESOURCE_EXHAUSTED),
                (0, "wrong", grpc.StatusCode.UNAUTHENTICATED),
            ):
                codes = [await code(channel, info, bytes(size), token) for _ in range(2 * MAX_STREAMS)]
                assert set(codes) == {expected}


async def test_unary_calls_are_short_and_one_warm_up_runs_at_a_time() -> None:
    address = free_address()
    warm_up = "/text_generation.v1.Shard/WarmUp"
    async with shard(address, access=ACCESS) as _, grpc.aio.insecure_channel(address) as channel:
        metadata = token_metadata(ACCESS)
        for method in ("/text_generation.v1.Shard/Info", warm_up, "/grpc.health.v1.Health/Check"):
            assert await code(channel, method, bytes(5000), ACCESS.shard_token) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await code(channel, method, b"\xff", ACCESS.shard_token) is grpc.StatusCode.INVALID_ARGUMENT
        pending = channel.stream_stream(warm_up)(metadata=metadata)  # sends no message
        await pending.wait_for_connection()
        while await code(channel, warm_up, b"", ACCESS.shard_token) is grpc.StatusCode.OK:
            pass
        pending.cancel()
        while await code(channel, warm_up, b"", ACCESS.shard_token) is not grpc.StatusCode.OK:
            pass


async def test_no_message_of_17_megabytes_is_read_and_none_above_4_kilobytes_without_a_prompt() -> None:
    address = free_address()
    async with shard(address) as (client, process):
        await client.warm_up()
        async with grpc.aio.insecure_channel(address, CLIENT_OPTIONS) as channel:
            for method in METHODS[:-1]:
                long = method.endswith(("/Run", "/ServerReflectionInfo"))
                for size in (17 << 20,) if long else (17 << 20, 5000):
                    before = psutil.Process(process.pid).memory_info().rss
                    got = await code(channel, method, bytes(size), None)
                    assert got in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED), (method, size)
                    assert psutil.Process(process.pid).memory_info().rss - before < 32 << 20, (method, size)
        await client.info()


@pytest.mark.full
async def test_work_of_any_size_is_sent_in_parts_and_endless_parts_are_refused() -> None:
    length, slots = 128 * 1024, 64
    address = free_address()
    sizes = (f"--echo-max-sequence-length={length + 8}", f"--max-batch-size={slots}", "--echo-blocks=1000000")
    async with shard(address, *sizes) as (client, _):
        pool = await client.warm_up(max_batch_size=slots, max_batch_prefill_tokens=slots * length)
        async with running(client) as call:
            each = -(-(length + 1) // pool.block_size)
            orders = pb.Orders(number=1, prefill_slots=range(slots), prefill_tokens=[length] * slots)
            for slot in range(slots):
                admitted = orders.placements.add(slot=slot, blocks=range(slot * each, (slot + 1) * each))
                admitted.prompt.extend([30_000 + slot] * length)
                admitted.stopping.max_new_tokens = 1
                admitted.sampling.greedy = True
                admitted.logprobs.prompt = slot < 40  # 40 x 128k log-probabilities: a report of 21 MB
            assert orders.ByteSize() > MAX_MESSAGE_BYTES
            for part in split(orders):
                await call.write(part)
            parts = Joiner[pb.StepReport](sys.maxsize)
            finished: set[int] = set()
            scored: dict[int, int] = {}
            async with asyncio.timeout(100):
                while len(finished) < slots:
                    read = await call.read()
                    assert isinstance(read, pb.StepReport)
                    if (message := parts.join(read)) is not None:
                        assert not message.failed
                        finished |= {finish.slot for finish in message.finished}
                        scored |= {scores.slot: len(scores.logprobs) for scores in message.prompt_logprobs}
            assert scored == dict.fromkeys(range(40), length)
        too_many = most_orders(await client.info()) // (15 << 20) + 1
        for parts_sent in ([pb.Orders(part=bytes(15 << 20), more=True)] * too_many, [pb.Orders(part=b"\xff")]):
            async with running(client) as call:
                with pytest.raises(grpc.aio.AioRpcError):
                    for part in parts_sent:
                        await call.write(part)
                    await call.read()
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await client.info()).max_slots == slots


async def test_each_side_refuses_a_wrong_certificate_of_the_other(tmp_path: Path) -> None:
    """Both certificates are signed by the CA and have not expired, and the shard's has its name, not its address."""

    good = write_certificates(tmp_path / "good")
    foreign = write_certificates(tmp_path / "foreign").model_copy(update={"shard_tls_ca": good.shard_tls_ca})

    def trusted(folder: str, **wrong: object) -> ShardAccess:
        """A certificate that is wrong, and the CAs of both sides."""
        access = write_certificates(tmp_path / folder, **wrong)  # type: ignore[arg-type]
        both = tmp_path / f"{folder}-both.pem"
        both.write_bytes(Path(access.shard_tls_ca).read_bytes() + Path(good.shard_tls_ca).read_bytes())
        return access.model_copy(update={"shard_tls_ca": str(both)})

    expired, renamed = trusted("expired", days=-1), trusted("renamed", name="127.0.0.1")
    trusting = {
        each.shard_tls_cert: good.model_copy(update={"shard_tls_ca": each.shard_tls_ca}) for each in (expired, renamed)
    }

    async def accepted(shard: ShardAccess, client: ShardAccess | None) -> bool:
        address = free_address()
        server, health = create_server(), ShardHealth()
        health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
        server.add_secure_port(address, server_credentials(shard))
        await health.set_serving(serving=True)
        await server.start()
        try:
            if client is not None:
                async with ShardClient.connect(address, client) as connected:
                    return await connected.is_serving()
            ca = grpc.ssl_channel_credentials(read_certificates(good)[0])
            names = (("grpc.ssl_target_name_override", good.shard_tls_name),)
            async with grpc.aio.secure_channel(address, ca, options=names) as channel:
                return await ShardClient(channel).is_serving()
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False
        finally:
            await server.stop(None)

    assert await accepted(good, good)
    assert await accepted(trusting[renamed.shard_tls_cert], renamed)  # the name of a client does not matter
    refused = {
        "client without TLS": await accepted(good, ShardAccess.of()),
        "client without certificate": await accepted(good, None),
        "client of another CA": await accepted(good, foreign),
        "client expired": await accepted(trusting[expired.shard_tls_cert], expired),
        "shard of another CA": await accepted(foreign, good),
        "shard expired": await accepted(expired, trusting[expired.shard_tls_cert]),
        "shard of another name": await accepted(renamed, trusting[renamed.shard_tls_cert]),
    }
    assert refused == dict.fromkeys(refused, False)


async def test_certificates_that_change_while_a_client_waits_for_its_shard_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "RECONNECT_S", 0.5)
    address, folder = free_address(), tmp_path / "tls"
    access = write_certificates(folder, "token")
    async with ShardClient.connect(address, access) as waiting, asyncio.TaskGroup() as tasks:
        ready = tasks.create_task(waiting.ready(60))
        await asyncio.to_thread(write_certificates, folder)
        async with shard(address, *tls_arguments(access), access=access):
            await ready
            assert (await waiting.info()).engine == "echo"


async def test_tls_serves_only_clients_of_the_ca_and_follows_new_certificates(tmp_path: Path) -> None:
    address = free_address()
    ours = await asyncio.to_thread(write_certificates, tmp_path / "ours")
    async with shard(address, *tls_arguments(ours), access=ours) as (client, _):
        assert (await client.info()).engine == "echo"
        former = await asyncio.to_thread(shutil.copytree, tmp_path / "ours", tmp_path / "former")
        await asyncio.to_thread(write_certificates, tmp_path / "ours")
        async with ShardClient.connect(address, ours) as renewed:
            assert (await renewed.info()).engine == "echo"
        files = {name: str(former / Path(getattr(ours, name)).name) for name in ("shard_tls_cert", "shard_tls_key")}
        for access in (ours.model_copy(update=files), ShardAccess.of()):
            async with ShardClient.connect(address, access) as refused:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await refused.info(timeout=5)
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await client.info()).engine == "echo"  # the open connection stays
