"""How the ranks of a TensorRT-LLM engine come to be, as far as the launcher has a say: environment and command line. Pure.

The engine spawns its ranks with MPI, also where there is one only. MPI believes what the environment says about who started the
process. Where the launcher itself was started by Slurm or by mpirun, what these left there is about the launcher: the
shard's MPI then looks for a server that is not its own, or for room on nodes of the job (ai-dynamo/dynamo PRs #808, #992), and
`trtllm-llmapi-launch` takes SLURM_PROCID for the rank of every process, whatever mpirun says.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from text_generation_launcher import handover

_STARTED_BY = {
    "SLURM_": None,
    "PMI_": None,
    "PMIX_": "PMIX_RANK",
    "OMPI_": "OMPI_COMM_WORLD_SIZE",
    "PRTE_": "PRTE_LAUNCHED",
}
"""How the names begin of what Slurm and mpirun leave to the processes they start; the variable that shows that they did."""

_SETTING = re.compile(r"(OMPI|PMIX|PRTE)_(MCA_|PREFIX$|HOME$)|(OMPI|PRTE)_ALLOW_RUN_AS_ROOT")
"""Names among them that people and images set."""

_SET_BY_MPIRUN = re.compile(
    r"OMPI_MCA_(orte_|ess|pmix$|initial_wdir$|mpi_oversubscribe$|shmem_RUNTIME_QUERY_hint$|PREFIXES$|cpu_type$|num_procs$)"
)
"""Settings that mpirun makes for its ranks: what `mpirun env` shows, of Open MPI 4.1.4 and 5.0.11."""

AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
"""Without them Open MPI's mpirun, and the daemon through which Open MPI 5 spawns, refuse to run as root: most containers do."""

DEFAULTS = {
    # Open MPI 4 counts a rank for each core, and spawns none where there are too few; TensorRT-LLM then waits for ever.
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    # gRPC's handlers of fork have nothing to do here: what is spawned are new programs.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}


def handover_command() -> tuple[str, ...]:
    """The program that rank 0 runs."""
    return (sys.executable, "-P", "-m", handover.__name__)


def environment(environ: Mapping[str, str], *, as_root: bool) -> dict[str, str]:
    """The environment of a shard that starts ranks: without what is left of who started us, with what Open MPI needs.

    What is set already stays as it is.
    """
    kept = {name: value for name, value in environ.items() if not _is_left(name, environ)}
    return {**DEFAULTS, **(AS_ROOT if as_root else {}), **kept}


def _is_left(name: str, environ: Mapping[str, str]) -> bool:
    prefix = next((prefix for prefix in _STARTED_BY if name.startswith(prefix)), None)
    if prefix is None:
        return False
    sign = _STARTED_BY[prefix]
    if sign is not None and sign not in environ:
        return False
    return _SETTING.match(name) is None or _SET_BY_MPIRUN.match(name) is not None


def mpirun_command(ranks: int, *, as_root: bool) -> tuple[str, ...]:
    """Start `ranks` ranks on this machine, as TensorRT-LLM's script wants them; rank 0 hands its environment over.

    --oversubscribe: a rank waits for a GPU, not for a processor of its own, of which there may be fewer. --bind-to none: else
    rank 0, with all the threads of its engine, is bound to one core, or to one package.
    """
    return (
        *("mpirun", "-n", str(ranks), "--oversubscribe", "--bind-to", "none"),
        *(("--allow-run-as-root",) if as_root else ()),
        *("trtllm-llmapi-launch", *handover_command()),
    )


def search_path(environ: Mapping[str, str]) -> str:
    """PATH for mpirun: the script runs what it finds there as `python3`, and that must be the Python that runs us."""
    own = str(Path(sys.executable).parent)
    return os.pathsep.join((own, environ.get("PATH", os.defpath)))


def survives_splitting(words: tuple[str, ...]) -> bool:
    """Whether a shell that splits and expands these words gets them back: the script of 1.2 puts its command through that."""
    return all(re.fullmatch(r"[\w@%+=:,./-]+", word) for word in words)
