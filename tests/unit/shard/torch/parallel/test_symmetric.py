"""Ranks agree whether all could create the low-latency collectives: processes over gloo, with inboxes in mapped files."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest
from full_grid import full

MEMBER = """
import sys, torch, torch.distributed as dist
from text_generation_shard.engines.torch.parallel import symmetric
rank, fault, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
mapped = []

def map_inbox(owner, elements):
    mapped.append(torch.from_file(f"{folder}/{owner}", shared=True, size=elements, dtype=torch.int64))
    return mapped[-1]

def no_memory(elements, dtype, device):
    raise RuntimeError("no symmetric memory here")

def rendezvous(memory):
    return [map_inbox(owner, len(memory.view(-1))).data_ptr() for owner in range(2)]

symmetric.MAX_GATHERED_ROW = 2 * 256
symmetric.allocate_symmetric = no_memory if fault == "memory" and rank else lambda elements, dtype, device: map_inbox(rank, elements)
symmetric.rendezvous = rendezvous
if fault == "values" and rank:
    torch.equal = lambda first, second: False
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
print("opened" if symmetric.create_low_latency_collectives(torch.device("cpu")) else "done without")
"""


@pytest.mark.parametrize(
    ("fault", "outcome"), [("none", "opened"), full("memory", "done without"), ("values", "done without")]
)
def test_all_ranks_create_the_collectives_or_none(fault: str, outcome: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        members = [
            subprocess.Popen(
                [sys.executable, "-c", MEMBER, str(rank), fault, folder],
                env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            outputs = [member.communicate(timeout=60)[0] for member in members]
        finally:
            for member in members:
                member.kill()
    assert [lines.splitlines()[-1] for lines in outputs] == [outcome] * 2
