"""The whole server on a machine with two GPUs: stand-ins for NVML and for TensorRT-LLM."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import yaml
from nvml_standin import FAKES, GIB, Machine, gpu
from stack import Stack, running
from standin import python_path
from streams import Streams

from text_generation_shard.gpus import core_list

pytestmark = pytest.mark.system

TOKENS = 150
PROMPT = " one" * 5
"""The stand-in repeats the prompt it gets: after a move the same text only if all tokens are the same."""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    cores = sorted(os.sched_getaffinity(0))
    return Machine(tmp_path / "machine", [gpu(0, cpus=cores[:1]), gpu(1, cpus=cores, used=20 * GIB)])


@pytest.fixture
def stack(echo_model: Path, machine: Machine) -> Iterator[Stack]:
    environ = machine.environ | {"PYTHONPATH": f"{python_path('1.3')}:{FAKES}", "TRTLLM_STANDIN_STEP_MS": "10"}
    with running(echo_model, "--num-replicas", "2", engine="tensorrt-llm", environ=environ) as stack:
        yield stack


async def metric(session: aiohttp.ClientSession, stack: Stack, name: str) -> dict[str, float]:
    """Return the samples of a metric by their labels."""
    async with session.get(f"{stack.url}/metrics") as response:
        lines = [line.rpartition(" ") for line in (await response.text()).splitlines()]
    return {sample[len(name) :]: float(value) for sample, _, value in lines if sample.partition("{")[0] == name}


async def test_an_event_of_a_gpu_takes_its_replica_out_and_its_requests_move(
    stack: Stack, machine: Machine, session: aiohttp.ClientSession
) -> None:
    shown = {'{replica="0",gpu="0",uuid="GPU-0000"}': 10 * GIB, '{replica="1",gpu="1",uuid="GPU-1000"}': 20 * GIB}
    async with asyncio.timeout(10):  # a second after the session opened, without a request
        while await metric(session, stack, "text_generation_gpu_memory_used_bytes") != shown:  # noqa: ASYNC110 - scrapes
            await asyncio.sleep(0.05)
    async with asyncio.TaskGroup() as tasks:
        streams = Streams(session, tasks)
        await streams.open(stack.url, 1, TOKENS, PROMPT)
        await streams.all_ended()
        await streams.open(stack.url, 8, TOKENS, PROMPT)
        if len(os.sched_getaffinity(0)) > 1:
            first = sorted(os.sched_getaffinity(0))[0]
            assert {frozenset(os.sched_getaffinity(thread.id)) for thread in stack.shard(0).threads()} == {
                frozenset({first})
            }
        machine.event(1, xid=31)
        machine.event(0, xid=79)
        await streams.all_ended()
    assert {(stream.end, stream.tokens, stream.text) for stream in streams.streams} == {
        ("finished", TOKENS, streams.streams[0].text)
    }
    await asyncio.to_thread(stack.wait_for, "shard serves again")
    (fault,) = [record for record in stack.records if record["event"] == "a GPU failed"]
    assert (fault["process"], fault["fault"]) == ("shard-0", "GPU 0 (GPU-0000): Xid 79, GPU has fallen off the bus")
    (died,) = [record for record in stack.records if record["event"] == "shard died"]
    assert (died["replica"], died["exit_code"]) == (0, 1)
    assert (await metric(session, stack, "text_generation_request_moves_total"))[""] > 0


def test_env_prints_the_machine_and_the_settings(machine: Machine) -> None:
    """Without a model `--env`, which TGI has, does the same."""
    environ = os.environ | machine.environ | {"API_KEY": "a-secret", "CUDA_VISIBLE_DEVICES": "1"}
    command = [Path(sys.executable).with_name("text-generation-launcher"), "--env", "--max-batch-size", "7"]
    report = yaml.safe_load(subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert (report["driver"], report["devices"]) == ("580.95.05 (CUDA 13.0)", 1)
    first, second = report["gpus"]
    cores = core_list(os.sched_getaffinity(0))
    expected = {"index": 1, "uuid": "GPU-1000", "memory_mib": 144384, "compute_capability": "9.0", "numa_nodes": [1]}
    expected |= {"near_cores": cores, "visible": True, "mig": "off"}
    assert not first["visible"]
    assert {name: second[name] for name in expected} == expected
    assert (report["settings"]["max_batch_size"], report["settings"]["api_key"]) == (7, "***")
