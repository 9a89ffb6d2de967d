"""Start the MPI ranks of a TensorRT-LLM engine: environment, command line, and the process that runs mpirun.

The engine starts its ranks with MPI, even a single one: `spawn` (the shard itself) or, with --trtllm-launch mpirun, this
module as a process between the launcher and the shard:

    launcher ──► mpi.py ──► mpirun ──► trtllm-llmapi-launch, once per rank
                   │                     rank 0: the engine's server, and env_relay.py as its program
                   │                     others: the engine's workers
                   └──────► shard, in the environment that env_relay.py sends

The script expects to run its program below rank 0. The shard does not run there, for three reasons. mpirun closes every
descriptor it inherited before it starts a rank (odls_default_module.c of Open MPI 4, and PRRTE's of 5), and so the
launcher's lifeline. A SIGTERM to mpirun reaches all ranks at once and SIGKILL follows a second later
(odls_base_sigkill_timeout), while the shard needs its ranks to stop in order. And rank 0 keeps its server running after a
program that failed (`set -e` in the script's subshell, TensorRT-LLM 1.2), so a dead shard would go unnoticed.

The shard is therefore an ordinary child with its own lifeline, signals and exit code. This process ends when the shard
ends, and stops the ranks; if the ranks end first, it stops the shard.
"""

import asyncio
import json
import os
import re
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from text_generation_common import heartbeat
from text_generation_common.command_line import parse_config
from text_generation_common.exit_codes import ExitCode, exit_fields
from text_generation_common.lifeline import follow_parent
from text_generation_common.log import log
from text_generation_common.logs import configure_logging
from text_generation_common.secrets import erase
from text_generation_common.settings import ChildConfig
from text_generation_common.sockets import peer_user
from text_generation_common.stop_signals import StopSignals, run_to_end
from text_generation_common.waiting import first_of
from text_generation_launcher import env_relay, orphans
from text_generation_launcher.shutdown import send

SEPARATOR = "--"
"""Argument before mpirun's command, and before the shard's."""

SHARD_ALONE_TIMEOUT = 5.0
"""Seconds that a shard has to stop once its ranks have ended."""
RANKS_TIMEOUT = 5.0
"""Seconds that the ranks have to end after the script's program has ended."""
MPIRUN_TIMEOUT = 3.0
"""Seconds that mpirun has after SIGTERM: it kills its ranks after one."""
STOP_MARGIN = RANKS_TIMEOUT + MPIRUN_TIMEOUT
"""Seconds that this process may take to end after its shard."""

AS_ROOT = {f"{mpi}_ALLOW_RUN_AS_ROOT{confirm}": "1" for mpi in ("OMPI", "PRTE") for confirm in ("", "_CONFIRM")}
"""Without these, Open MPI's mpirun and the daemon through which Open MPI 5 spawns refuse to run as root, as in containers."""

