"""Alerts and dashboard: the rules' own tests, and every expression on a Prometheus that scrapes a server under load."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml
from byte_tokenizer import write_tokenizer
from chart import CHART, ROOT, needs_helm, render
from otlp_collector import Collector, collecting
from ports import free_port
from stack import Stack, running

FOLDER = CHART / "files"
RULES_TEST = Path(__file__).with_name("rules_test.yaml")
TOOLS = ROOT / ".cache" / "prometheus" / "usr" / "bin"
LOAD_S = 10.0
QUICK = {"OTEL_BSP_SCHEDULE_DELAY": "200"}
INTERVAL = "15s"
"""Value of $__rate_interval: Grafana takes four scrapes at least."""

DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((FOLDER / "rules.yaml").read_text(encoding="utf-8"))


def tool(name: str) -> str:
    """Return the path of a program of Prometheus; skips the test without it."""
    found = shutil.which(name, path=TOOLS) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: make prometheus-tools (Debian)")
    return found


def expressions() -> dict[str, str]:
    """Return the expressions of the dashboard, the alerts and the autoscaler, by their place."""
    found = {
        f"dashboard: {panel['title']} {target['refId']}": target["expr"]
        .replace("$__rate_interval", INTERVAL)
        .replace('"$job"', '".+"')
        .replace('"$namespace"', '".*"')
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", [])
    }
    for rule in RULES["groups"][0]["rules"]:
        # Without the comparison: an alert has data only while it fires.
        metric, _, _ = rule["expr"].rpartition(" > ")
        found[f"alert: {rule['alert']}"] = metric or rule["expr"].rpartition(" == ")[0]
    return found


BOARDS = {
    "vLLM": {
        "label_values": ("vllm:num_requests_running",),
        "quantiles": (
            *("vllm:e2e_request_latency_seconds", "vllm:time_to_first_token_seconds"),
            *("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
            *("vllm:request_time_per_output_token_seconds", "vllm:request_queue_time_seconds"),
            *("vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds"),
            *("vllm:request_inference_time_seconds", "vllm:request_prompt_tokens"),
            *("vllm:request_generation_tokens", "vllm:request_max_num_generation_tokens"),
        ),
        "rates": (
            *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"),
            *("vllm:num_preemptions_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
        ),
        "gauges": (
            *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
            *("vllm:gpu_cache_usage_perc", "vllm:cache_config_info"),
        ),
    },
    "TGI": {
        "quantiles": (
            *("tgi_request_duration", "tgi_request_queue_duration", "tgi_request_validation_duration"),
            *("tgi_request_inference_duration", "tgi_request_mean_time_per_token_duration"),
            *("tgi_request_generated_tokens", "tgi_request_input_length", "tgi_request_max_new_tokens"),
            *("tgi_batch_next_size", "tgi_batch_inference_duration", "tgi_batch_forward_duration"),
            *("tgi_batch_decode_duration", "tgi_batch_filter_duration", "tgi_request_skipped_tokens"),
        ),
        "rates": ("tgi_request_count", "tgi_request_success", "tgi_request_failure", "tgi_batch_inference_count"),
        "gauges": ("tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens"),
    },
    "TensorRT-LLM": {
        "quantiles": (
            *("trtllm_e2e_request_latency_seconds", "trtllm_time_to_first_token_seconds"),
            *("trtllm_time_per_output_token_seconds", "trtllm_request_queue_time_seconds"),
        ),
        "rates": ("trtllm_request_success_total", "trtllm_prompt_tokens_total"),
        "gauges": (
            *("trtllm_num_requests_waiting", "trtllm_num_requests_running", "trtllm_kv_cache_utilization"),
            "trtllm_kv_cache_hit_rate",
        ),
    },
}
"""The metrics that the panels of other servers' boards and of gateways show, by the form of their queries."""


def test_the_dashboard_shows_the_chosen_namespaces_and_jobs_alone() -> None:
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "namespace", "job"]
    for expression in (target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])):
        assert (
            re.findall(r"\b(?:tgi|text_generation)_\w+(?!\w|\{namespace=~\"\$namespace\",job=~\"\$job\")", expression)
            == []
        )


def board_queries() -> dict[str, str]:
    """Return the queries of other boards, by their place."""
    forms = {
        "label_values": "count by (model_name) ({}) == 1",
        "quantiles": f"histogram_quantile(0.99, sum by (le) (rate({{}}_bucket[{INTERVAL}])))",
        "rates": f"sum(rate({{}}[{INTERVAL}]))",
        "gauges": "{}",
    }
    return {
        f"{board}: {name} {form}": forms[form].format(name)
        for board, panels in BOARDS.items()
        for form, names in panels.items()
        for name in names
    }


def autoscaler_queries() -> dict[str, str]:
    """Return the queries of the ScaledObject, for a release whose metrics have the labels of the server under test."""
    args = ("--set", "model.hub=org/model", "--set", "autoscaling.enabled=true")
    (scaled,) = (thing for thing in render(*args, release="demo") if thing["kind"] == "ScaledObject")
    return {f"autoscaler: {trigger['name']}": trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]}


