"""Ranks agree whether all could create the low-latency collectives: processes over gloo, with inboxes in mapped files."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

MEMBER = """
import sys, torch, torch.distributed as dist
from text_generation_shard.engines.torch.parallel import symmetric
rank, folder = int(sys.argv[1]), sys.argv[2]
mapped = []
equal = torch.equal

def create(fault):
    def map_inbox(owner, elements):
        mapped.append(torch.from_file(f"{folder}/{fault}-{owner}", shared=True, size=elements, dtype=torch.int64))
        return mapped[-1]

    def allocate(elements, dtype, device):
        if fault == "memory" and rank:
            raise RuntimeError("no symmetric memory here")
        return map_inbox(rank, elements)

    symmetric.MAX_GATHERED_ROW = 2 * 256
    symmetric.allocate_symmetric = allocate
    symmetric.rendezvous = lambda memory: [map_inbox(owner, len(memory.view(-1))).data_ptr() for owner in range(2)]
    torch.equal = (lambda first, second: False) if fault == "values" and rank else equal
    return symmetric.create_low_latency_collectives(torch.device("cpu")) is not None

dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
print({fault: create(fault) for fault in ("memory", "values", "none")})
"""


@pytest.mark.full
def test_all_ranks_create_the_collectives_or_none() -> None:
    with tempfile.TemporaryDirectory() as folder:
        members = [
            subprocess.Popen(
                [sys.executable, "-c", MEMBER, str(rank), folder],
                env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            outputs = [member.communicate(timeout=100)[0] for member in members]
        finally:
            for member in members:
                member.kill()
    outcomes = {"memory": False, "values": False, "none": True}
    assert [lines.splitlines()[-1] for lines in outputs] == [str(outcomes)] * 2
