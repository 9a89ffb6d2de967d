"""The engine's own processes: TensorRT-LLM starts one a GPU, also for a single one, and waits for ever for one that died.

They are not our children but those of MPI's helper, so they are looked for among all processes below this one.
"""

from __future__ import annotations

from text_generation_shard.processes import Process, command, descendants

WORDS = ("mpi4py.futures.server", "mgmn_leader_node", "mgmn_worker_node")
"""What the command line of a process that runs the engine holds."""


def workers() -> list[Process]:
    """Those below this process that run the engine."""
    return [process for process in descendants() if any(word in command(process.pid) for word in WORDS)]
