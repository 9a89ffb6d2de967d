"""Checks and conversion of reports."""

from __future__ import annotations

import pytest

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.shards.convert import MalformedReport, check_report, logprobs_to_json
from text_generation_shard.convert import report_to_pb
from text_generation_shard.engine import Drafting, StepResult

LENGTH = pb.FINISH_REASON_LENGTH
GOOD = pb.StepReport(
    orders_applied=2,
    slots=[0, 3],
    token_counts=[1, 2],
    token_ids=[7, 8, 9],
    logprobs=[-0.1, -0.2, -0.3],
    finished=[pb.Finish(slot=3, reason=LENGTH)],
    prefilled_slots=[1],
    prefilled_tokens=[16],
)


def test_drafts_arrive_by_source_and_sequence() -> None:
    own = Drafting(3, 9, 4, "own", [(3, 5, 1), (0, 4, 3)])
    sums = Drafting(1, 2, 1)
    report = report_to_pb(StepResult(slots=[0, 3], token_counts=[4, 2], token_ids=[7] * 6, drafting=[own, sums]))
    check_report(report, num_slots=4, orders_sent=2)
    first, second = report.drafting
    assert (first.source, first.drafts, first.draft_tokens, first.accepted_tokens) == ("own", 3, 9, 4)
    assert (first.slots, first.slot_draft_tokens, first.slot_accepted_tokens) == ([3, 0], [5, 4], [1, 3])
    assert (second.source, second.drafts, second.slots) == ("engine", 1, [])


def checked(**changes: object) -> None:
    report = pb.StepReport.FromString(GOOD.SerializeToString())
    for name in changes:
        report.ClearField(name)  # type: ignore[arg-type]
    report.MergeFrom(pb.StepReport(**changes))  # type: ignore[arg-type]
    check_report(report, num_slots=4, orders_sent=2)


def test_a_valid_report_is_accepted() -> None:
    checked()
    checked(token_counts=[], token_ids=[7, 8], logprobs=[-0.1, -0.2])
    checked(
        slots=[],
        token_counts=[],
        token_ids=[],
        logprobs=[],
        finished=[],
        prefilled_slots=[],
        prefilled_tokens=[],
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": [0, 4]},
        {"slots": [0]},
        {"token_counts": [1, 1]},
        {"token_counts": []},
        {"token_ids": [7, 8]},
        {"logprobs": [-0.1]},
        {"prefilled_tokens": []},
        {"prefilled_slots": [4]},
        {"finished": [pb.Finish(slot=1, reason=LENGTH)]},
        {"finished": [pb.Finish(slot=3)]},
        {"failed": [pb.Failure(slot=9)]},
        {"prompt_logprobs": [pb.PromptLogprobs(slot=4)]},
        {"top_tokens": [pb.TopTokens(slot=1)]},
        {"orders_applied": 3},
        {"drafting": [pb.Drafting(slots=[0], slot_draft_tokens=[2])]},
        {"drafting": [pb.Drafting(slots=[1], slot_draft_tokens=[2], slot_accepted_tokens=[0])]},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_malformed_report_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(MalformedReport):
        checked(**changes)


def test_an_unknown_logprob_is_null() -> None:
    checked(logprobs=[float("nan"), -0.2, float("-inf")])
    assert logprobs_to_json([float("nan"), -0.5, float("-inf"), 0.0]) == [b"null", b"-0.5", b"null", b"0.0"]
    assert logprobs_to_json([float("nan")]) == [b"null"]
    assert logprobs_to_json([]) == []
