"""The collectives of a group of processes, over gloo on the CPU, over NCCL and symmetric memory with GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.parallel import group
from text_generation_shard.engines.torch.parallel.group import join_group
from text_generation_shard.engines.torch.parallel.tensor_parallel import TensorParallelRank

MEMBER = """
import os, sys, torch
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.torch.parallel.group import join_group
from text_generation_shard.engines.torch.parallel.symmetric import succeed_together
rank, size, address, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], torch.device(sys.argv[4])
group = join_group(ShardConfig(rank=rank, world_size=size, group_address=address), device)
assert (group.tp.rank, group.tp.world_size) == (rank, size)
everyone = range(size)

def expect(found, expected):
    assert torch.equal(found.cpu(), torch.as_tensor(expected).to(found.dtype)), (found, expected)

# Low-latency, one-shot and NCCL sizes; odd sizes; each dtype.
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for shape in ((1,), (3, 5), (7, 576), (5, 4096), (256, 4096)):
        tensor = torch.full(shape, float(rank + 1), dtype=dtype, device=device)
        group.all_reduce(tensor)
        expect(tensor, torch.full(shape, float(sum(r + 1 for r in everyone))))

# A low-latency size and a larger one; rows are padded.
for rows, width in ((2, 3), (2, 150_000)):
    parts = [torch.arange(float(rows * width)).view(rows, width) + 10 * r for r in everyone]
    out = torch.full((rows, width * size + 1), torch.nan, device=device)
    group.all_gather_last_dim(parts[rank].to(device), out[:, :-1])
    expect(out[:, :-1], torch.cat(parts, dim=1))
    assert out[:, -1].isnan().all()

tensor = torch.full((4,), float(rank + 7), device=device)
group.broadcast(tensor)
expect(tensor, [7.0] * 4)

# If a stage fails on one rank, all ranks stop.
stages = []
def fail(_):
    if rank == 1:
        raise RuntimeError("not available")
steps = (lambda _: stages.append("first"), fail, lambda _: stages.append("last"))
assert succeed_together(steps, device, "done without") is None and stages == ["first"]
assert succeed_together((lambda _: 1, lambda one: one + 1), device, "done without") == 2

if device.type == "cuda":
    assert group._all_reduce.is_one_shot and group._low_latency is not None
    # One-shot and low-latency.
    for static in (
        torch.zeros(64, 4096, dtype=torch.bfloat16, device=device),
        torch.zeros(4, 4096, dtype=torch.float32, device=device),
    ):
        graph = torch.cuda.CUDAGraph()
        group.all_reduce(static)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            group.all_reduce(static)
            group.all_reduce(static)
        for round in range(100):
            static.fill_(rank + round % 3)
            graph.replay()
            expect(static, torch.full(static.shape, float(size * sum(r + round % 3 for r in everyone))))

if rank == 0:
    group.leader.broadcast(9, b"bye")
    assert group.leader.gather() == [r for r in everyone if r]
else:
    assert bytes(group.follower.receive()[1]) == b"bye"
    group.follower.answer(rank)
group.close()
print("done")
"""


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield f"unix://{folder}/group"


def run(size: int, address: str, device: str) -> list[tuple[int, str, str]]:
    """Run the members; return exit code, stdout and stderr of each. Each sees its own GPU, if any."""
    members = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", MEMBER, str(rank), str(size), address, device],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        results = [member.communicate(timeout=100) for member in members]
    finally:
        for member in members:
            member.kill()
    return [(member.returncode, *outputs) for member, outputs in zip(members, results, strict=True)]


def test_two_processes_compute_together(address: str) -> None:
    for code, output, stderr in run(2, address, "cpu"):
        assert stderr == ""  # torch.distributed logs nothing
        assert code == 0
        assert output.endswith("done\n")
        assert "joined" in output


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_compute_together_also_in_a_graph(address: str) -> None:
    for code, _, stderr in run(torch.cuda.device_count(), address, "cuda:0"):
        assert code == 0, stderr


def test_a_group_of_one_opens_nothing() -> None:
    alone = join_group(ShardConfig(), torch.device("cpu"))
    assert alone.tp == TensorParallelRank(0, 1)
    tensor = torch.tensor([1.0, 2.0])
    out = torch.full((1, 2), torch.nan)
    alone.all_reduce(tensor)
    alone.broadcast(tensor)
    alone.all_gather_last_dim(tensor.view(1, 2), out)
    alone.close()
    assert tensor.tolist() == out[0].tolist() == [1.0, 2.0]
    assert not torch.distributed.is_initialized()


def test_a_missing_rank_is_an_error_in_one_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "JOIN_TIMEOUT", 0.05)
    config = ShardConfig(rank=0, world_size=3, group_address=address)
    with pytest.raises(EngineError, match=r"^ranks 1, 2 did not connect within 0\.05 s$"):
        join_group(config, torch.device("cpu"))
    config = ShardConfig(rank=2, world_size=3, group_address=address)
    with pytest.raises(EngineError, match=r"^rank 0 could not be met at .*group within 0\.05 s: .*No such file"):
        join_group(config, torch.device("cpu"))
    assert not Path(address.removeprefix("unix://")).exists()
