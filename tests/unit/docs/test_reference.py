"""docs/api.md and the generated pages agree with the code: errors, metrics and settings."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from metric_samples import exposition
from prometheus_client.parser import text_string_to_metric_families

import text_generation_router.api.cloud.kserve
import text_generation_router.api.cloud.vertex
import text_generation_router.web.body_errors  # noqa: F401 - the same
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.audit.auditor import Auditor
from text_generation_router.config import RouterConfig
from text_generation_router.error_attributes import TgiBody
from text_generation_router.errors import ServingError, error_classes
from text_generation_router.metrics import Metrics
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.cluster import Cluster

ROOT = Path(__file__).parents[3]
API = (ROOT / "docs/api.md").read_text(encoding="utf-8")


def row(error: type[ServingError]) -> str:
    """The line of the error table."""
    tgi = f"`{error.error_type}`" if error.tgi_body is TgiBody.JSON else error.tgi_body.value
    openai = f"`{error.openai_type}`" + (f", `{error.openai_code}`" if error.openai_code else "")
    cause = (error.__doc__ or "").partition("\n")[0].removesuffix(".")
    wait = error().retry_after
    status = f"{error.status}" if error.open_status == error.status else f"{error.status}, {error.open_status}"
    return f"| {status} | {cause} | {tgi} | {openai} | `{error.anthropic_type}` | {wait or '–'} |"


def test_the_error_table_has_a_row_for_each_error() -> None:
    rows = {row(error): error.status for error in error_classes() if error.status != 499}
    assert re.findall(r"^\| \d{3}(?:, \d{3})? \|.*$", API, re.MULTILINE) == sorted(rows, key=lambda line: rows[line])


def test_every_metric_of_our_own_is_listed() -> None:
    scheduler = Scheduler(Policy(1, 1))
    metrics = Metrics(max_input_tokens=1, max_total_tokens=2, scheduler=scheduler)
    metrics.add_shards(Cluster(scheduler, metrics.steps), lambda: 1)
    metrics.add_audits(Auditor(scheduler, metrics.steps, RouterConfig(), pb.InfoResponse(), 1))
    families = {
        family.name + "_total" * (family.type == "counter"): family.documentation
        for family in text_string_to_metric_families(exposition(metrics.registry))
        if family.name.startswith("text_generation_")
    }
    assert dict(re.findall(r"^\| `(text_generation_\w+)` \| (.*) \|$", API, re.MULTILINE)) == families


@pytest.mark.parametrize(
    ("file", "function"),
    [
        *((f"docs/{name}.md", f"{name}_page") for name in ("flags", "limits", "models")),
        ("deploy/helm/text-generation/values.schema.json", "chart_schema"),
    ],
)
def test_a_generated_file_is_up_to_date(file: str, function: str) -> None:
    generated = runpy.run_path(str(ROOT / "scripts" / "generate_docs.py"))[function]()
    assert (ROOT / file).read_text(encoding="utf-8") == generated, "run: make docs"


def test_every_test_that_a_document_names_exists() -> None:
    for document in (ROOT / "docs").glob("*.md"):
        for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", document.read_text(encoding="utf-8")):
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{document.name}: {file}::{name}"
