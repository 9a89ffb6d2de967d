"""Audits over real gRPC with echo engines: when requests are replayed, who notices, and what follows a finding."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from audited_traffic import ALL, Audited, audited
from cluster_listener import Listener
from google.protobuf.json_format import ParseDict
from metric_samples import exposition
from structlog.testing import capture_logs

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.config import RouterConfig
from text_generation_router.errors import DeadlineExceeded
from text_generation_router.request import QualityOfService, Request, RequestProgress, TenantId
from text_generation_router.scheduling.messages import Placement, SchedulerOutput
from text_generation_router.serve.shards import Shards
from text_generation_router.shards.convert import orders_to_pb
from text_generation_router.shards.join import ReplicaInfo
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Failure, Orders
from text_generation_shard.engines.echo import EchoEngine
from text_generation_shard.step.masks import Mask
from text_generation_shard.step.sequence import SamplerOutput
from text_generation_shard.step.sequence import Sequence as StepSequence

PROMPT = tuple(range(100, 180))


class WrongEcho(EchoEngine):
    """Serves wrong tokens on a cached prefix, or everywhere."""

    everywhere = False

    def apply(self, orders: Orders) -> list[Failure]:
        wrong = getattr(self, "_wrong", set[int]())
        for new in orders.placements:
            hit = self.everywhere or new.computed_tokens > 0
            (wrong.add if hit and not new.logprobs.generated else wrong.discard)(new.slot)
        self._wrong = wrong
        return super().apply(orders)

    def sample(self, sequences: list[StepSequence], masks: dict[int, Mask]) -> SamplerOutput:
        output = super().sample(sequences, masks)
        for index, sequence in enumerate(sequences):
            output.token_ids[index] += sequence.slot in self._wrong
        return output


def echo(kind: type[EchoEngine] = EchoEngine, **options: float) -> EchoEngine:
    return kind.build(ShardConfig(engine="echo", **options))  # type: ignore[arg-type]


def request(server: Audited, new: int = 8, prompt: Sequence[int] = PROMPT, tenant: str = "") -> Request:
    return Request(next(server.cluster.ids), tuple(prompt), new, qos=QualityOfService(TenantId(tenant), salt=tenant))


async def serve(server: Audited, *requests: Request) -> list[list[int]]:
    listeners = [server.submit(each) for each in requests]
    for listener in listeners:
        await listener.over.wait()
        assert listener.error is None
    return [listener.tokens for listener in listeners]


async def test_requests_are_replayed_on_the_other_replica_and_no_metric_counts_it(tmp_path: Path) -> None:
    async with audited([echo(), echo()], tmp_path) as server:
        tokens = await serve(server, *(request(server) for _ in range(6)))
        assert tokens == [list(PROMPT[:8])] * 6
        await server.idle()
        steps = server.metrics.steps
        before = steps.new_tokens.counts[""], sum(steps.token_gaps.of().counts)
        started: list[tuple[int, int | None]] = []
        start = server.cluster.scheduler.replays.start

        def watch(replay: Request, served_by: int) -> int | None:
            started.append((served_by, start(replay, served_by)))
            return started[-1][1]

        server.cluster.scheduler.replays.start = watch  # type: ignore[method-assign]
        await serve(server, request(server))
        await server.idle()
        assert {served_by != by for served_by, by in started if by is not None} == {True}
        assert server.auditor.verdicts == {"same": 7}
        assert (steps.new_tokens.counts[""], sum(steps.token_gaps.of().counts)) == (before[0] + 8, before[1] + 7)
        stats = server.cluster.scheduler.stats()
        assert (stats.prompt_tokens, stats.cancellations, stats.running) == (7 * len(PROMPT), 0, 0)
        assert not next(iter(server.cluster.scheduler.queue.tenants)).running
        text = exposition(server.metrics.registry)
        assert 'text_generation_audits_total{verdict="same"} 7.0' in text
        assert "text_generation_audits_waiting 0.0" in text


async def test_a_replay_leaves_no_prefix_and_reuses_none(tmp_path: Path) -> None:
    async with audited([echo()], tmp_path) as server:
        await serve(server, request(server, 40))
        cached = server.cluster.scheduler.stats().cached_blocks
        await server.idle()
        assert server.cluster.scheduler.stats().cached_blocks == cached
        assert server.auditor.verdicts == {"same": 1}


async def test_a_replay_gives_way_to_a_request_and_is_tried_again(tmp_path: Path) -> None:
    async with audited([echo(echo_prefill_us=2000)], tmp_path) as server:
        await serve(server, request(server))
        async with asyncio.timeout(20):
            while not server.cluster.scheduler.replays.running:  # noqa: ASYNC110 - a start has no event
                await asyncio.sleep(0)
        await serve(server, request(server, prompt=range(300, 310)))
        await server.idle()
        assert server.auditor.verdicts == {"same": 2}


async def test_a_request_that_never_has_room_is_dropped(tmp_path: Path) -> None:
    async with audited([echo(echo_prefill_us=500)], tmp_path) as server:
        await serve(server, request(server))
        while not server.auditor.verdicts["dropped"]:
            async with asyncio.timeout(20):
                while not server.cluster.scheduler.replays.running:  # noqa: ASYNC110 - a start has no event
                    await asyncio.sleep(0)
            comes = request(server, 1, range(300, 310))
            server.submit(comes)
            server.cluster.cancel(comes.id)
        assert server.auditor.verdicts == {"dropped": 1}
        await server.idle()


async def test_no_replay_starts_while_requests_wait_or_the_replicas_are_busy(tmp_path: Path) -> None:
    config = ALL.model_copy(update={"audit_busy": 0.0})
    async with audited([echo(echo_step_ms=1)], tmp_path, config=config) as server:
        await serve(server, request(server))
        assert not server.auditor._start()
        assert server.auditor.waiting == 1


async def test_texts_that_end_at_a_stop_string_or_are_cancelled_are_audited(tmp_path: Path) -> None:
    async with audited([echo(echo_step_ms=1)], tmp_path) as server:
        for satisfied in (True, False):
            listener = server.submit(request(server, 1000))
            async with asyncio.timeout(20):
                while len(listener.tokens) < 5:  # noqa: ASYNC110 - a token has no event
                    await asyncio.sleep(0)
            (request_id,) = [each for each in server.cluster.scheduler.requests if each in server.auditor._watched]
            server.cluster.cancel(request_id, satisfied=satisfied)
        await server.idle()
        assert server.auditor.verdicts == {"same": 2}


async def test_a_request_that_expires_is_not_waited_for(tmp_path: Path) -> None:
    async with audited([echo(echo_step_ms=1)], tmp_path) as server:
        expires = request(server, 20_000)
        listener = server.submit(replace(expires, qos=replace(expires.qos, end_by=time.monotonic() + 0.05)))
        await listener.over.wait()
        assert isinstance(listener.error, DeadlineExceeded)
        await server.idle()
        assert set(server.auditor.verdicts) <= {"same"}  # as far as it was served


async def test_a_request_that_comes_again_from_a_worker_has_its_first_tokens(tmp_path: Path) -> None:
    async with audited([echo()], tmp_path) as server:
        listener = Listener()
        server.cluster.submit(request(server, 6), listener, RequestProgress(PROMPT[:2]))
        await listener.over.wait()
        await server.idle()
        assert listener.tokens == list(PROMPT[2:6])
        assert server.auditor.verdicts == {"same": 1}


async def test_a_request_used_nothing_of_the_next_one_in_its_slot(tmp_path: Path) -> None:
    async with audited([echo()], tmp_path, max_batch_size=1) as server:
        listeners = [server.submit(request(server, 4, range(1000 * n, 1000 * n + 20))) for n in range(5)]
        watched = list(server.auditor._watched.values())
        for listener in listeners:
            await listener.over.wait()
        assert [each.used for each in watched] == [{"decode": 3}] * 5


async def test_a_finding_is_logged_counted_and_written(tmp_path: Path) -> None:
    config = ALL.model_copy(update={"audit_folder": str(tmp_path / "records")})
    with capture_logs() as logs:
        async with audited([echo(WrongEcho)], tmp_path, config=config) as server:
            for _ in range(2):
                await serve(server, request(server, tenant="someone"))
                await server.idle()
            async with asyncio.timeout(20):
                while not any(each["event"] == "audit record written" for each in logs):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            text = exposition(server.metrics.registry)
    assert 'text_generation_audit_mismatch_total{feature="prefix"} 1.0' in text
    (line,) = (each for each in logs if each["event"] == "audit found another text")
    assert (line["request_id"], line["position"], line["served"], line["drawn"]) == (2, 0, 101, 100)
    assert (line["suspect"], line["used"]["prefix"], line["replica"]) == ("prefix", 64, 0)
    text = "An audit of request 2 found another text; likely cause: prefix"
    assert server.events == [("audit", text, "token 0 of 8: replica 0, prefix 64, decode 7")]
    (path,) = (tmp_path / "records").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "someone" not in path.read_text()
    record = json.loads(path.read_text())
    order = ParseDict(record["order"], pb.NewSequence())
    assert order.prompt[-order.generated_tokens] == 101
    assert (record["verdict"]["served"], record["replayed"]["drawn_ids"][0], record["suspect"]) == (101, 100, "prefix")


async def test_the_reuse_of_prefixes_is_switched_off_after_three_findings(tmp_path: Path) -> None:
    config = ALL.model_copy(update={"audit_action": "isolate"})
    async with audited([echo(WrongEcho)], tmp_path, config=config) as server:
        for number in range(8):  # sound texts, so that what is usual is known
            await serve(server, request(server, prompt=range(1000 * number, 1000 * number + 40)))
            await server.idle()
        for _ in range(4):
            await serve(server, request(server))
            await server.idle()
        assert server.auditor.mismatches == {"prefix": 3}
        assert server.cluster.isolated == ["prefix"]
        assert (await server.cluster.info()).isolated == ["prefix"]
        cached = server.cluster.scheduler.stats().cached_blocks
        assert await serve(server, request(server)) == [list(PROMPT[:8])]
        assert server.cluster.scheduler.stats().cached_blocks == cached
        assert [kind for kind, _, _ in server.events] == ["audit"] * 3 + ["isolated"]


async def test_requests_do_without_what_is_isolated(tmp_path: Path) -> None:
    async with audited([echo()], tmp_path) as server:
        server.cluster.isolated += ["drafts", "offload"]
        server.submit(request(server, 1))
        (sequence,) = server.cluster.scheduler.requests.values()
        assert sequence.request.without == {"drafts", "offload"}
        orders = orders_to_pb(SchedulerOutput(1, placements=(Placement(0, sequence.request, (), ()),)), ())
        assert orders.placements[0].no_drafts


async def test_a_replica_that_serves_wrong_text_gets_no_requests_any_more(tmp_path: Path) -> None:
    config = ALL.model_copy(update={"audit_action": "isolate"})
    wrong = echo(WrongEcho)
    wrong.everywhere = True
    async with audited([echo(), wrong], tmp_path, config=config) as server:
        for number in range(12):
            await serve(server, request(server, prompt=range(1000 * number, 1000 * number + 40)))
            await server.idle()
            if server.cluster.isolated:
                break
        assert server.cluster.isolated == ["replica 1"]
        assert server.cluster.scheduler.draining == {1}
        tokens = await serve(server, *(request(server) for _ in range(4)))
        assert tokens == [list(PROMPT[:8])] * 4


async def test_an_isolated_replica_is_used_again_when_no_other_is_left(tmp_path: Path) -> None:
    async with audited([echo(), echo()], tmp_path) as server:
        assert server.cluster.release_replica(1)
        server.cluster.isolated.append("replica 1")
        server.shards[0].end_session()
        async with asyncio.timeout(20):
            while server.cluster.isolated:  # noqa: ASYNC110 - a loss has no event
                await asyncio.sleep(0)
        assert 1 in {each.replica for each in server.cluster.scheduler.available}
        assert await serve(server, request(server)) == [list(PROMPT[:8])]


async def test_the_last_replica_is_kept(tmp_path: Path) -> None:
    async with audited([echo()], tmp_path) as server:
        assert not server.cluster.release_replica(0)


@pytest.mark.parametrize(
    ("device", "share", "scores", "audited"),
    [
        ("cuda:0", None, True, 0.001),
        ("cpu", None, True, None),
        ("cuda:0", 0.0, True, None),
        ("cuda:0", None, False, None),
    ],
)
def test_audits_are_on_by_default_on_gpus(
    device: str, share: float | None, scores: bool, audited: float | None
) -> None:
    shards = Shards(RouterConfig(audit_share=share, shard_address=["127.0.0.1:1"]))
    info = pb.InfoResponse(engine="torch", device=device, max_sequence_length=64, max_slots=4, scores_generated=scores)
    with capture_logs() as logs:
        shards.cluster(ReplicaInfo(info, pb.WarmUpResponse(num_blocks=8, block_size=16)))
    auditor = shards._auditor
    assert (None if auditor is None else auditor.share) == audited
    assert [each["event"] for each in logs] == (
        [] if scores else ["no audits: the engine does not score generated tokens"]
    )