DEFAULTS = {
    # Open MPI 4 counts one slot per core and starts no ranks if there are too few; TensorRT-LLM then waits forever.
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    # gRPC's fork handlers are not needed: only new programs are started.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}

SHARD_ONLY = ("SHARD_TOKEN",)
"""Variables for the shard that the ranks do not get."""

_STARTED_BY = {
    "SLURM_": None,
    "PMI_": None,
    "PMIX_": "PMIX_RANK",
    "OMPI_": "OMPI_COMM_WORLD_SIZE",
    "PRTE_": "PRTE_LAUNCHED",
}
"""Prefixes of the variables that Slurm and mpirun set for the processes they start, and a variable that proves it."""

_SETTING = re.compile(r"(OMPI|PMIX|PRTE)_(MCA_|PREFIX$|HOME$)|(OMPI|PRTE)_ALLOW_RUN_AS_ROOT")
"""Variables with these prefixes that users and images set."""

_SET_BY_MPIRUN = re.compile(
    r"OMPI_MCA_(orte_|ess|pmix$|initial_wdir$|mpi_oversubscribe$|shmem_RUNTIME_QUERY_hint$|PREFIXES$|cpu_type$|num_procs$)"
)
"""Settings that mpirun makes for its ranks: the output of `mpirun env`, Open MPI 4.1.4 and 5.0.11."""

_EXPORTED = re.compile(
    r"(PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV)$|(NCCL|TLLM|TRTLLM|UCX|HF|NVIDIA|TORCH|GRPC)_|CUDA_(?!VISIBLE_DEVICES)"
)
"""Variables that ranks on other hosts get."""


def rank_environment(environ: Mapping[str, str], *, as_root: bool) -> dict[str, str]:
    """Return the environment of a shard that starts ranks.

    MPI trusts variables that say who started the process. If Slurm or mpirun started the launcher, their variables
    describe the launcher: the shard's MPI would look for a server that is not its own, or for room on nodes of the job
    (ai-dynamo/dynamo PRs #808, #992), and `trtllm-llmapi-launch` takes SLURM_PROCID as the rank of every process. These
    are removed; variables that Open MPI needs are added unless they are set.
    """
    kept = {name: value for name, value in environ.items() if not _is_inherited(name, environ)}
    return {**DEFAULTS, **(AS_ROOT if as_root else {}), **kept}


def _is_inherited(name: str, environ: Mapping[str, str]) -> bool:
    """Return True for a variable that Slurm or mpirun set for the launcher itself."""
    prefix = next((prefix for prefix in _STARTED_BY if name.startswith(prefix)), None)
    if prefix is None:
        return False
    proof = _STARTED_BY[prefix]
    if proof is not None and proof not in environ:
        return False
    return _SETTING.match(name) is None or _SET_BY_MPIRUN.match(name) is not None


def relay_command() -> tuple[str, ...]:
    """Return the command line of the program that rank 0 runs."""
    return (sys.executable, "-P", "-m", env_relay.__name__)


def mpirun_command(ranks: int, *, as_root: bool, hosts: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command line that starts `ranks` ranks with TensorRT-LLM's script: on this machine, or as many on each host.

    mpirun fills one host after another, so that rank 0 is on the first one, which must be this machine. The ranks of other
    hosts get those variables of `environ` that TensorRT-LLM and its libraries read.

    --oversubscribe: a rank needs a GPU, not a core of its own. --bind-to none: otherwise rank 0, with all threads of its
    engine, is bound to one core or package.
    """
    return (
        *("mpirun", "-n", str(ranks), "--oversubscribe", "--bind-to", "none"),
        *(("--host", ",".join(f"{host}:{ranks // len(hosts)}" for host in hosts)) if hosts else ()),
        *(word for name in sorted(environ) if hosts and _EXPORTED.match(name) for word in ("-x", name)),
        *(("--allow-run-as-root",) if as_root else ()),
        *("trtllm-llmapi-launch", *relay_command()),
    )


def search_path(environ: Mapping[str, str]) -> str:
    """Return PATH for mpirun: the script runs `python3` from it, which must be the Python that runs us."""
    own = str(Path(sys.executable).parent)
    return os.pathsep.join((own, environ.get("PATH", os.defpath)))


def survives_splitting(words: tuple[str, ...]) -> bool:
    """Return True if a shell does not change the words when it splits and expands them, as the script of 1.2 does."""
    return all(re.fullmatch(r"[\w@%+=:,./-]+", word) for word in words)


class MpirunConfig(ChildConfig, cli_prog_name="text_generation_launcher.mpi"):
    """Start ranks with mpirun, and a shard that uses them: [settings] -- mpirun … -- shard …"""

    replica: int = 0
    """Index of the replica; part of the name in the log."""


@asynccontextmanager
async def _handover(received: asyncio.Future[dict[str, str]]) -> AsyncIterator[Mapping[str, str]]:
    """Yield the variables that env_relay.py needs; `received` gets the environment of rank 0.

    Leaving the block closes the connection: env_relay.py exits, and the script ends the ranks.
    """
    writers: list[asyncio.StreamWriter] = []

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        if peer_user(writer.get_extra_info("socket")) != os.geteuid() or received.done():
            writer.close()
            return
        with suppress(ValueError):  # an incomplete message: mpirun will fail and log the reason
            environ = json.loads(await reader.read())
            if not received.done():
                received.set_result(environ)

    # An abstract socket leaves no file behind. Any user may connect to it, so the peer's user id is checked.
    name = f"text-generation-{secrets.token_hex(16)}"
    server = await asyncio.start_unix_server(receive, path=f"\0{name}")
    try:
        yield {env_relay.VARIABLE: name}
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def run(mpirun: Sequence[str], shard: Sequence[str], inherited: Sequence[int]) -> int:
    """Run mpirun and the shard until the shard ends.

    Returns its exit code as a shell counts it, or FAILED if the ranks ended first.
    """
    stopping = StopSignals().stop
    received: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
    secret = {name: os.environ[name] for name in SHARD_ONLY if name in os.environ}
    erase(SHARD_ONLY)
    async with AsyncExitStack() as after_handover, _handover(received) as variables:
        ranks = await asyncio.create_subprocess_exec(
            *mpirun, env={**os.environ, **variables}, stdin=asyncio.subprocess.DEVNULL
        )
        after_handover.push_async_callback(_end_ranks, ranks)
        await first_of(asyncio.shield(received), ranks.wait(), stopping.wait())
        if stopping.is_set():
            return ExitCode.STOPPED
        if not received.done():
            log.error("mpirun ended before the ranks were there", **exit_fields(await ranks.wait()))
            return ExitCode.FAILED
        return await _run_shard(shard, received.result() | secret, inherited, ranks, stopping)


async def _run_shard(
    shard: Sequence[str],
    environ: Mapping[str, str],
    inherited: Sequence[int],
    ranks: asyncio.subprocess.Process,
    stopping: asyncio.Event,
) -> int:
    process = await asyncio.create_subprocess_exec(
        *shard, env=environ, stdin=asyncio.subprocess.DEVNULL, pass_fds=inherited
    )
    await first_of(process.wait(), ranks.wait(), stopping.wait())
    send(process, signal.SIGTERM)
    if stopping.is_set() or process.returncode is not None:
        code = await process.wait()  # the launcher limits this time
        return code if code >= 0 else 128 - code
    log.error("the engine's ranks ended", **exit_fields(await ranks.wait()))
    await _end_by(process, SHARD_ALONE_TIMEOUT)
    await process.wait()
    return ExitCode.FAILED


async def _end_ranks(ranks: asyncio.subprocess.Process) -> None:
    """Wait for mpirun to end, then send SIGTERM, then SIGKILL. The launcher reaps processes that are left (orphans.py)."""
    await _end_by(ranks, RANKS_TIMEOUT, signal.SIGTERM)
    await _end_by(ranks, MPIRUN_TIMEOUT)
    await ranks.wait()


async def _end_by(process: asyncio.subprocess.Process, seconds: float, number: signal.Signals = signal.SIGKILL) -> None:
    """Wait for a process to end; send it a signal if it has not within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        send(process, number)


def split(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Split a command line into our settings, mpirun's command and the shard's command."""
    first = argv.index(SEPARATOR)
    second = argv.index(SEPARATOR, first + 1)
    return list(argv[:first]), list(argv[first + 1 : second]), list(argv[second + 1 :])


def main() -> None:
    own, mpirun, shard = split(sys.argv[1:])
    config = parse_config(MpirunConfig, own)
    follow_parent(config.lifeline_fd, cleanup=partial(orphans.kill, os.environ[orphans.VARIABLE]))
    configure_logging(config, f"shard-{config.replica}")
    inherited = (config.lifeline_fd, int(os.environ.get(heartbeat.VARIABLE, -1)))
    sys.exit(run_to_end(run(mpirun, shard, tuple(fd for fd in inherited if fd >= 0))))


if __name__ == "__main__":
    main()
