from __future__ import annotations

import subprocess

import pytest

from text_generation_launcher import mpi

STARTED_BY_MPIRUN = {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0", "PRTE_LAUNCHED": "1", "SLURM_JOB_ID": "1"}


@pytest.mark.parametrize(
    "name",
    [
        *("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NODELIST", "PMI_RANK", "PMI_FD", "PMIX_RANK", "PMIX_SERVER_URI41"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_UNIVERSE_SIZE", "OMPI_ARGV", "PRTE_LAUNCHED"),
        *("OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_pmix", "OMPI_MCA_num_procs"),
    ],
)
def test_variables_of_the_launchers_own_mpirun_or_slurm_are_removed(name: str) -> None:
    left = {**STARTED_BY_MPIRUN, name: "1"}
    assert mpi.rank_environment({**left, "HOME": "/"}, as_root=False).keys() == {"HOME", *mpi.DEFAULTS}


@pytest.mark.parametrize(
    "name",
    [
        *("OMPI_MCA_btl", "OMPI_MCA_pml", "PMIX_MCA_gds", "PRTE_MCA_plm", "OMPI_ALLOW_RUN_AS_ROOT", "UCX_TLS"),
        *("PRTE_PREFIX", "PMIX_PREFIX", "OPAL_PREFIX", "TLLM_LOG_LEVEL", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"),
    ],
)
@pytest.mark.parametrize("around", [{}, STARTED_BY_MPIRUN])
def test_variables_set_by_users_are_kept(name: str, around: dict[str, str]) -> None:
    assert mpi.rank_environment({**around, name: "x"}, as_root=True)[name] == "x"


@pytest.mark.parametrize("name", ["OMPI_MCA_ess_base_jobid", "OMPI_MCA_pmix", "OMPI_CC", "PMIX_HOSTNAME", "PRTE_X"])
def test_variables_are_kept_without_proof_of_mpirun(name: str) -> None:
    assert mpi.rank_environment({name: "x"}, as_root=False)[name] == "x"


def test_existing_variables_are_not_overridden() -> None:
    mine = dict.fromkeys((*mpi.DEFAULTS, *mpi.AS_ROOT), "0") | {"GRPC_ENABLE_FORK_SUPPORT": "1"}
    assert mpi.rank_environment(mine, as_root=True) == mine


@pytest.mark.parametrize("word", ["/my python", "", "*", "[a]", "a\nb", "~"])
def test_words_that_do_not_survive_splitting(word: str) -> None:
    assert not mpi.survives_splitting(("x", word))


@pytest.mark.parametrize(
    "word", ["/usr/bin/python3.12", "-P", "a_b-c", "text_generation_launcher.env_relay", "a=b@c%d+e,f:g"]
)
def test_surviving_words_are_unchanged_by_bash(word: str) -> None:
    assert mpi.survives_splitting((word,))
    script = 'task="${@:1}"; printf "%s\\n" $task'
    done = subprocess.run(["bash", "-c", script, "-", "first", word], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines() == ["first", word]
