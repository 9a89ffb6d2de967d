"""LauncherConfig: every setting of the launcher. Most are the router's and the shard's, written there.

The names are TGI's wherever TGI has one. A flag of TGI's that is not served is refused by name, never ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Self

from pydantic import NonNegativeInt, PositiveInt, model_validator
from pydantic_settings import CliExplicitFlag

from text_generation_proto.process import ProcessConfig, exit_with_usage_error, parse_config
from text_generation_router.config import RouterConfig
from text_generation_shard.config import ShardConfig

NOT_SERVED = frozenset(
    {
        "cuda_graphs",
        "kv_cache_dtype",
        "lora_adapters",
        "max_image_fetch_size",
        "ngrok",
        "ngrok_authtoken",
        "ngrok_edge",
        "otlp_endpoint",
        "otlp_service_name",
        "quantize",
        "rope_factor",
        "rope_scaling",
        "speculate",
        "watermark_delta",
        "watermark_gamma",
        "weights_cache_override",
    }
)
"""TGI's settings that this server does not have."""

INSTEAD = {
    "cuda_graphs": "the tensorrt-llm engine has cuda_graph_config in --trtllm-options",
    "kv_cache_dtype": "the tensorrt-llm engine has kv_cache_config: {dtype: …} in --trtllm-options",
    "quantize": "the tensorrt-llm engine serves checkpoints that are quantised already, and needs no flag for it",
}
"""What one of them has in its place."""


# The two sides agree on what max_batch_size says; the router's "no limit" is None, the shard's 0: the plan translates.
class LauncherConfig(  # type: ignore[misc]
    RouterConfig,
    ShardConfig,
    cli_prog_name="text-generation-launcher",
    cli_shortcuts={"port": "p", "graceful-termination-timeout": "g", "env": "e"},
):
    """Serve a model: start its shards and the router, watch them, restart a shard that dies, stop them in order."""

    # What the plan decides is no setting of the launcher. A class variable takes the field out again.
    lifeline_fd: ClassVar[int] = -1  # type: ignore[misc]
    model_path: ClassVar[str]  # type: ignore[misc]
    address: ClassVar[str]  # type: ignore[misc]
    replica: ClassVar[int]  # type: ignore[misc]
    rank: ClassVar[int] = 0  # type: ignore[misc]
    world_size: ClassVar[int] = 1  # type: ignore[misc]
    group_address: ClassVar[str]  # type: ignore[misc]
    tensor_parallel: ClassVar[int]  # type: ignore[misc]
    shard_address: ClassVar[tuple[str, ...]]  # type: ignore[misc]

    flag_only: ClassVar[frozenset[str]] = frozenset({"env"})

    model_id: str = ""
    """Model to serve: a folder, or an id on the Hugging Face hub. There is no default."""
    sharded: CliExplicitFlag[bool] | None = None
    """Whether to shard the model: true takes all visible devices, false one."""
    num_shard: int | None = None
    """Shards to cut the model into (tensor parallelism); default: one. More take a GPU each."""
    trtllm_launch: Literal["spawn", "mpirun"] = "spawn"
    """Who starts the processes that tensorrt-llm runs on several GPUs: the shard itself, or mpirun."""
    num_replicas: PositiveInt = 1
    """Copies of the model, each served by shards of its own; one router in front of all."""
    max_shard_restarts: NonNegativeInt = 5
    """Restarts in a row, without two seconds of serving between, after which a shard counts as hopeless; 0: never restart."""
    trust_remote_code: bool = False
    """Accepted for TGI's sake: code that comes with a model is never run."""
    max_input_length: int | None = None
    """Old name of max_input_tokens."""
    compute_type: str = ""
    """Value of the x-compute-type header; default: number and name of the devices."""
    shard_uds_path: str | None = None
    """Sockets of the shards are PATH-0, PATH-1, …, where a replica has several PATH-0-0, PATH-0-1, …; default: a private
    temporary folder."""
    shard_tcp_port: NonNegativeInt = 0
    """Shards listen on 127.0.0.1, this port and the ones after it, instead of on sockets; 0: sockets."""
    huggingface_hub_cache: str | None = None
    """Folder of the hub's cache; default: what huggingface_hub uses."""
    usage_stats: str = "off"
    """Accepted for TGI's sake: no usage statistics are ever sent."""
    prometheus_port: NonNegativeInt = 9000
    """Accepted for TGI's sake: metrics are served by the router, at /metrics."""
    disable_custom_kernels: bool = False
    """Accepted for TGI's sake: there are none."""
    env: bool = False
    """Log versions, devices and platform before starting. A flag only."""

    @model_validator(mode="after")
    def _settings_go_together(self) -> Self:
        if not self.model_id:
            raise ValueError("--model-id (or MODEL_ID) is missing: which model is to be served?")
        if self.max_input_tokens is not None and self.max_input_length is not None:
            raise ValueError(
                f"Both `max_input_tokens` ({self.max_input_tokens}) and `max_input_length` ({self.max_input_length}) "
                "are set. Please define only `max_input_tokens` as `max_input_length is deprecated for naming "
                "consistency."
            )
        limit, total, budget = self.input_limit, self.max_total_tokens, self.max_batch_total_tokens
        if limit is not None and total is not None and limit >= total:
            raise ValueError(f"`max_input_tokens`({limit}) must be < `max_total_tokens`({total})")
        if total is not None and budget is not None and total > budget:
            raise ValueError(f"`max_total_tokens` must be <= `max_batch_total_tokens`. Given: {total} and {budget}")
        if self.port == 0:
            raise ValueError("--port (or PORT): the launcher needs a port of its own, not 0")
        if self.num_shard is not None and self.num_shard < 1:
            raise ValueError("`num_shard` cannot be < 1")
        return self

    @property
    def input_limit(self) -> int | None:
        """max_input_tokens, by either of its names."""
        return self.max_input_length if self.max_input_tokens is None else self.max_input_tokens

    @property
    def needs_weights(self) -> bool:
        """Whether the engine reads the checkpoint's weights."""
        return self.engine != "echo" and self.load_format != "dummy"


def read_config(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> LauncherConfig:
    """The launcher's settings; on nonsense, one line and exit code 2."""
    for name in sorted(NOT_SERVED):
        flag = f"--{name.replace('_', '-')}"
        instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
        if any(word == flag or word.startswith(f"{flag}=") for word in argv):
            exit_with_usage_error(LauncherConfig, f"{flag} is a flag of TGI's that this server does not have{instead}")
        if environ.get(name.upper()):
            # Silence would be worse: QUANTIZE set and twice the memory taken.
            exit_with_usage_error(
                LauncherConfig,
                f"{name.upper()} is set: that is a setting of TGI's which this server does not have; unset it{instead}",
            )
    if port := environ.get("AIP_HTTP_PORT"):  # Vertex AI says where it will call
        argv = [*argv, "--port", port]
    return parse_config(LauncherConfig, argv)


def child_settings(config: LauncherConfig, child: type[ProcessConfig]) -> dict[str, object]:
    """The launcher's settings that are a child's too, under the child's names."""
    return {name: getattr(config, name) for name in child.model_fields if name in LauncherConfig.model_fields}
