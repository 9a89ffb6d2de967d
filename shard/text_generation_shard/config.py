"""ShardConfig: every setting of a shard, written once. Flags, environment names and --help come from here."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from text_generation_proto.process import ProcessConfig, socket_path

EngineName = Literal["auto", "torch", "tensorrt-llm", "echo"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
DType = Literal["float16", "bfloat16", "float32"]


class ShardConfig(ProcessConfig, cli_prog_name="text-generation-shard"):
    """Serve one engine on one device over gRPC."""

    model_path: str = ""
    """Folder with config.json and *.safetensors. Not needed by the echo engine."""
    model_id: str = ""
    """Name to report for the model; default: the folder."""
    engine: EngineName = "auto"
    """Which engine runs the model; auto: tensorrt-llm where it is installed and there is a GPU, else torch."""
    address: str = "unix:///tmp/text-generation-server-0"
    """Where to listen: unix:///path (mode 0600) or host:port."""
    replica: NonNegativeInt = 0
    """Which copy of the model it serves; names it in the log."""
    rank: NonNegativeInt = 0
    """Place of this shard in its tensor-parallel group."""
    world_size: PositiveInt = 1
    """Shards in the group."""
    group_address: str = ""
    """Where the group meets, unix:///path: rank 0 listens there, the others connect. Not needed by a shard alone."""
    dtype: DType | None = None
    """Type of weights, activations and KV cache; default: the checkpoint's."""
    load_format: LoadFormat = "auto"
    """`dummy` fills the model with random weights: only config.json is read."""
    device: str = "auto"
    """cpu, cuda, cuda:N or auto."""
    cuda_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the device's memory to use."""
    cpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Share of the machine's memory the torch engine may use on CPU, weights included."""
    max_batch_size: NonNegativeInt = 0
    """Sequences held at once, at most; 0: the engine's own limit."""
    num_threads: NonNegativeInt = 0
    """Threads of a forward pass on CPU; 0: one a core."""
    tensor_parallel: PositiveInt = 1
    """GPUs that an engine which spreads over several by itself is to take: tensorrt-llm."""
    trtllm_options: str = ""
    """Keywords of TensorRT-LLM's LLM, as YAML: a file, or the text itself."""
    hang_timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds without a token, a millisecond more for each prompt token that waits, after which tensorrt-llm counts as hung."""
    trace_steps: str = ""
    """File to which the torch engine writes one JSON line a step: times of host and device; of several replicas, FILE-0, ….
    Of a model on several GPUs the first one writes."""
    gateway: bool = False
    """Also serve the protocol of TensorRT-LLM's own gRPC server. For engines that schedule for themselves."""
    reflection: bool = False
    """Serve gRPC reflection, for grpcurl."""
    shutdown_timeout: Annotated[float, Field(gt=0)] = 10.0
    """Seconds a stopping shard waits for the step in progress."""
    echo_step_ms: Annotated[float, Field(ge=0)] = 0.0
    """Echo engine: time of a step."""
    echo_prefill_us: Annotated[float, Field(ge=0)] = 0.0
    """Echo engine: time added to a step by each prompt token in it, in microseconds."""
    echo_decode_us: Annotated[float, Field(ge=0)] = 0.0
    """Echo engine: time added to a step by each sequence that decodes in it, in microseconds."""
    echo_self_scheduling: bool = False
    """Echo engine: schedule for itself, as TensorRT-LLM does: whole prompts, its own queue and KV blocks."""
    echo_tokens_per_report: PositiveInt = 1
    """Echo engine that schedules for itself: tokens of a sequence that are reported together."""
    echo_blocks: PositiveInt = 65536
    """Echo engine: KV blocks it says it has, unless the KV pool's size is given."""
    echo_max_sequence_length: PositiveInt = 32768
    """Echo engine: longest sequence."""
    echo_fail_token: int = -1
    """Echo engine: a sequence that is to repeat this token id fails instead."""
    echo_fail_step_token: int = -1
    """Echo engine: the whole step fails in which a sequence is to repeat this token id."""

    @model_validator(mode="after")
    def _place_in_group(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"`rank`({self.rank}) must be < `world_size`({self.world_size})")
        if self.world_size > 1 and socket_path(self.group_address) is None:
            raise ValueError(f"`world_size` is {self.world_size}: `group_address` must say where, as unix:///path")
        return self

    @property
    def process_name(self) -> str:
        """What the process calls itself in its log records."""
        return shard_name(self.replica, self.rank, self.world_size)


def shard_name(replica: int, rank: int, world_size: int) -> str:
    """`shard-0` where a replica is one shard, else `shard-0-rank-1`."""
    return f"shard-{replica}" if world_size == 1 else f"shard-{replica}-rank-{rank}"


def choose_engine(name: EngineName, *, has_gpu: bool) -> EngineName:
    """The engine that `name` stands for on this machine. Imports nothing."""
    if name != "auto":
        return name
    return "tensorrt-llm" if has_gpu and find_spec("tensorrt_llm") is not None else "torch"
