"""The settings of a shard. Flags, environment names, --help and docs/flags.md are derived from them."""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator, model_validator

from text_generation_common.lora import parse_adapters
from text_generation_common.settings import MAX_BATCH_SIZE, ChildConfig, SharedSettings, Topic
from text_generation_common.shard_access import ShardAccess
from text_generation_proto.addresses import is_local, socket_path, split_host_port

EngineName = Literal["auto", "torch", "tensorrt-llm", "echo"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
ModelImpl = Literal["auto", "native", "transformers"]
DType = Literal["float16", "bfloat16", "float32"]
KVCacheDType = Literal["auto", "fp8_e4m3fn", "fp8_e5m2"]
Quantize = Literal[
    "awq",
    "bitsandbytes",
    "bitsandbytes-fp4",
    "bitsandbytes-nf4",
    "compressed-tensors",
    "eetq",
    "exl2",
    "fp8",
    "gptq",
    "marlin",
    "modelopt",
    "mxfp4",
]
"""The values of TGI's flag, and the formats that it does not know."""


SLOTS_FOR_OTHERS = 8
"""Default of max_loras where adapters may be loaded later, at least."""


class ShardSettings(SharedSettings, ShardAccess):
    """The settings of a shard that a user may give to the launcher."""

    topics: ClassVar[Mapping[Topic, str]] = {
        Topic.MODEL: "model_id engine model_impl dtype kv_cache_dtype mamba_ssm_cache_dtype quantize load_format device lora_adapters "
        "lora_modules_dir max_loras max_cpu_loras max_lora_rank speculate speculator synthetic_acceptance",
        Topic.REPLICAS: "health_port drain_timeout shutdown_timeout",
        Topic.ACCESS: "insecure",
        Topic.BATCHING: "cuda_memory_fraction cpu_memory_fraction num_threads max_batch_image_tokens",
        Topic.TENSORRT_LLM: "trtllm_options",
        Topic.LOGS: "reflection trace_steps",
        Topic.ECHO: "echo_step_ms echo_prefill_us echo_decode_us echo_blocks echo_max_sequence_length",
    }

    model_id: str = ""
    """Name to report for the model; default: the folder."""
    engine: EngineName = "auto"
    """Engine that runs the model. auto: tensorrt-llm if it is installed and there is a GPU, else torch."""
    model_impl: ModelImpl = "auto"
    """Code that runs the model in the torch engine. native: ours; transformers: Hugging Face's, with our cache and scheduler.
    auto: native for the models that it knows and supports, else transformers."""
    dtype: DType | None = None
    """Data type of weights, activations and, unless kv_cache_dtype says otherwise, KV cache; default: that of the checkpoint, or
    float32 on a CPU that has no products of it (torch engine)."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Data type of the KV cache (torch engine). auto: that of the model. fp8_e4m3fn, fp8_e5m2: half the memory, with the scales of
    the checkpoint or 1; less accurate: docs/quantization.md."""
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type in which the states of recurrent layers (gated delta nets, Mamba 2) are kept between steps (native code of the torch
    engine). auto: that which the checkpoint names, else that of the model. float32: more precise, twice the memory."""
    quantize: Quantize | None = None
    """Quantization of the weights. fp8: the torch engine quantizes those of a checkpoint without quantization while it loads
    them. The format of a quantized checkpoint is read from its config.json: a value that differs from it is refused."""
    load_format: LoadFormat = "auto"
    """Format of the weights. dummy: random weights, only config.json is read."""
    device: str = "auto"
    """Device of the engine: cpu, cuda, cuda:N or auto."""
    cuda_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the GPU memory to use."""
    cpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Fraction of the machine's memory that the torch engine may use on CPU, including weights."""
    num_threads: NonNegativeInt = 0
    """Threads of a forward pass on CPU; 0: one per core, at most the CPU quota of a container or service."""
    max_batch_image_tokens: NonNegativeInt = 4096
    """Tokens of images that the torch engine encodes ahead of the chunks that need them, and one image at least. Sequences
    that decode wait for an image that a prompt needs, unless it has more tokens. 0: no images: their encoder is not loaded."""
    lora_adapters: str = ""
    """LoRA adapters to serve beside the model, with commas between: id, id=folder, id@revision.
    Requests name one by its id."""
    lora_modules_dir: str = ""
    """Folder below which LoRA adapters may lie that /v1/load_lora_adapter and `lora_request` load while the server runs.
    Default: none is loaded or unloaded then."""
    max_loras: NonNegativeInt = 0
    """Most different LoRA adapters in a batch, each of which takes device memory (torch engine). Requests with others wait. 0: as
    many as `lora_adapters`, with `lora_modules_dir` at least 8."""
    max_cpu_loras: NonNegativeInt = 0
    """Most LoRA adapters loaded at a time; those beyond `max_loras` wait in host memory. 0: `max_loras`, or as many as
    `lora_adapters` if those are more."""
    max_lora_rank: Annotated[int, Field(ge=0, le=256)] = 0
    """Largest rank of a LoRA adapter (torch engine). 0: that of `lora_adapters`, or 16 if there are none."""
    speculate: Annotated[str, Field(pattern=r"^(auto|[0-9]{1,2})$")] = "auto"
    """Speculative decoding in the torch engine: most tokens to draft for a sequence in a step, by a search of its own text and of
    recent outputs, and by a layer of the checkpoint that predicts tokens, or by `speculator`. auto: 8 on a CPU, 4 on a GPU, there none for models with
    states; 0: none. Drafts change no answer, and are made only where they are faster: docs/speculation.md."""
    speculator: str = ""
    """Folder of a draft model of the form of EAGLE-3 for this model (native code of the torch engine). It drafts where nothing was
    found."""
    synthetic_acceptance: Annotated[float, Field(ge=0)] = 0.0
    """Benchmarks only: take drafts as right at random, so that a step with the longest ones yields so many tokens of a sequence on
    average. Texts are then not those of the model. 0: off."""
    trtllm_options: str = ""
    """Keyword arguments of TensorRT-LLM's LLM, as YAML: a file or the text itself."""
    trace_steps: str = ""
    """File to which the torch engine writes one JSON line per step with host and device times. With several replicas:
    FILE-0, FILE-1, …; in a tensor-parallel group rank 0 writes."""
    reflection: bool = False
    """Serve gRPC reflection (for grpcurl)."""
    insecure: bool = False
    """Allow shards to listen without TLS (shard_tls_cert) on addresses that other machines reach."""
    health_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port for health checks alone, without TLS and token, on the host of the shard's address: probes of Kubernetes have
    neither. The launcher gives it and the following ones to its shards. 0: none."""
    drain_timeout: NonNegativeFloat = 0.0
    """Seconds that a stopping shard continues its sequences; those that are left move to other replicas."""
    shutdown_timeout: Annotated[float, Field(gt=0)] = 10.0
    """Seconds that a stopping shard waits for the step in progress."""
    echo_step_ms: Annotated[float, Field(ge=0)] = 0.0
    """Echo engine: duration of a step, in milliseconds."""
    echo_prefill_us: Annotated[float, Field(ge=0)] = 0.0
    """Echo engine: time that each prompt token adds to a step, in microseconds."""
    echo_decode_us: Annotated[float, Field(ge=0)] = 0.0
    """Echo engine: time that each decoding sequence adds to a step, in microseconds."""
    echo_blocks: PositiveInt = 65536
    """Echo engine: KV blocks that it reports, unless the size of the KV cache is given."""
    echo_max_sequence_length: PositiveInt = 32768
    """Echo engine: length of the longest sequence, in tokens."""

    @field_validator("lora_adapters")
    @classmethod
    def _check_adapters(cls, value: str) -> str:
        parse_adapters(value)
        return value

    @property
    def lora_slots(self) -> int:
        """Places for LoRA adapters on the device."""
        given, others = len(parse_adapters(self.lora_adapters)), SLOTS_FOR_OTHERS if self.lora_modules_dir else 0
        return (self.max_loras or max(given, others)) if given or others else 0

    @property
    def lora_limit(self) -> int:
        """Most LoRA adapters at a time."""
        return self.max_cpu_loras or max(self.lora_slots, len(parse_adapters(self.lora_adapters)))

    def check_tls(self, address: str) -> None:
        """Raise ValueError if other machines reach `address` without TLS, unless `insecure` allows that."""
        if not is_local(address) and not self.shard_tls_cert and not self.insecure:
            raise ValueError(
                f"other machines reach {address}: give --shard-tls-cert, --shard-tls-key and --shard-tls-ca, or --insecure"
            )


class ShardConfig(ShardSettings, ChildConfig, cli_prog_name="text-generation-shard"):
    """Serve one engine on one device over gRPC."""

    topics: ClassVar[Mapping[Topic, str]] = {
        Topic.SHARD: "model_path address replica rank world_size group_address group_gpus tensor_parallel gpus_per_node "
        "host_cache_fd host_cache_name host_cache_start host_cache_bytes",
        Topic.BATCHING: "max_batch_size max_batch_total_tokens",
    }

    model_path: str = ""
    """Folder with config.json and *.safetensors. Not needed by the echo engine."""
    address: str = "unix:///tmp/text-generation-server-0"
    """Address to listen on: unix:///path (mode 0600) or host:port."""
    replica: NonNegativeInt = 0
    """Index of the replica; part of the shard's name in the log."""
    rank: NonNegativeInt = 0
    """Rank of this shard in its tensor-parallel group."""
    world_size: PositiveInt = 1
    """Number of shards in the group."""
    group_address: str = ""
    """Address of the group: rank 0 listens there, the others connect. unix:///path, or host:port if the group is on several
    hosts, which then all need the same SHARD_TOKEN. Not needed by a single shard."""
    max_batch_size: Annotated[int, Field(ge=0, le=MAX_BATCH_SIZE)] = 0
    """Most sequences held at once; 0: the engine's own limit."""
    max_batch_total_tokens: NonNegativeInt = 0
    """Tokens for which the KV cache must have room, where weights are copied for speed; 0: 524,288. WarmUp says how many it has."""
    group_gpus: str = ""
    """GPUs of the group on this host, as in CUDA_VISIBLE_DEVICES: rank 0 observes them. Default: the shard's own."""
    tensor_parallel: PositiveInt = 1
    """Number of GPUs for an engine that spreads over several GPUs itself (tensorrt-llm)."""
    gpus_per_node: NonNegativeInt = 0
    """Number of these GPUs on each host; 0: all are on this one."""
    host_cache_fd: NonNegativeInt = 0
    """File descriptor of the memory of the host cache."""
    host_cache_name: str = ""
    """Name of this memory: shards with the same name share it."""
    host_cache_start: NonNegativeInt = 0
    """First byte of the part of this rank."""
    host_cache_bytes: NonNegativeInt = 0
    """Bytes of that part; 0: there is no host cache."""

    @model_validator(mode="after")
    def _check_addresses(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"`rank`({self.rank}) must be < `world_size`({self.world_size})")
        if self.world_size > 1 and socket_path(self.group_address) is None:
            try:
                split_host_port(self.group_address)
            except ValueError:
                raise ValueError(
                    f"`world_size` is {self.world_size}: `group_address` must be unix:///path or host:port"
                ) from None
        for address in (self.address, *((self.group_address,) if self.world_size > 1 else ())):
            self.check_tls(address)
        return self

    @property
    def process_name(self) -> str:
        return shard_name(self.replica, self.rank, self.world_size)


class ShardCheckConfig(ShardConfig, cli_prog_name="text_generation_shard.check"):
    """Check a shard's model and print the result as JSON."""

    topics: ClassVar[Mapping[Topic, str]] = {
        Topic.SHARD: "memory",
        Topic.BATCHING: "max_batch_prefill_tokens",
    }

    memory: NonNegativeInt = 0
    """Bytes of memory of the device to plan for; 0: the memory of the device."""
    max_batch_prefill_tokens: NonNegativeInt = 0
    """Most prompt tokens of a step; 0: what the engine suggests."""


def shard_name(replica: int, rank: int, world_size: int) -> str:
    """Return `shard-0` if a replica is one shard, else `shard-0-rank-1`."""
    return f"shard-{replica}" if world_size == 1 else f"shard-{replica}-rank-{rank}"


def device_number(device: str) -> int | None:
    """Return N for `--device cuda:N`, else None."""
    match = re.fullmatch(r"cuda:(\d+)", device)
    return None if match is None else int(match[1])


def choose_engine(name: EngineName, *, has_gpu: bool) -> EngineName:
    """Return the engine that `name` means on this machine. Imports no engine."""
    if name != "auto":
        return name
    return "tensorrt-llm" if has_gpu and find_spec("tensorrt_llm") is not None else "torch"
