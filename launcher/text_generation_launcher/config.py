"""The settings of the launcher: those of router and shard that a user may give, and its own.

Names are those of TGI where TGI has the setting. A TGI flag that is not supported is rejected by name, never ignored.
"""

import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator
from pydantic_settings import CliExplicitFlag

from text_generation_common.command_line import exit_with_usage_error, parse_config
from text_generation_common.lora import parse_adapters
from text_generation_common.settings import ChildConfig, ProcessConfig, Topic
from text_generation_proto.addresses import join_host_port, split_host_port
from text_generation_router.config import CommaList, RouterSettings
from text_generation_shard.config import ShardSettings

_TUNNEL, _ROPE = "run a tunnel of your own to --port", "set rope_scaling in the config.json of the model"
UNSUPPORTED = {
    "ngrok": _TUNNEL,
    "ngrok_authtoken": _TUNNEL,
    "ngrok_edge": _TUNNEL,
    "rope_factor": _ROPE,
    "rope_scaling": _ROPE,
    "weights_cache_override": "give the folder with the weights as --model-id, or set --huggingface-hub-cache",
}
"""TGI settings that this server does not have and that change what is served, with the alternatives."""
NO_EFFECT = (
    "cuda_graphs", "disable_custom_kernels", "master_addr", "master_port", "prometheus_port",
    "trust_remote_code", "usage_stats", "watermark_delta", "watermark_gamma",
)  # fmt: skip
"""TGI settings that are accepted and change nothing here: each answer is the same without them."""


GROUP_PORT = 29500
"""Default port of --leader-address: that of torch's launchers."""
GROUP_VARIABLES = {"nodes": "LWS_GROUP_SIZE", "node_rank": "LWS_WORKER_INDEX", "leader_address": "LWS_LEADER_ADDRESS"}
"""Variables of a LeaderWorkerSet's pods, by the setting that takes its default from them."""
SAGEMAKER_VARIABLES = {
    "model_id": "HF_MODEL_ID",
    "revision": "HF_MODEL_REVISION",
    "num_shard": "SM_NUM_GPUS",
    "quantize": "HF_MODEL_QUANTIZE",
}
"""Variables of SageMaker's containers, likewise. HF_MODEL_TRUST_REMOTE_CODE has no effect here."""
SAGEMAKER_PORT = "8080"
"""The port to which SageMaker sends /ping and /invocations."""


COMMANDS = {
    "check": ("check MODEL [flags]", "Print how a model would be served, or why not."),
    "convert": ("convert FILE.gguf FOLDER", "Convert a GGUF file to a folder that can be served."),
    "env": ("env [flags]", "Print versions, devices, packages and settings."),
    "replay": ("replay RECORD [flags]", "Compute a text again that an audit found to differ: docs/audits.md."),
    "serve": (
        "serve [flags]",
        "Serve as SageMaker expects: HF_MODEL_ID and SM_NUM_GPUS from the environment, at port 8080.",
    ),
    "completion": ("completion bash|zsh|fish", "Print the script that completes this command in a shell."),
}
"""The commands of the launcher beside serving, with their forms and meanings."""


MIN_HOST_CACHE = 1 << 20
"""Bytes, so that each shard has whole pages of it. Sizes that are too small for a model are refused once that is known."""


def parse_size(text: str) -> str:
    """Check a size such as 80GiB. Raises ValueError."""
    size_in_bytes(text)
    return text


def size_in_bytes(text: str) -> int:
    """Return the bytes that a text such as 80GiB, 80G or 0.5TiB names; 0 for 0 and an empty text. Raises ValueError."""
    if text in ("", "0"):
        return 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:i?B)?", text)
    # Powers of two, the unit of GPU memory.
    size = int(float(found[1]) * (1 << 10 * " KMGT".index(found[2] or " "))) if found else 0
    if size <= 0:
        raise ValueError("expected a size such as 80GiB")
    return size


