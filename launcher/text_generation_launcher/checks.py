"""Check ports and the settings of the TensorRT-LLM engine before a model is downloaded or a shard started.

Imports nothing of TensorRT-LLM; the shard checks the rest.
"""

import math
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from text_generation_launcher import mpi
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.counts import PlanError, count_processes
from text_generation_launcher.devices import Devices
from text_generation_shard.engine import EngineError
from text_generation_shard.engines.tensorrt_llm.options import FLAG, adapt_options, check_options, split_ranks
from text_generation_shard.yaml_options import read_options

LAST_PORT = 65535
PROGRAMS = {"mpirun": "it comes with Open MPI (openmpi-bin)", "trtllm-llmapi-launch": "it comes with TensorRT-LLM"}
"""The programs that --trtllm-launch mpirun runs, and their origin."""


def check_engine(config: LauncherConfig, environ: Mapping[str, str]) -> None:
    """Check that the chosen engine can work with the settings on this machine. Raises PlanError."""
    if config.engine != "torch" and config.host_cache_bytes:
        raise PlanError(f"--host-cache-size is for the torch engine, and the engine is {config.engine}")
    if config.engine != "tensorrt-llm":
        for flag, is_set in (
            ("--trtllm-options", bool(config.trtllm_options)),
            ("--trtllm-launch mpirun", config.trtllm_launch != "spawn"),
        ):
            if is_set:
                raise PlanError(f"{flag} is for the tensorrt-llm engine, and the engine is {config.engine}")
        return
    if config.nodes > 1:
        raise PlanError(
            "`nodes`: the tensorrt-llm engine is spread over several hosts by --trtllm-launch mpirun and --trtllm-hosts"
        )
    if config.device == "cpu":
        raise PlanError("`device` is cpu, and the tensorrt-llm engine runs on GPUs only")
    if find_spec("tensorrt_llm") is None:
        raise PlanError("the tensorrt-llm engine needs TensorRT-LLM: see docs/tensorrt-llm.md for how to install it")
    if config.trtllm_options:
        try:
            options = adapt_options(read_options(config.trtllm_options, FLAG))
            check_options(options, None)
            if config.num_shard is not None:
                split_ranks(config.num_shard, options)
        except EngineError as error:
            raise PlanError(str(error)) from error
    if config.trtllm_launch == "mpirun":
        _check_mpirun(config, environ)


def sized_by_options(config: LauncherConfig) -> LauncherConfig:
    """Return the settings with `num_shard` from the sizes in --trtllm-options, unless it is set. Raises PlanError."""
    if config.engine != "tensorrt-llm" or not config.trtllm_options or config.sharded or config.num_shard is not None:
        return config
    try:
        gpus = math.prod(split_ranks(None, read_options(config.trtllm_options, FLAG)))
    except EngineError as error:
        raise PlanError(str(error)) from error
    return config.model_copy(update={"num_shard": gpus}) if gpus > 1 else config


def _check_mpirun(config: LauncherConfig, environ: Mapping[str, str]) -> None:
    if config.trtllm_hosts and config.num_shard is None:
        raise PlanError("--trtllm-hosts needs --num-shard, the number of GPUs of all hosts")
    if not config.sharded and (config.num_shard or 1) == 1:
        raise PlanError("--trtllm-launch mpirun starts the processes of several GPUs: it needs --num-shard")
    path = mpi.search_path(environ)
    for program, origin in PROGRAMS.items():
        if shutil.which(program, path=path) is None:
            raise PlanError(f"--trtllm-launch mpirun needs {program}, which is not on PATH: {origin}")
    if not mpi.survives_splitting(mpi.relay_command()):
        raise PlanError(
            f"--trtllm-launch mpirun: the path of Python, {sys.executable!r}, has characters that a shell changes"
        )


def check_router_files(config: LauncherConfig) -> None:
    """Check the files that the settings of the router name. Raises PlanError."""
    # Imported only where they are used: they load the web server and the templates.
    if config.api_keys_file:
        from text_generation_router.api.http.keys import ApiKeys

        try:
            ApiKeys(config)
        except ValueError as error:
            raise PlanError(str(error)) from error
    if config.chat_template or config.tokenizer_config_path:
        from text_generation_router.chat.template_files import ChatTemplateError, load_templates

        try:
            load_templates(config, Path(config.model_id))
        except ChatTemplateError as error:
            raise PlanError(str(error)) from error


def check_ports(config: LauncherConfig, devices: Devices) -> None:
    """Check that each shard has ports of its own if --shard-tcp-port or --health-port is set. Raises PlanError."""
    shards = config.num_replicas * count_processes(config, devices)
    taken = dict.fromkeys((config.port, config.management_port), "is the router's")
    for name in ("shard_tcp_port", "health_port"):
        if not (first := getattr(config, name)):
            continue
        last = first + shards - 1
        if last > LAST_PORT:
            raise PlanError(f"`{name}`({first}) for {shards} shards: port {last} does not exist")
        for port in range(first, last + 1):
            if port in taken:
                raise PlanError(f"`{name}`({first}) for {shards} shards: {port} {taken[port]}")
            taken[port] = f"is of `{name}`"
    if config.management_port == config.port:
        raise PlanError(f"`management_port` and `port` are both {config.port}")
