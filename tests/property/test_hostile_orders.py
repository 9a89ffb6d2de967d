"""Random orders to a shard: applied, or the end of their stream with INVALID_ARGUMENT; the shard serves on.

The findings in tests/corpus/orders are sent first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import grpc
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from shard_process import shard
from shard_session import SessionClosed, open_session

from text_generation_proto.client import ShardClient
from text_generation_proto.v1 import shard_pb2 as pb

CORPUS = Path(__file__).parents[1] / "corpus" / "orders"
SLOTS, BLOCKS = 8, 20
ENDS = (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
TAKEN = (grpc.StatusCode.RESOURCE_EXHAUSTED, "another Run session is open")
REFUSED = (grpc.StatusCode.UNAVAILABLE, "Received RST_STREAM with error code 7")
"""HTTP/2's REFUSED_STREAM: nothing of the stream was processed, and the client may send it again."""
"""The server has not yet noticed the end of the session before."""
NOT_ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError, SessionClosed)
"""The errors of a session then, by the moment at which it is refused."""

UINT32 = st.one_of(st.integers(0, 12), st.integers(0, 2**32 - 1))
UINT64 = st.one_of(st.integers(0, 12), st.integers(0, 2**64 - 1))
DOUBLE = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats())
MANY = st.lists(UINT32, max_size=6)
SMALL = st.lists(st.integers(0, 12), max_size=6)

SAMPLING = st.builds(
    pb.Sampling,
    greedy=st.booleans(),
    top_k=UINT32,
    seed=UINT64,
    watermark=st.booleans(),
    logit_bias_ids=MANY,
    allowed_token_ids=MANY,
    bad_word_ids=MANY,
    bad_word_lengths=SMALL,
    logit_bias_values=st.lists(DOUBLE, max_size=6),
    **dict.fromkeys(("temperature", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "min_p"), DOUBLE),
    **dict.fromkeys(("output_frequency_penalty", "output_presence_penalty"), DOUBLE),
)
SEQUENCES = st.builds(
    pb.NewSequence,
    slot=st.one_of(st.integers(0, SLOTS), UINT32),
    prompt=st.one_of(SMALL, MANY),
    computed_tokens=UINT32,
    blocks=st.one_of(SMALL, MANY),
    sampling=st.one_of(st.none(), SAMPLING),
    stopping=st.builds(
        pb.Stopping, max_new_tokens=UINT32, eos_token_ids=MANY, stop_token_ids=MANY, min_new_tokens=UINT32
    ),
    logprobs=st.one_of(
        st.none(), st.builds(pb.LogprobOptions, top_n=UINT32, prompt=st.booleans(), prompt_top_n=UINT32)
    ),
    generated_tokens=UINT32,
    grammar=st.one_of(st.none(), st.builds(pb.Grammar, kind=st.integers(0, 9), text=st.text(max_size=9))),
    cache_salt=st.text(max_size=3),
)
ORDERS = st.builds(
    pb.Orders,
    number=st.one_of(st.integers(0, 3), UINT64),
    release=MANY,
    placements=st.lists(SEQUENCES, max_size=3),
    part=st.binary(max_size=20),
    more=st.booleans(),
    **dict.fromkeys(
        ("allocation_slots", "allocation_counts", "allocation_blocks", "prefill_slots", "prefill_tokens"), MANY
    ),
)


@st.composite
def plausible(draw: st.DrawFn) -> list[pb.Orders]:
    """Orders of the right shape, which reach the engine: most random ones do not."""
    orders = draw(st.lists(ORDERS, min_size=1, max_size=4))
    for number, message in enumerate(orders, start=1):
        message.number = number
        message.ClearField("part")
        message.ClearField("more")
        del message.prefill_slots[len(message.prefill_tokens) :]
        del message.prefill_tokens[len(message.prefill_slots) :]
        message.allocation_slots[:] = [slot % (SLOTS + 1) for slot in message.allocation_slots]
        message.allocation_counts[:] = [1] * len(message.allocation_slots)
        message.allocation_blocks[:] = draw(
            st.lists(UINT32, min_size=len(message.allocation_slots), max_size=len(message.allocation_slots))
        )
    return orders


class Target:
    """An echo shard, and a way to send it bytes as orders."""

    def __init__(self, runner: asyncio.Runner, client: ShardClient, channel: grpc.aio.Channel) -> None:
        self._runner = runner
        self._client = client
        self._run = channel.stream_stream(
            "/text_generation.v1.Shard/Run", response_deserializer=pb.StepReport.FromString
        )
        self._pool = runner.run(client.warm_up())

    def check(self, *messages: bytes) -> None:
        """Send messages, see the stream end as it should, and serve a sequence that needs every block."""
        self._runner.run(self._check(messages))

    async def _check(self, messages: Sequence[bytes]) -> None:
        async with asyncio.timeout(60):
            ended = TAKEN
            while ended in (TAKEN, REFUSED):
                call = self._run()
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await call.wait_for_connection()
                    for message in messages:
                        await call.write(message)
                    await call.done_writing()
                    while await call.read() is not grpc.aio.EOF:
                        pass
                # The client's library has a status of its own for a write at the moment of the end.
                ended = await call.code(), await call.details()
            assert ended[0] in ENDS or ended == (grpc.StatusCode.INTERNAL, "Internal error from Core"), ended
            size = self._pool.num_blocks * self._pool.block_size
            answer = []
            while not answer:
                with suppress(*NOT_ENDED):
                    async with open_session(self._client, self._pool, max_slots=SLOTS) as session:
                        answer = [token async for token in session.generate([1] * (size - 4), max_new_tokens=5)]
            assert len(answer) == 5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    address = f"unix://{tmp_path_factory.mktemp('s')}/s"
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        arguments = (f"--echo-blocks={BLOCKS}", f"--max-batch-size={SLOTS}")
        client, process = runner.run(stack.enter_async_context(shard(address, *arguments)))

        async def open_channel() -> grpc.aio.Channel:
            return await stack.enter_async_context(grpc.aio.insecure_channel(address))

        try:
            yield Target(runner, client, runner.run(open_channel()))
            assert process.returncode is None
        finally:
            runner.run(stack.aclose())


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.stem)
def test_known_orders(target: Target, path: Path) -> None:
    if path.suffix == ".hex":
        target.check(bytes.fromhex(path.read_text()))
    else:
        target.check(text_format.Parse(path.read_text(), pb.Orders()).SerializeToString())


@given(orders=st.one_of(st.lists(ORDERS, min_size=1, max_size=4), plausible()))
def test_any_orders_are_applied_or_end_their_stream(target: Target, orders: list[pb.Orders]) -> None:
    target.check(*(message.SerializeToString() for message in orders))


@given(messages=st.lists(st.binary(max_size=60), min_size=1, max_size=3))
def test_any_bytes_are_applied_or_end_their_stream(target: Target, messages: list[bytes]) -> None:
    target.check(*messages)