class LauncherConfig(
    RouterSettings,
    ShardSettings,
    cli_prog_name="text-generation-launcher",
    cli_shortcuts={"port": "p", "graceful-termination-timeout": "g", "env": "e"},
):
    """Serve a model: start the shards and the router, restart those that die, stop them in order."""

    flag_only: ClassVar[frozenset[str]] = frozenset({"env"})
    topics: ClassVar[Mapping[Topic, str]] = {
        Topic.MODEL: "model_id served_model_name revision huggingface_hub_cache trust_remote_code",
        Topic.REPLICAS: "parts num_replicas num_shard sharded places nodes node_rank leader_address max_shard_restarts "
        "shard_uds_path shard_tcp_port shard_hostname shards peers peer_name",
        Topic.REQUESTS: "max_input_tokens max_input_length",
        Topic.BATCHING: "host_cache_size",
        Topic.TENSORRT_LLM: "trtllm_options trtllm_launch trtllm_hosts",
        Topic.LOGS: "env usage_stats prometheus_port disable_custom_kernels cuda_graphs watermark_gamma watermark_delta "
        "master_addr master_port",
    }
    usages: ClassVar[Sequence[str]] = ("--model-id MODEL [flags]", *(form for form, _ in COMMANDS.values()))

    model_id: str = ""
    """Model to serve: a folder, or an id on the Hugging Face hub. Required."""
    sharded: CliExplicitFlag[bool] | None = None
    """Split the model: true uses all visible devices, false one."""
    num_shard: int | None = None
    """Shards per replica (tensor parallelism); default: 1. Several shards use one GPU each."""
    trtllm_launch: Literal["spawn", "mpirun"] = "spawn"
    """Start of the processes that tensorrt-llm runs on several GPUs: by the shard itself, or by mpirun."""
    trtllm_hosts: CommaList = ()
    """Hosts of a replica's ranks with --trtllm-launch mpirun, this one first; num_shard counts the GPUs of all of them, as many
    on each. Default: this one alone."""
    parts: Literal["all", "shards", "router"] = "all"
    """Parts of the server to start on this machine. shards: without a router, at --shard-tcp-port of --shard-hostname for
    routers elsewhere. router: for the shards of --shards. Both need the same SHARD_TOKEN, or mutual TLS."""
    num_replicas: Annotated[int, Field(gt=0, le=4096)] = 1
    """Copies of the model, each with its own shards, behind one router."""
    places: Literal["local", "ray"] = "local"
    """Place of the shards: this host, or the Ray cluster that RAY_ADDRESS names, by default the one that this host belongs to.
    The shards of a replica share a node of the cluster."""
    nodes: PositiveInt = 1
    """Hosts that one replica is spread over (torch engine), each with a launcher and as many shards; num_shard counts all of
    them. Default in a LeaderWorkerSet: LWS_GROUP_SIZE."""
    node_rank: NonNegativeInt = 0
    """Number of this host among the nodes; that of number 0 runs the router. Default in a LeaderWorkerSet:
    LWS_WORKER_INDEX."""
    leader_address: str = ""
    """Host name or address of node 0, HOST or HOST:PORT (29500), at which the shards of all nodes meet. All nodes need the
    same SHARD_TOKEN. Default in a LeaderWorkerSet: LWS_LEADER_ADDRESS."""
    host_cache_size: Annotated[str, AfterValidator(parse_size)] = "0"
    """Memory of this host that keeps KV blocks and states which the devices have no room for, and those of shards that died, such
    as 64GiB (torch engine); 0: none. All replicas of this host share it: docs/scheduling.md."""
    max_shard_restarts: NonNegativeInt = 5
    """Consecutive restarts after which a shard that has not served for two seconds in between, or a process of the router that
    has not served at all, counts as hopeless; 0: never restart."""
    trust_remote_code: bool = False
    """Accepted for compatibility with TGI: code that comes with a model is never run."""
    max_input_length: int | None = None
    """Deprecated name of max_input_tokens."""
    compute_type: str = ""
    """Value of the x-compute-type header; default: number and name of the devices."""
    shard_uds_path: str | None = None
    """Sockets of the shards: PATH-0, PATH-1, …; PATH-0-0, PATH-0-1, … if a replica has several shards. Default: in a private
    temporary folder."""
    shard_tcp_port: NonNegativeInt = 0
    """First of the ports that the shards listen on instead of sockets; 0: sockets."""
    shard_hostname: str = "127.0.0.1"
    """Address or name of this machine at which the shards listen with shard_tcp_port."""
    huggingface_hub_cache: str | None = None
    """Folder of the hub's cache; default: that of huggingface_hub."""
    usage_stats: str = "off"
    """Accepted for compatibility with TGI: no usage statistics are ever sent."""
    prometheus_port: NonNegativeInt = 9000
    """Accepted for compatibility with TGI: the router serves metrics at /metrics."""
    disable_custom_kernels: bool = False
    """Accepted for compatibility with TGI; no effect."""
    cuda_graphs: str = ""
    """Accepted for compatibility with TGI: the torch engine chooses the sizes of its CUDA graphs itself; the tensorrt-llm engine
    has cuda_graph_config in --trtllm-options."""
    watermark_gamma: float = 0.0
    """Accepted for compatibility with TGI; no effect."""
    watermark_delta: float = 0.0
    """Accepted for compatibility with TGI; no effect."""
    master_addr: str = ""
    """Accepted for compatibility with TGI: the shards of a host meet at a socket. Shards of several hosts: --leader-address."""
    master_port: NonNegativeInt = 0
    """Accepted for compatibility with TGI; no effect."""
    env: bool = False
    """Log versions, devices and platform at start; without a model print them, and end. A flag only. The command
    `text-generation-launcher env` prints them and the settings, and ends."""

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if not self.model_id and not self.env:
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
        for adapter in parse_adapters(self.lora_adapters):
            if adapter.name in (self.model_id, self.model_id.rpartition("/")[2], *self.served_model_name):
                raise ValueError(f"`lora_adapters`: {adapter.name} is the name of the model itself")
        self._check_nodes()
        self._check_hosts()
        self._check_parts()
        self._check_places()
        self._check_host_cache()
        return self

    def _check_parts(self) -> None:
        if self.parts == "router" and not self.shards:
            raise ValueError("`parts` is router: --shards (or SHARDS) is missing")
        if self.parts != "router" and (self.shards or self.peers):
            raise ValueError(f"`parts` is {self.parts}: --shards and --peers are for --parts router")
        if self.parts == "shards" and not self.shard_tcp_port and not self.shard_uds_path:
            raise ValueError("`parts` is shards: --shard-tcp-port or --shard-uds-path is missing")
        if self.parts != "all" and not (self.shard_token or self.shard_tls_cert or self.insecure):
            raise ValueError(
                f"`parts` is {self.parts}: the launchers of shards and routers need the same SHARD_TOKEN, or mutual TLS, "
                "or --insecure"
            )
        if self.shard_tcp_port:
            split_host_port(self.shard_tcp_address(0))
            self.check_tls(self.shard_tcp_address(0))

    def shard_tcp_address(self, number: int) -> str:
        """Return the address of the shard with this number, with shard_tcp_port."""
        return join_host_port(self.shard_hostname.strip("[]"), self.shard_tcp_port + number)

    def _check_places(self) -> None:
        if self.places == "local":
            return
        for name in ("parts", "nodes", "shard_tcp_port", "shard_uds_path"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"`places` is {self.places}: --{name.replace('_', '-')} is not supported with it")
        self.check_tls("shards on other nodes")

    def _check_host_cache(self) -> None:
        if self.prefill_replicas and (not self.host_cache_bytes or self.parts != "all"):
            raise ValueError(
                "`prefill_replicas` needs a host cache (--host-cache-size) that all replicas share (--parts all)"
            )
        if self.prefill_replicas >= self.num_replicas:
            raise ValueError(
                f"`prefill_replicas`({self.prefill_replicas}) must be < `num_replicas`({self.num_replicas})"
            )
        if not self.host_cache_bytes:
            return
        if self.places != "local" or self.parts == "router":
            raise ValueError("`host_cache_size` is for a launcher that starts shards on its own host")
        if not self.prefix_caching:
            raise ValueError("`host_cache_size` keeps prefixes: --no-prefix-caching is not supported with it")
        if self.host_cache_bytes < MIN_HOST_CACHE:
            raise ValueError("`host_cache_size` must be 1MiB or more, or 0")

    @property
    def host_cache_bytes(self) -> int:
        return size_in_bytes(self.host_cache_size)

    def _check_hosts(self) -> None:
        if not self.trtllm_hosts:
            return
        if self.trtllm_launch != "mpirun":
            raise ValueError("`trtllm_hosts` is for --trtllm-launch mpirun")
        if wrong := next((host for host in self.trtllm_hosts if not re.fullmatch(r"\w[\w.-]*", host)), None):
            raise ValueError(f"`trtllm_hosts`: invalid host name {wrong!r}")
        if len(set(self.trtllm_hosts)) < len(self.trtllm_hosts):
            raise ValueError("`trtllm_hosts`: duplicate host")
        if self.num_replicas > 1 or self.places != "local":
            raise ValueError("`trtllm_hosts`: the ranks of several hosts are one replica, started from this host")

    def _check_nodes(self) -> None:
        if self.node_rank >= self.nodes:
            raise ValueError(f"`node_rank`({self.node_rank}) must be < `nodes`({self.nodes})")
        if self.nodes == 1:
            return
        if not self.leader_address:
            raise ValueError(f"`nodes` is {self.nodes}: --leader-address (or LEADER_ADDRESS) is missing")
        if not self.shard_token:
            raise ValueError(f"`nodes` is {self.nodes}: the launchers of all nodes need the same SHARD_TOKEN")
        split_host_port(self.group_address)
        self.check_tls(self.group_address)
        if self.num_replicas > 1:
            raise ValueError(f"`nodes` is {self.nodes}: `num_replicas` must be 1; a group of nodes is one replica")

    @property
    def hosts(self) -> int:
        """The number of hosts that one replica is spread over."""
        return max(self.nodes, len(self.trtllm_hosts))

    @property
    def group_address(self) -> str:
        """The address at which the shards of all nodes meet."""
        address = self.leader_address
        has_port = ":" in address.rpartition("]")[2] and (address.count(":") == 1 or "]" in address)
        return address if has_port else f"{address}:{GROUP_PORT}"

    @property
    def input_limit(self) -> int | None:
        """max_input_tokens, by its current or its deprecated name."""
        return self.max_input_length if self.max_input_tokens is None else self.max_input_tokens

    @property
    def needs_weights(self) -> bool:
        """True if the engine reads the weights of the checkpoint."""
        return self.parts != "router" and self.engine != "echo" and self.load_format != "dummy"


