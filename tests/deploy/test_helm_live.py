"""The arguments that the Helm chart renders, in real processes: probes, metrics, and a router that finds its shards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import aiohttp
import grpc
from byte_tokenizer import write_tokenizer
from chart import CHART, Pod, needs_helm, pods, render
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ports import free_port
from stack import Stack, running

pytestmark = needs_helm

NOT_HERE = frozenset({"model-id", "port", "json-output"})
"""Flags that the stack gives to the launcher."""


def args_of(pod: Pod, **changed: object) -> list[str]:
    """Return the arguments of a pod with other values, those of this machine; None leaves an argument out."""
    values = {name.replace("_", "-"): value for name, value in changed.items()}
    named = {arg.removeprefix("--").partition("=")[0]: arg for arg in pod.args}
    assert values.keys() <= named.keys()
    kept = [arg for name, arg in named.items() if name not in NOT_HERE | values.keys()]
    return kept + [f"--{name}={value}" for name, value in values.items() if value is not None]


def smoke_test(*args: str | Path) -> None:
    """Run the test that `helm test` runs."""
    command = [sys.executable, CHART / "files" / "smoke_test.py", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "ready, and generated:" in done.stdout, done.stderr


def stop(stack: Stack, pod: Pod) -> None:
    """Stop a launcher as kubelet does; it must end by itself within the grace period."""
    stack.launcher.terminate()
    assert stack.wait(pod.spec["terminationGracePeriodSeconds"]) == 0


async def test_a_cell_answers_its_probes_and_shows_metrics_without_a_key(tmp_path: Path) -> None:
    """The rendered arguments in a real process; only the model, the addresses and the place of the keys differ."""
    (tmp_path / "api-keys.toml").write_text('keys = [{key = "sk-one"}]')
    write_tokenizer(tmp_path)
    secrets = "secrets.apiKeys.secret=keys,monitoring.serviceMonitor.enabled=true,flags.shutdown-delay=0"
    (pod,) = pods(render("--set", "model.claim=models", "--set", secrets))
    management = free_port()
    args = args_of(pod, management_port=management, api_keys_file=tmp_path / "api-keys.toml")
    with running(tmp_path, *args, grammars=True) as stack:
        async with aiohttp.ClientSession() as session:
            probes = [pod.container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
            for url, path in (
                *((f"http://127.0.0.1:{management}", probe["path"]) for probe in (*probes, {"path": "/metrics"})),
                (stack.url, "/metrics"),
            ):
                async with session.get(url + path) as response:
                    assert response.status == 200, url + path
            async with session.post(f"{stack.url}/generate", json={"inputs": "Hello"}) as response:
                assert response.status == 401
        smoke_test(stack.url, tmp_path / "api-keys.toml")
        stop(stack, pod)


async def test_the_shards_of_a_split_server_are_ready_when_their_router_drives_them(tmp_path: Path) -> None:
    """The probes of a shard pod: alive without a router, ready with one, which finds the shard by name."""
    write_tokenizer(tmp_path)
    values = "shape=split,tls.enabled=false,router.discovery=dns,flags.shutdown-delay=0"
    parts = {pod.part: pod for pod in pods(render("--set", "model.claim=models", "--set", values))}
    shard_port, health_port, management = free_port(), free_port(), free_port()
    shards = args_of(parts["shards"], shard_hostname="127.0.0.1", shard_tcp_port=shard_port, health_port=health_port)
    ready = parts["shards"].container["readinessProbe"]["grpc"]["service"]

    async def serves(service: str, *, wait: bool = False) -> bool:
        """Return the health of a service; wait until it is good."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{health_port}") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=service), timeout=30
            )
            async for answer in watch:
                good: bool = answer.status == health_pb2.HealthCheckResponse.SERVING
                if good or not wait:
                    return good
        raise AssertionError(service)

    with running(tmp_path, *shards, grammars=True) as shard_pod:
        assert (await serves(""), await serves(ready)) == (True, False)
        found = {"shards": f"dns://localhost:{shard_port}", "peers": None, "management_port": management}
        with running(tmp_path, *args_of(parts["router"], **found), grammars=True) as router_pod:
            assert await serves(ready, wait=True)
            async with aiohttp.ClientSession() as session:
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    path = parts["router"].container[probe]["httpGet"]["path"]
                    async with session.get(f"http://127.0.0.1:{management}{path}") as response:
                        assert response.status == 200, path
            smoke_test(router_pod.url)
            stop(router_pod, parts["router"])
        assert (await serves(""), await serves(ready)) == (True, False)
        stop(shard_pod, parts["shards"])
