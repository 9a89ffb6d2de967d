"""One replica over two hosts, which are network namespaces: the text of a single process, and the loss of a node."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from byte_tokenizer import write_tokenizer
from network_namespaces import ip, two_hosts
from stack import Stack, running, still_running
from tiny_transformers import SHAPE, random_model, save
from transformers import LlamaConfig

pytestmark = [pytest.mark.system, pytest.mark.full, pytest.mark.timeout(300)]

LEADER, OTHER = "10.89.15.1", "10.89.15.2"
ENDED_WITHIN_S = 2.0
VANISHED_WITHIN_S = 10.0
TORCH = ("--device", "cpu", "--dtype", "float32", "--insecure")
PROMPT = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 24}}
ASK = f"""
import sys, urllib.request
request = urllib.request.Request(sys.argv[1] + "/generate", {json.dumps(PROMPT).encode()!r},
                                 {{"Content-Type": "application/json"}})
print(urllib.request.urlopen(request, timeout=120).read().decode())
"""


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, ...]]]:
    """The commands that run a command on each of two hosts."""
    with two_hosts(LEADER, OTHER) as commands:
        yield commands


def answer(url: str, within: tuple[str, ...] = ()) -> str:
    """Return the text that the server generates, asked on its own host."""
    reply = subprocess.run([*within, sys.executable, "-c", ASK, url], check=True, capture_output=True, timeout=120)
    return str(json.loads(reply.stdout)["generated_text"])


def shards(stack: Stack) -> list[psutil.Process]:
    return [child for child in stack.children() if "text_generation_shard" in child.cmdline()]


def test_a_replica_over_two_hosts(tmp_path: Path, hosts: list[tuple[str, ...]]) -> None:
    """Nodes as a LeaderWorkerSet starts them: the same text as one process; after the loss of a node the group forms again."""
    save(random_model(LlamaConfig(**SHAPE | {"vocab_size": 265})), tmp_path)
    write_tokenizer(tmp_path)
    with running(tmp_path, *TORCH, engine="torch") as whole:
        expected = answer(whole.url)
    group = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": LEADER, "SHARD_TOKEN": "a-token"}
    with ExitStack() as stacks:
        nodes = []
        for number, within in enumerate(hosts):
            environ = group | {"LWS_WORKER_INDEX": str(number)}
            nodes.append(Stack(tmp_path, *TORCH, engine="torch", environ=environ, within=within))
            stacks.callback(nodes[number].close)
        leader, other = nodes
        leader.wait_for("ready")
        other.wait_for("ready")
        assert not any("text_generation_router" in child.cmdline() for child in other.children())
        assert answer(leader.url, hosts[0]) == expected
        for lost, left in ((other, leader), (leader, other)):
            remaining = shards(left)
            killed = time.monotonic()
            shards(lost)[0].kill()
            assert not still_running(remaining, ENDED_WITHIN_S)
            print(f"all ranks ended after {time.monotonic() - killed:.2f} s")
            for node in nodes:
                node.wait_for("shard serves again")
            print(f"all ranks serve again after {time.monotonic() - killed:.2f} s")
            assert answer(leader.url, hosts[0]) == expected
        remaining = [*shards(leader), *shards(other)]
        cut = time.monotonic()
        ip("-n", hosts[1][-1], "link", "set", "eth0", "down")
        assert not still_running(remaining, VANISHED_WITHIN_S)
        print(f"all ranks ended {time.monotonic() - cut:.2f} s after the network was cut")
        ip("-n", hosts[1][-1], "link", "set", "eth0", "up")
        for node in nodes:
            node.wait_for("shard serves again")
        assert answer(leader.url, hosts[0]) == expected