class LauncherCheckConfig(LauncherConfig, cli_prog_name="text-generation-launcher check"):
    """Print what would be served, by which engine and code, with how much memory, or why not. Nothing is loaded."""

    flag_only: ClassVar[frozenset[str]] = frozenset({"memory"})
    topics: ClassVar[Mapping[Topic, str]] = {Topic.MODEL: "memory"}
    usages: ClassVar[Sequence[str]] = ("MODEL [--json] [--memory 80GiB] [flags of a start]",)

    memory: Annotated[str, AfterValidator(parse_size)] = ""
    """Memory of each GPU to plan for, such as 80GiB; with --device cpu that of the machine. Default: what is there. A flag only."""


class DownloadConfig(ChildConfig, cli_prog_name="text_generation_launcher.download"):
    """Download a model and write the path of its folder to a pipe."""

    model_id: str
    """Id on the hub."""
    revision: str | None = None
    """Branch, tag or commit."""
    cache_dir: str | None = None
    """Folder of the hub's cache."""
    weights: bool = True
    """Download the weights too."""
    engines: bool = False
    """Accept compiled engines instead of weights."""
    headers_folder: str = ""
    """Folder for the small files and, instead of the weights, files of their sizes with nothing but their headers."""
    result_fd: int = -1
    """File descriptor that the path is written to."""


