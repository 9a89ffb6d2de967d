"""Audits of the whole server, and the replay of a record by the launcher."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from array import array
from pathlib import Path

import aiohttp
import pytest
from full_grid import full
from stack import running

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.audit.records import record_of
from text_generation_router.audit.served import Served
from text_generation_router.audit.verdict import Judgement, Verdict
from text_generation_router.request import Request, RequestId

pytestmark = pytest.mark.system
REPLAY = Path(sys.executable).with_name("text-generation-launcher"), "replay"
FLAGS = ("--audit-share", "1", "--audit-busy", "1")
ANSWERS = 12


@pytest.mark.parametrize("workers", [full("1"), "2"])
async def test_requests_of_a_server_are_audited(echo_model: Path, workers: str) -> None:
    with running(echo_model, *FLAGS, "--http-workers", workers, "--num-replicas", "2") as stack:
        async with aiohttp.ClientSession(stack.url) as client:
            for number in range(ANSWERS):
                parameters = {"max_new_tokens": 20, "stop": ["never"] if number % 2 else ["hills"]}
                body = {"inputs": f"Tell me {number} things about the hills and the sea", "parameters": parameters}
                async with client.post("/generate", json=body) as response:
                    assert response.status == 200
                    assert "details" not in await response.json()
            async with asyncio.timeout(30):
                while True:
                    async with client.get("/metrics") as response:
                        text = await response.text()
                    found = dict(re.findall(r"^text_generation_audits_total\{verdict=\"(\w+)\"\} (\S+)$", text, re.M))
                    if float(found["same"]) == ANSWERS:
                        break
                    await asyncio.sleep(0.05)
            assert {name for name, count in found.items() if float(count)} == {"same"}
            async with client.get("/info") as response:
                assert (await response.json())["isolated"] == []


def a_record(tokens: tuple[int, ...]) -> bytes:
    served = Served(Request(RequestId(3), (5, 6, 7), 4))
    served.tokens, served.logprobs = array("I", tokens), array("f", [-0.5] * 4)
    info = pb.InfoResponse(engine="echo", max_sequence_length=100)
    return record_of(served, Judgement(Verdict.DIFFERENT), pb.TokenScores(logprobs=[-0.5] * 4), info, "none")


def replayed(folder: Path, record: bytes) -> subprocess.CompletedProcess[str]:
    path = folder / "record.json"
    path.write_bytes(record)
    arguments = ("--model-id", folder, "--engine", "echo")
    return subprocess.run([*REPLAY, path, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("tokens", "verdict"),
    [pytest.param((5, 6, 7, 5), "same", marks=pytest.mark.full), ((5, 6, 9, 5), "different")],
)
def test_the_launcher_replays_a_record(tmp_path: Path, tokens: tuple[int, ...], verdict: str) -> None:
    done = replayed(tmp_path, a_record(tokens))
    found = json.loads(done.stdout)
    assert (found["verdict"], done.returncode) == (verdict, 0 if verdict == "same" else 1), done.stderr
    if verdict == "different":
        assert (found["position"], found["served"], found["drawn"]) == (2, 9, 7)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"stopping": {}}, "max_new_tokens must be at least 1"),
        pytest.param({"prompt_of": 1}, "prompt_of 1 is not that of an earlier placement", marks=pytest.mark.full),
    ],
)
def test_the_shard_refuses_a_changed_record_in_one_line(
    tmp_path: Path, change: dict[str, object], problem: str
) -> None:
    record = json.loads(a_record((5, 6, 7, 5)))
    done = replayed(tmp_path, json.dumps(record | {"order": record["order"] | change}).encode())
    assert (done.returncode, done.stdout) == (1, "")
    (told,) = (line for line in done.stderr.splitlines() if "cannot replay" in line)
    assert problem in told
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "replay RECORD"),
        (["/dev/null", "--model-id", "/", "--engine", "echo"], 1, "/dev/null is no record of an audit"),
    ],
)
def test_a_command_line_without_a_record_is_refused(arguments: list[str], code: int, text: str) -> None:
    done = subprocess.run([*REPLAY, *arguments], capture_output=True, text=True)
    assert done.returncode == code
    assert text in done.stderr
