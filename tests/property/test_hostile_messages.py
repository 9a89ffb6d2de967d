"""Random reports of a shard: refused, or applied without breaking a rule.

The findings in tests/corpus/reports are tried first.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from scheduler_checks import check_scheduler
from scheduler_rig import Rig, a_policy, words

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.shards.convert import MalformedReport, check_report, step_output_from_pb

CORPUS = Path(__file__).parents[1] / "corpus" / "reports"
SLOTS = st.integers(0, 9)
"""The replica has 8."""
SMALL = st.one_of(st.integers(0, 20), st.integers(0, 2**32 - 1))
COUNTS = st.lists(st.integers(0, 3), max_size=4)

REPORTS = st.builds(
    pb.StepReport,
    orders_applied=st.integers(0, 3),
    slots=st.lists(SLOTS, max_size=4),
    token_counts=COUNTS,
    token_ids=st.lists(SMALL, max_size=6),
    logprobs=st.lists(st.floats(width=32), max_size=6),
    prefilled_slots=st.lists(SLOTS, max_size=3),
    prefilled_tokens=st.lists(SMALL, max_size=3),
    finished=st.lists(st.builds(pb.Finish, slot=SLOTS, reason=st.integers(0, 5)), max_size=2),
    failed=st.lists(st.builds(pb.Failure, slot=SLOTS, code=st.integers(0, 9), message=st.text(max_size=3)), max_size=2),
    step_ns=st.integers(0, 2**63),
)


def consistent(report: pb.StepReport) -> pb.StepReport:
    """Return the report with as many tokens and chunks as its columns announce, which most random ones lack."""
    count = sum(report.token_counts) if report.token_counts else len(report.slots)
    if len(report.token_counts) not in (0, len(report.slots)):
        del report.token_counts[:]
        count = len(report.slots)
    report.token_ids[:] = [7] * count
    report.logprobs[:] = [-1.0] * count
    del report.prefilled_slots[len(report.prefilled_tokens) :]
    del report.prefilled_tokens[len(report.prefilled_slots) :]
    return report


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.stem)
def test_known_reports(path: Path) -> None:
    check([text_format.Parse(path.read_text(), pb.StepReport())])


@given(reports=st.lists(st.one_of(REPORTS, REPORTS.map(consistent)), min_size=1, max_size=6))
def test_any_report_is_refused_or_keeps_the_rules_of_the_scheduler(reports: list[pb.StepReport]) -> None:
    check(reports)


def check(reports: list[pb.StepReport]) -> None:
    rig = Rig(a_policy(), blocks=20)
    for number in range(6):
        rig.submit(prompt=words(number, 20 + 5 * number), new=10)
    for report in reports:
        rig.scheduler.dispatch()
        rig.scheduler.schedule(0)
        try:
            check_report(report, rig.slots, rig.replica().orders_sent, rig.replica().unsent_slots)
        except MalformedReport:
            continue
        rig.scheduler.update(0, step_output_from_pb(report, 1), 0.0)
        check_scheduler(rig.scheduler)