Settings = TypeVar("Settings", bound=LauncherConfig)


def read_config(
    argv: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    config: type[Settings] = LauncherConfig,  # type: ignore[assignment]  # mypy knows no defaults of type variables
    further: Mapping[str, str] = MappingProxyType({}),
) -> Settings:
    """Return the settings of the launcher or of one of its commands. Invalid ones: one line on standard error and exit code USAGE.

    `further`: variables from which settings take their defaults, by the name of the setting.
    """
    for name, instead in UNSUPPORTED.items():
        flag = f"--{name.replace('_', '-')}"
        if any(word == flag or word.startswith(f"{flag}=") for word in argv):
            exit_with_usage_error(config, f"{flag} is a flag of TGI's that this server does not have: {instead}")
        if environ.get(name.upper()):
            # Ignoring it would be worse: with KV_CACHE_DTYPE unnoticed, the cache takes twice the memory.
            exit_with_usage_error(
                config,
                f"{name.upper()} is set: that is a setting of TGI's which this server does not have: unset it; {instead}",
            )
    given = {word.partition("=")[0] for word in argv}
    variables = {}
    for name, variable in {**GROUP_VARIABLES, **further}.items():
        flag = f"--{name.replace('_', '-')}"
        if environ.get(variable) and not environ.get(name.upper()) and flag not in given:
            variables[name] = variable
            argv = [*argv, flag, environ[variable]]
    if port := environ.get("AIP_HTTP_PORT"):  # set by Vertex AI
        variables["port"] = "AIP_HTTP_PORT"
        argv = [*argv, "--port", port]
    return parse_config(config, argv, variables)


def child_settings(config: LauncherConfig, child: type[ProcessConfig]) -> dict[str, object]:
    """Return the launcher's settings that a child has too."""
    return {name: getattr(config, name) for name in child.model_fields if name in LauncherConfig.model_fields}
