"""Alerts and dashboard: the rules' own tests, and every expression on a Prometheus that scrapes a server under load."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml
from byte_tokenizer import write_tokenizer
from chart import ROOT, free_port, needs_helm, render
from stack import running

FOLDER = ROOT / "deploy" / "observability"
TOOLS = ROOT / ".cache" / "prometheus" / "usr" / "bin"
LOAD_S = 10.0
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
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", [])
    }
    for rule in RULES["groups"][0]["rules"]:
        # Without the comparison: an alert has data only while it fires.
        metric, _, _ = rule["expr"].rpartition(" > ")
        found[f"alert: {rule['alert']}"] = metric or rule["expr"].rpartition(" == ")[0]
    return found


def autoscaler_queries() -> dict[str, str]:
    """Return the queries of the ScaledObject, for a release whose metrics have the labels of the server under test."""
    args = ("--set", "model.hub=org/model", "--set", "autoscaling.enabled=true")
    (scaled,) = (thing for thing in render(*args, release="demo") if thing["kind"] == "ScaledObject")
    return {f"autoscaler: {trigger['name']}": trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]}


def test_the_alerts_fire_when_they_should() -> None:
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]):
        done = subprocess.run(
            [tool("promtool"), *command], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    tested = {
        test["alertname"]
        for group in yaml.safe_load((FOLDER / "rules_test.yaml").read_text(encoding="utf-8"))["tests"]
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


@needs_helm
async def test_every_expression_has_data_after_ten_seconds_of_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool("prometheus")
    write_tokenizer(tmp_path)
    management = free_port()
    flags = ("--echo-step-ms", "20", "--max-batch-size", "4", "--management-port", str(management))
    with running(tmp_path, *flags) as stack:
        async with prometheus(tmp_path, f"127.0.0.1:{management}") as url, aiohttp.ClientSession() as session:
            until = asyncio.get_running_loop().time() + LOAD_S
            async with asyncio.TaskGroup() as tasks:
                for _ in range(8):
                    tasks.create_task(send_requests(session, stack.url, until))
            wanted = expressions() | autoscaler_queries()
            async with session.get(f"{stack.url}/metrics") as response:
                families = set(re.findall(r"^# TYPE (\w+)", await response.text(), re.MULTILINE))
            empty = {}
            for place, expression in wanted.items():
                # The echo engine has no GPU.
                if gpu_metrics := set(re.findall(r"text_generation_gpu_\w+", expression)):
                    assert gpu_metrics <= families
                    continue
                result = await query(session, url, expression)
                if not result or any("NaN" in str(series["value"]) for series in result):
                    empty[place] = (expression, result)
            assert empty == {}
            assert await query(session, url, "text_generation_queue_second") == [], "an unknown metric has no data"
    with capsys.disabled():
        print(f"\n{len(wanted)} expressions of dashboard, alerts and autoscaler: {len(empty)} without data")
