"""Shards in a Ray cluster: the commands of docs/ray.md; the loss of an actor, a node, the launcher; no cluster at all."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
import yaml
from byte_tokenizer import write_tokenizer
from certificates import write_certificates
from page import DOCS, commands
from ray.cluster_utils import Cluster
from stack import Stack, still_running

from text_generation_launcher.config import read_config

GONE_WITHIN_S = 2.0
ENDS_WITHIN_S = 30.0
STREAMS = 8
BODY = {"inputs": "The quick brown fox. ", "parameters": {"max_new_tokens": 150}}


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """A folder for clusters that `ray start` starts; they end with the test."""
    folder = Path(tempfile.mkdtemp(prefix="r-"))  # a short path, because it contains sockets
    yield folder
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("RAY_TMPDIR") == str(folder):
                process.kill()
    shutil.rmtree(folder, ignore_errors=True)


async def test_the_commands_of_the_page_start_a_cluster_and_a_server(
    session: aiohttp.ClientSession, ray_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, node, export, launch = (shlex.split(line, comments=True) for line in commands("ray.md", "Start"))
    for variable in export[1:]:
        monkeypatch.setenv(*variable.split("=", 1))
    for args in (launch, *launched_in_kubernetes()):
        assert read_config(args[1:], {}).places == "ray"
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    write_certificates(tmp_path)
    monkeypatch.chdir(tmp_path)  # the page names the certificates without a folder
    environ = {"RAY_TMPDIR": str(ray_folder), "RAY_memory_monitor_refresh_ms": "0"}
    ray = str(Path(sys.executable).with_name("ray"))
    for command in (head, [word.replace("HEAD", "127.0.0.1") for word in node]):
        done = await asyncio.to_thread(
            subprocess.run, [ray, *command[1:]], env=os.environ | environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    # The echo engine instead of a large model on GPUs: its shards cannot be split.
    flags = launch[launch.index("--places") : launch.index("--num-shard")]
    flags[flags.index("4")] = "2"
    stack = Stack(tmp_path, *flags, environ=environ)
    try:
        stack.wait_for("ready")
        assert await ask(session, stack.url)
        assert len(shards(tmp_path)) == 2
        stack.launcher.terminate()
        assert await asyncio.to_thread(stack.wait) == 0
        assert shards(tmp_path) == []
    finally:
        stack.close()


def launched_in_kubernetes() -> list[list[str]]:
    """Return the command lines of the launcher in the manifests of the page."""
    (manifests,) = re.findall(r"^```yaml\n(.*?)^```", (DOCS / "ray.md").read_text(), re.MULTILINE | re.DOTALL)
    found = [each for each in yaml.safe_load_all(manifests) if each["kind"] == "Deployment"]
    assert len(found) == 1
    return [["", *each["args"]] for each in found[0]["spec"]["template"]["spec"]["containers"]]


@pytest.mark.parametrize("signalled", [False, True])
def test_a_cluster_that_does_not_answer_ends_the_launcher(tmp_path: Path, *, signalled: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        stack = Stack(tmp_path, "--places", "ray", "--insecure", environ={"RAY_ADDRESS": address})
        began = time.monotonic()
        try:
            if signalled:
                silent.accept()[0].close()
                stack.launcher.terminate()
            assert stack.wait(ENDS_WITHIN_S) == (0 if signalled else 1)
        finally:
            stack.close()
    assert time.monotonic() - began < (10 if signalled else ENDS_WITHIN_S)
    if not signalled:
        (reason,) = (record["reason"] for record in stack.records if record["event"] == "cannot start")
        assert reason == f"no Ray cluster answers within 20 s at {address} (RAY_ADDRESS)"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The head of a cluster, which has no room for shards."""
    os.environ |= {"RAY_memory_monitor_refresh_ms": "0"}  # other programs may use the memory of this machine
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


def shards(model: Path) -> list[psutil.Process]:
    """Return the shards that serve this model. They are children of Ray's processes, not of the launcher."""
    words = {"text_generation_shard", str(model)}
    return [each for each in psutil.process_iter(["cmdline"]) if words <= set(each.info["cmdline"] or ())]


async def ask(session: aiohttp.ClientSession, url: str) -> str:
    async with session.post(f"{url}/generate", json=BODY) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["generated_text"])


async def test_a_lost_actor_and_a_lost_node_cost_no_request(
    cluster: Cluster, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    stack = Stack(
        tmp_path,
        *("--places", "ray", "--num-replicas", "2", "--echo-step-ms", "20", "--insecure"),
        environ={"RAY_ADDRESS": cluster.address},
    )
    try:
        stack.wait_for("ready")
        expected = await ask(session, stack.url)
        first = shards(tmp_path)
        assert len(first) == 2
        assert len({shard.parent() for shard in first} - set(stack.children())) == 2

        async def survives(lose: str) -> float:
            """Lose something while both replicas serve; return the seconds until its shard had ended."""
            before = shards(tmp_path)
            async with asyncio.TaskGroup() as tasks:
                streams = [tasks.create_task(ask(session, stack.url)) for _ in range(STREAMS)]
                await asyncio.sleep(0.5)  # in the middle of the answers
                began = time.monotonic()
                if lose == "actor":
                    actor = before[0].parent()
                    assert actor is not None
                    actor.kill()
                else:
                    await asyncio.to_thread(cluster.remove_node, nodes[1], allow_graceful=False)
                while len(left := still_running(before, 0.05)) == len(before):
                    assert time.monotonic() < began + 10
                seconds = time.monotonic() - began
                assert len(left) == 1
            assert [stream.result() for stream in streams] == [expected] * STREAMS
            return seconds

        seconds = await survives("actor")
        print(f"shard gone {seconds:.2f} s after its actor")
        assert seconds <= GONE_WITHIN_S
        await asyncio.to_thread(stack.wait_for, "shard serves again")
        assert len(shards(tmp_path)) == 2
        seconds = await survives("node")
        print(f"shard gone {seconds:.2f} s after its node")
        nodes[1] = cluster.add_node(num_cpus=1)  # the replica waits for room
        await asyncio.to_thread(stack.wait_for, "shard serves again")
        assert await ask(session, stack.url) == expected
        remaining = [*shards(tmp_path), *stack.children()]
        stack.launcher.terminate()
        assert await asyncio.to_thread(stack.wait) == 0
        assert not still_running(remaining, GONE_WITHIN_S)
        assert shards(tmp_path) == []
        assert stack.left_behind() == []
    finally:
        stack.close()


async def test_no_shard_outlives_a_launcher_that_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    stack = Stack(tmp_path, "--places", "ray", "--insecure", environ={"RAY_ADDRESS": cluster.address})
    try:
        stack.wait_for("ready")
        (shard,) = shards(tmp_path)
        began = time.monotonic()
        stack.launcher.kill()
        assert not still_running([shard], 10.0)
        print(f"shard gone {time.monotonic() - began:.2f} s after the launcher")
        assert stack.left_behind() == []
    finally:
        stack.close()
