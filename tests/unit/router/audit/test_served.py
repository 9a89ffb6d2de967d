"""The record of audited requests, kept until their replay."""

from __future__ import annotations

from collections import Counter

import pytest

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import Grammar, GrammarKind, LogprobOptions, Sampling
from text_generation_router.audit.auditor import is_chosen
from text_generation_router.audit.served import FEATURES, KeptRequests, Served
from text_generation_router.audit.verdict import Findings
from text_generation_router.request import (
    ImageFile,
    Moves,
    PlacedImage,
    Priority,
    QualityOfService,
    Request,
    RequestId,
    TenantId,
)
from text_generation_router.scheduling.sequence import ScheduledSequence


def placed(
    request: Request, replica: int = 0, slot: int = 3, cached: int = 0, moves: int = 0, **state: object
) -> ScheduledSequence:
    sequence = ScheduledSequence(request, 1, 0.0, 1, moves=Moves(moves, 0), cached_tokens=cached, **state)  # type: ignore[arg-type]
    sequence.enter_replica(replica, slot)
    return sequence


def served(number: int = 1, tenant: str = "", prompt: int = 10, tokens: int = 4, **options: object) -> Served:
    qos = QualityOfService(TenantId(tenant), salt=tenant, end_by=5.0)
    request = Request(RequestId(number), tuple(range(prompt)), tokens, qos=qos, **options)  # type: ignore[arg-type]
    it = Served(request)
    it.placed(placed(request))
    it.got(pb.StepReport(token_ids=range(50, 50 + tokens), logprobs=[-1.0] * tokens), 0, tokens, 1)
    return it


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_the_share_of_the_requests_chosen_is_the_one_asked_for(share: float) -> None:
    chosen = [is_chosen(RequestId(number), share) for number in range(1, 20001)]
    assert sum(chosen) / 20000 == pytest.approx(share, abs=0.012)
    assert chosen == [is_chosen(RequestId(number), share) for number in range(1, 20001)]
    assert share < 1 or is_chosen(RequestId((63 << 56) + 5), share)


def test_a_replay_is_the_prompt_and_the_served_tokens_without_the_clients_terms() -> None:
    grammar = Grammar(GrammarKind.REGEX, "a*")
    replay = served(
        7, "a", sampling=Sampling(top_k=3), grammar=grammar, min_new_tokens=2, adapter="x", stop_sequences=("end",)
    ).replay(100)
    assert [*replay.prompt] == [*range(10), 50, 51, 52, 53]
    assert (replay.replayed, replay.max_new_tokens, replay.min_new_tokens) == (4, 1, 2)
    assert (replay.sampling.top_k, replay.grammar, replay.adapter) == (3, grammar, "x")
    assert replay.logprobs == LogprobOptions(generated=True)
    assert (replay.qos.priority, replay.qos.end_by, replay.stop_sequences) == (Priority.BULK, None, ())
    assert replay.without == {"prefix"}


def test_what_a_request_holds_counts_as_memory() -> None:
    assert served(prompt=1000).bytes - served(prompt=10).bytes == 4 * 990
    media = (PlacedImage(2, 3, ImageFile(b"1", bytes(10_000))),)
    kept, plain = served(media=media), served()
    assert kept.replay(100).media == media
    assert kept.bytes - plain.bytes == 10_000


def test_the_last_token_is_left_out_where_it_does_not_fit() -> None:
    assert served().replay(15).replayed == 4
    assert served().replay(14).replayed == 3


def test_what_a_request_used_is_recorded() -> None:
    it = served(tokens=1)
    assert it.features == {"replica 0"}
    media = (PlacedImage(2, 3, ImageFile(b"1", b"")),)
    it = served(grammar=Grammar(GrammarKind.REGEX, "a"), adapter="x", media=media)
    it.placed(placed(it.request, 2, 1, 32, 1, loaded=True))
    it.placed(placed(it.request, 2, 5, 0, 1))
    it.got(pb.StepReport(token_ids=[1, 2, 3]), 1, 2, 6)
    it.counts += {"chunks": 4, "drafts": 1}
    assert it.features == {*FEATURES, "replica 2"}
    assert it.used == dict.fromkeys(FEATURES, 1) | {"prefix": 32, "batch": 5, "decode": 4}
    assert list(it.tokens) == [50, 51, 52, 53, 2]
    assert [each == each for each in it.logprobs] == [True] * 4 + [False]


def test_a_request_that_goes_on_elsewhere_moved() -> None:
    it = served()
    it.placed(placed(it.request, 1))
    it.placed(placed(it.request, 1, moves=1))
    assert it.used["move"] == 2
    assert "preemption" not in it.used


def test_tokens_of_another_scheduler_are_those_at_the_first_placement() -> None:
    it = Served(served().request)
    it.placed(placed(it.request, moves=1, generated=[7, 8]))
    assert list(it.tokens) == [7, 8]
    assert it.features == {"move", "decode", "replica 0"}


def test_tenants_have_turns_and_none_crowds_out_another() -> None:
    kept = KeptRequests(max_bytes=10 * served().bytes)
    assert not kept.put(served(1, "a"))
    assert sum(kept.put(served(number, "b")) for number in range(2, 30)) == 19
    assert len(kept) == 10
    assert [kept.take().request.id for _ in range(3)] == [1, 21, 22]
    assert kept.bytes == 7 * served().bytes


def test_memory_is_bounded_and_given_back() -> None:
    kept = KeptRequests(max_bytes=1 << 20)
    for number in range(3000):
        kept.put(served(number, str(number % 7), prompt=number))
        assert kept.bytes <= 1 << 20
    tenants = Counter(kept.take().request.qos.tenant for _ in range(len(kept)))
    assert max(tenants.values()) - min(tenants.values()) <= 1
    assert kept.bytes == len(kept) == 0


def test_a_request_that_cannot_start_holds_up_no_other_of_its_tenant() -> None:
    kept = KeptRequests()
    for number in range(3):
        kept.put(served(number))
    kept.put(kept.take())
    assert [kept.take().request.id for _ in range(3)] == [1, 2, 0]


def test_findings_name_what_they_have_in_common() -> None:
    findings = Findings()
    usual = {"batch", "decode", "replica 0"}
    for number in range(20):
        findings.confirm(usual | ({"grammar"} if number % 2 else set()) | ({"prefix"} if number % 5 == 0 else set()))
    assert findings.add({*usual, "prefix", "grammar"}) == "prefix"
    assert findings.add({*usual, "prefix"}) == "prefix"
    assert findings.shared is None
    assert findings.add({*usual, "prefix", "chunks"}) == "prefix"
    assert findings.shared == "prefix"
    findings.add({*usual, "chunks"})
    assert findings.shared is None
    for _ in range(3):
        findings.add({*usual, "prefix", "offload"})  # a loaded prefix is a cached one
    assert findings.shared == "offload"


def test_a_feature_that_some_findings_do_without_is_not_their_cause() -> None:
    findings = Findings()
    for number in range(9):
        findings.confirm({"decode", "batch"} if number < 6 else {"decode"})
    findings.add({"decode", "batch"})
    findings.add({"decode", "batch", "grammar"})
    assert findings.add({"decode", "batch", "grammar"}) == "batch"


def test_findings_on_one_of_several_replicas_name_it() -> None:
    findings = Findings()
    for number in range(30):
        findings.confirm({"decode", f"replica {number % 3}"})
    for _ in range(3):
        findings.add({"decode", "replica 1"})
    assert findings.shared == "replica 1"


def test_a_finding_without_features_is_due_to_none() -> None:
    assert Findings().add({"replica 0"}) == "none"