def test_the_alerts_fire_when_they_should() -> None:
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", RULES_TEST]):
        done = subprocess.run(
            [tool("promtool"), *command], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    tested = {
        test["alertname"]
        for group in yaml.safe_load(RULES_TEST.read_text(encoding="utf-8"))["tests"]
        for test in group["alert_rule_test"]
        if test["exp_alerts"]
    }
    assert tested == {rule["alert"] for rule in RULES["groups"][0]["rules"]}


@asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[str]:
    """Run a Prometheus that scrapes a server each second, with the labels that a ServiceMonitor gives; yields its URL."""
    labels = {"namespace": "llm"}
    scrape = {"job_name": "demo-text-generation-metrics", "static_configs": [{"targets": [target], "labels": labels}]}
    settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        tool("prometheus"),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def query(session: aiohttp.ClientSession, url: str, expression: str) -> list[dict[str, object]]:
    """Return the result of an instant query."""
    async with session.get(f"{url}/api/v1/query", params={"query": expression}) as response:
        body = await response.json()
    assert body["status"] == "success", body
    result: list[dict[str, object]] = body["data"]["result"]
    return result


async def exemplars(session: aiohttp.ClientSession, url: str, metric: str) -> set[str]:
    """Return the trace ids of a metric's exemplars of the last minute."""
    now = time.time_ns() / 1e9
    span = {"query": metric, "start": str(now - 60), "end": str(now)}
    async with session.get(f"{url}/api/v1/query_exemplars", params=span) as response:
        found = (await response.json())["data"]
    return {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}


async def send_requests(session: aiohttp.ClientSession, url: str, until: float) -> int:
    """Send requests until a time of the loop; return their number. Some prompts are equal, some requests are refused."""
    sent = 0
    while asyncio.get_running_loop().time() < until:
        body = {
            "inputs": "the same prefix of all prompts " * 4,
            "parameters": {"max_new_tokens": 20 if sent % 5 else 0},
        }
        async with session.post(f"{url}/generate", json=body) as response:
            assert response.status == (200 if sent % 5 else 422)
        sent += 1
    return sent


@asynccontextmanager
async def loaded(folder: Path) -> AsyncIterator[tuple[Stack, Collector, aiohttp.ClientSession, str]]:
    """Run a server that is traced and scraped, and yield it after some load, with the URL of its Prometheus."""
    tool("prometheus")
    write_tokenizer(folder)
    management = free_port()
    flags = (
        "--echo-step-ms",
        "20",
        "--max-batch-size",
        "4",
        "--audit-share",
        "1",
        "--management-port",
        str(management),
    )
    names = ("--metric-names", "vllm,trtllm")
    with (
        collecting() as collector,
        running(folder, *flags, *names, "--otlp-endpoint", collector.endpoint, environ=QUICK, grammars=True) as stack,
    ):
        async with prometheus(folder, f"127.0.0.1:{management}") as url, aiohttp.ClientSession() as session:
            until = asyncio.get_running_loop().time() + LOAD_S
            async with asyncio.TaskGroup() as tasks:
                for _ in range(8):
                    tasks.create_task(send_requests(session, stack.url, until))
            yield stack, collector, session, url


async def without_data(session: aiohttp.ClientSession, url: str, wanted: Mapping[str, str]) -> dict[str, object]:
    """Return the expressions that have no data, by their place."""
    empty: dict[str, object] = {}
    for place, expression in wanted.items():
        result = await query(session, url, expression)
        if not result or any("NaN" in str(series["value"]) for series in result):
            empty[place] = (expression, result)
    return empty


@needs_helm
async def test_every_expression_has_data_after_ten_seconds_of_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with loaded(tmp_path) as (stack, _, session, url):
        wanted = expressions() | autoscaler_queries()
        async with session.get(f"{stack.url}/metrics") as response:
            families = set(re.findall(r"^# TYPE (\w+)", await response.text(), re.MULTILINE))
        for place, expression in list(wanted.items()):
            # The echo engine has no GPU.
            if gpu_metrics := set(re.findall(r"text_generation_gpu_\w+", expression)):
                assert gpu_metrics <= families
                del wanted[place]
        empty = await without_data(session, url, wanted)
        assert empty == {}
        assert await query(session, url, "text_generation_queue_second") == [], "an unknown metric has no data"
    with capsys.disabled():
        print(f"\n{len(wanted)} expressions of dashboard, alerts and autoscaler: {len(empty)} without data")


async def test_the_boards_of_other_servers_have_data_and_latencies_have_exemplars(tmp_path: Path) -> None:
    async with loaded(tmp_path) as (_, collector, session, url):
        assert await without_data(session, url, board_queries()) == {}
        for metric in ("tgi_request_duration_bucket", "vllm:e2e_request_latency_seconds_bucket"):
            traced = await exemplars(session, url, metric)
            assert traced
            assert traced <= {span.trace_id for span in collector.spans}
