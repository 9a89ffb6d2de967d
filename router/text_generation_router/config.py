"""The settings of the router. Flags, environment names, --help and docs/flags.md are derived from them."""

import ipaddress
import json
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    WrapValidator,
    model_validator,
)
from pydantic_settings import NoDecode

from text_generation_common.settings import MAX_BATCH_SIZE, ChildConfig, SharedSettings, TokenBudget, Topic
from text_generation_common.shard_access import ShardAccess


def _split(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value.startswith("["):  # as CliApp.serialize writes it
        return tuple(json.loads(value))
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _keys(value: object) -> object:
    """Split a list of keys. An empty list that was given on purpose is an error: it would leave the server open."""
    keys = _split(value)
    if isinstance(value, str) and value and not keys:
        raise ValueError("it contains no key")
    return keys


def _weights(value: object) -> object:
    """Parse name=weight, …: positive numbers. Names may contain any character except commas."""
    if isinstance(value, str):
        if value.startswith("{"):  # as CliApp.serialize writes it
            return json.loads(value)
        value = _split(value)
    if not isinstance(value, tuple | list):
        return value
    pairs = [str(part).rpartition("=") for part in value]
    if not all(name and equals for name, equals, _ in pairs):
        raise ValueError("expected tenant=weight")
    return {name: weight for name, _, weight in pairs}


CommaList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""A flag given several times, or once with commas; in the environment, with commas."""
MetricNames = Annotated[tuple[Literal["tgi", "vllm", "trtllm"], ...], NoDecode, BeforeValidator(_split)]
Weights = Annotated[dict[str, Annotated[float, Field(ge=0.001, le=1000)]], NoDecode, BeforeValidator(_weights)]
"""The weights of tenants, comma-separated, as a flag or in the environment."""
if TYPE_CHECKING:
    OptionalSwitch = bool | None
else:
    OptionalSwitch = Annotated[bool, WrapValidator(lambda value, validate: None if value is None else validate(value))]
    """A switch (--x, --no-x) that is None if it was not given. Declared as `bool | None` it would be a flag with a value."""
Keys = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_keys)]
"""Comma-separated secrets; an empty list is an error."""


def listen_host(hostname: str) -> str:
    """Return the IP address to listen on.

    As in TGI, a host name means all addresses: in a container HOSTNAME is its id. `::` includes those of IPv4.
    """
    if hostname == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(hostname.strip("[]")))
    except ValueError:
        return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


class KvEventsConfig(BaseModel):
    """The value of --kv-events-config: the keys of vLLM's flag, but for a queue that is not needed here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = Field(10_000, gt=0, le=1_000_000)
    hwm: int = Field(100_000, gt=0, lt=1 << 31)
    topic: str = ""

    @model_validator(mode="after")
    def _check_packages(self) -> Self:
        if None in (find_spec("zmq"), find_spec("msgspec")):
            raise ValueError("KV events need the extra `kv-events`: pip install 'pyzmq>=26' 'msgspec>=0.19'")
        return self

    @classmethod
    def check(cls, text: str) -> str:
        """Return the value of the flag. Raises ValueError."""
        return text and (cls.model_validate_json(text), text)[1]


ToolCallFormat = Literal[
    "auto", "apertus", "cohere_command", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v31",
    "deepseek_v32", "deepseek_v4", "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4", "ernie45",
    "functiongemma", "gemma4", "glm", "glm45", "glm47", "gpt-oss", "granite", "granite4", "harmony", "hermes",
    "hunyuan", "hunyuan_a13b", "hy_v3", "json", "kimi_k2", "lfm2", "ling3", "llama3", "llama3_json", "llama4",
    "llama4_json", "llama4_pythonic", "minimax-m2", "minimax_m2", "minimax_m3", "mistral", "olmo3", "openai",
    "phi4_mini_json", "poolside_v1", "pythonic", "qwen", "qwen25", "qwen3_coder", "qwen3_json", "qwen3_xml", "seed_oss",
    "step3p5",
]  # fmt: skip


class RouterSettings(SharedSettings, ShardAccess):
    """The settings of the router that a user may give to the launcher."""

    topics: ClassVar[Mapping[Topic, str]] = {
        Topic.MODEL: "model_id served_model_name revision tokenizer_config_path chat_template tool_call_parser "
        "forward_unknown_tools split_reasoning",
        Topic.REPLICAS: "dispatch prefill_replicas max_request_moves shards peers peer_name shard_connect_timeout",
        Topic.HTTP: "hostname port management_port api_key api_keys_file open_metrics dashboard cors_allow_origin "
        "payload_limit max_connections max_unread_bytes keep_alive_timeout shutdown_delay graceful_termination_timeout "
        "http_workers compute_type docker_label aip_predict_route aip_health_route",
        Topic.REQUESTS: "max_input_tokens max_total_tokens max_best_of max_stop_sequences max_top_n_tokens "
        "max_client_batch_size allowed_media_domains max_image_fetch_size disable_grammar_support token_logprobs enable_prefill_logprobs",
        Topic.QUEUE: "max_concurrent_requests max_queued_tokens queue_timeout request_timeout tenant_weights max_priority "
        "trust_caller_headers validation_workers",
        Topic.BATCHING: "max_batch_size max_batch_prefill_tokens max_batch_total_tokens target_itl_ms waiting_served_ratio "
        "max_waiting_tokens prefix_caching prefix_cache_per_tenant",
        Topic.AUDITS: "audit_share audit_busy audit_action audit_folder",
        Topic.TRACES: "metric_names kv_events_config",
    }

    model_id: str = ""
    """Name to report for the model; default: the folder."""
    served_model_name: CommaList = ()
    """Further names of the model, with commas between; /v1/models lists them first. A request for any other model is rejected.
    `*`: none is."""
    revision: str | None = None
    """Revision of the model: a branch, tag or commit."""
    hostname: str = "0.0.0.0"
    """Address to listen on. A host name means all of them, as in TGI; so does `::`, for IPv6 and IPv4."""
    port: Annotated[int, Field(ge=0, le=65535)] = 3000
    """Port to listen on. The router alone accepts 0: any free port."""
    max_concurrent_requests: PositiveInt = 128
    """Most concurrent requests, queued ones included; further ones are rejected with 429."""
    max_best_of: PositiveInt = 2
    """Largest value of `best_of`."""
    max_stop_sequences: NonNegativeInt = 16
    """Most stop sequences of a request."""
    max_top_n_tokens: NonNegativeInt | None = None
    """Largest value of `top_n_tokens`, and of OpenAI's `top_logprobs` and `logprobs`. Default: 5 in TGI's dialect, 20 in
    OpenAI's."""
    max_input_tokens: PositiveInt | None = None
    """Longest prompt, in tokens; default: max_total_tokens - 1."""
    max_total_tokens: PositiveInt | None = None
    """Most prompt plus new tokens of a request; default: what the model and the KV cache allow."""
    max_batch_prefill_tokens: TokenBudget | None = None
    """Most prompt tokens computed in one step; longer prompts are split into chunks. Default: what the engine suggests."""
    max_batch_total_tokens: TokenBudget | None = None
    """KV cache for all running requests, in tokens; default: what warm-up measures."""
    max_batch_size: Annotated[int, Field(gt=0, le=MAX_BATCH_SIZE)] | None = None
    """Most sequences running at once on a replica; default: what the engine can hold."""
    waiting_served_ratio: NonNegativeFloat = 0.0
    """Start waiting requests only once their number is this fraction of the running ones. 0: at the next step."""
    max_waiting_tokens: NonNegativeInt = 20
    """Decode steps after which waiting requests start regardless of waiting_served_ratio."""
    target_itl_ms: NonNegativeFloat = 0.0
    """Inter-token latency, in milliseconds, that prefill beside decoding should not exceed: chunk sizes are chosen for
    it. 0: chunks of max_batch_prefill_tokens."""
    prefix_caching: bool = True
    """Keep the KV cache of prompts and answers for later prompts with the same prefix."""
    prefix_cache_per_tenant: OptionalSwitch = None
    """Do not share the prefix cache between tenants, so that response times reveal nothing about other tenants. Default:
    true with several API keys."""
    dispatch: Literal["prefix", "least-loaded", "round-robin", "random"] = "prefix"
    """Choice of the replica: by cached prefix and load, by load alone, round-robin, or at random."""
    tenant_weights: Weights = Field(default_factory=dict)
    """Weights of tenants as tenant=weight, from 0.001 to 1000; default: 1 for each tenant."""
    max_queued_tokens: PositiveInt | None = None
    """Most tokens in the queue; requests beyond it are rejected with 429. Default: eight times the KV cache."""
    queue_timeout: NonNegativeFloat = 0.0
    """Longest time of a request in the queue, in seconds; 0: no limit."""
    request_timeout: NonNegativeFloat = 0.0
    """Longest time from the arrival of a request to its end, in seconds; 0: no limit."""
    prefill_replicas: NonNegativeInt = 0
    """Replicas that compute long prompts for the others, which decode: sequences move by way of the host cache. 0: each replica does
    both, which serves most loads better: docs/scheduling.md."""
    max_request_moves: NonNegativeInt = 2
    """Most consecutive replica losses, without a new token in between, that a running request survives."""
    max_client_batch_size: PositiveInt = 128
    """Most prompts in one OpenAI completion request."""
    allowed_media_domains: CommaList = ()
    """Hosts that images are fetched from by URL, with commas between, each with its port if it is not 80 or 443. Default: none;
    images come as `data:` URIs."""
    max_image_fetch_size: PositiveInt = 20_000_000
    """Largest file of an image that is fetched, in bytes; a larger value counts as 20 MB, the limit of all images."""
    validation_workers: PositiveInt = 2
    """Threads that tokenize; at least two."""
    payload_limit: PositiveInt = 32_000_000
    """Largest request body, in bytes."""
    max_connections: PositiveInt = 4096
    """Most open HTTP connections. Beyond it the longest idle one is closed; if none is idle, only probes are answered.
    Each HTTP worker has an equal part."""
    max_unread_bytes: PositiveInt = 1_000_000
    """Most bytes of a stream that its client has not read; beyond it the stream is ended."""
    keep_alive_timeout: Annotated[float, Field(gt=0)] = 75.0
    """Seconds that an idle HTTP connection is kept. A load balancer's own timeout must be shorter."""
    http_workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that serve HTTP. 1: one router process does everything; more: a scheduler process beside them, and limits,
    metrics and health are those of all of them together."""
    management_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of a second listener for probes and metrics; 0: none."""
    token_logprobs: Literal["auto", "always", "never"] = "auto"
    """Log-probabilities of generated tokens. auto: where the reply shows them (TGI's streams and `details`, OpenAI's
    `logprobs`); always: for every request, as TGI does; never: not at all."""
    enable_prefill_logprobs: bool = False
    """Accepted for compatibility with TGI: prefill log-probabilities are always available."""
    api_key: Keys = ()
    """API keys, required on every route except health checks; default: no authentication. Prefer API_KEY in the
    environment: command lines are visible to all users of the machine."""
    api_keys_file: str = ""
    """TOML file of further API keys with their tenants, priorities and rate limits, read again on SIGHUP."""
    metric_names: MetricNames = ("tgi",)
    """Names under which /metrics shows the metrics, with commas between: vllm and trtllm beside TGI's, which are always
    there."""
    kv_events_config: Annotated[str, AfterValidator(KvEventsConfig.check)] = ""
    """Events of the KV cache for gateways, a JSON object with the keys of vLLM's flag, such as {"endpoint": "tcp://*:5557"}:
    docs/kubernetes.md. Default: none."""
    open_metrics: bool = False
    """Serve /metrics without a key, as TGI does and gateways of the Kubernetes inference extension need."""
    max_priority: Literal["system", "interactive", "default", "bulk"] = "interactive"
    """Most urgent priority that callers may ask for; a key of api_keys_file may have its own."""
    trust_caller_headers: bool = False
    """Without API keys: let the headers of any caller name its tenant and raise its priority."""
    tokenizer_config_path: str = ""
    """A tokenizer_config.json whose chat template and special tokens replace the model's."""
    chat_template: str | None = None
    """Chat template that replaces the model's: a file or the template itself."""
    disable_grammar_support: bool = False
    """Reject grammars, response formats and forced tool calls."""
    tool_call_parser: ToolCallFormat = "auto"
    """Format of the model's tool calls, by the name that vLLM or SGLang gives it. auto: derived from its chat template."""
    forward_unknown_tools: bool = False
    """Return calls of tools that the request does not have as calls; by default they are text."""
    split_reasoning: bool = False
    """Return text between `<think>` and `</think>`, or the markers that the chat template has for it, separately, as
    `reasoning_content`. The formats openai and gemma4 always do."""
    aip_predict_route: str = ""
    """Additional path for predictions; Vertex AI sets AIP_PREDICT_ROUTE."""
    aip_health_route: str = ""
    """Additional path for health checks; Vertex AI sets AIP_HEALTH_ROUTE."""
    docker_label: str = ""
    """Name of the build, shown by /info."""
    dashboard: bool = True
    """Serve a page for operators at /dashboard."""
    cors_allow_origin: CommaList = ()
    """Origins allowed by CORS; default: any."""
    compute_type: str = "gpu+optimized"
    """Value of the x-compute-type header."""
    shutdown_delay: NonNegativeFloat = 0.0
    """Seconds after SIGTERM in which the router is not ready but still accepts requests, until load balancers have noticed."""
    graceful_termination_timeout: NonNegativeFloat = 90.0
    """Seconds that a stopping router gives running requests to finish."""
    shard_connect_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds to wait for the shards to become ready. Those of --shards are waited for without limit."""
    peers: str = ""
    """Routers that share the shards of --shards, this one included, in the same forms: each drives its part, and takes over
    the part of one that is gone. Default: this router drives them all."""
    peer_name: str = ""
    """Address of this router among its peers, HOST:PORT. Default: the peer at --port of an address of this machine."""
    audit_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of requests that are computed again in idle time, and compared: docs/audits.md. Default: 0.001 on GPUs, else 0."""
    audit_busy: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Busy share of the replicas, as text_generation_busy_ratio shows it, above which no request is audited."""
    audit_action: Literal["log", "isolate"] = "log"
    """The response to a text that differs: a line in the log, or, after three that share one feature and nothing else, this feature
    (prefixes, the host cache, drafts, a replica) is not used any more."""
    audit_folder: str = ""
    """Folder for a JSON file of each text that differs. It holds token ids of prompt and answer. Default: none is written."""
    shards: str = ""
    """Shards that come and go: addresses with commas between, dns://name:port, file:///path.yaml (a list of addresses) or
    kubernetes://namespace/service:port. The router serves from the first one that joins."""


class RouterConfig(RouterSettings, ChildConfig, cli_prog_name="text-generation-router"):
    """Serve HTTP in front of the shards: text, queue, continuous batching."""

    flag_only: ClassVar[frozenset[str]] = frozenset({"role", "http_worker", "worker_socket"})
    topics: ClassVar[Mapping[Topic, str]] = {Topic.ROUTER: "model_path shard_address role http_worker worker_socket"}

    model_path: str = ""
    """Folder with tokenizer.json (and config.json)."""
    shard_address: CommaList = ("unix:///tmp/text-generation-server-0",)
    """Addresses of the shards, one per replica: unix:///path or host:port. All are waited for at the start, and none leaves.
    Not used with --shards."""
    role: Literal["all", "scheduler", "http"] = "all"
    """Part of the router that this process is: all of it, the scheduler process, or an HTTP worker. Set by the launcher."""
    http_worker: Annotated[int, Field(ge=0, le=63)] = 0
    """Number of this HTTP worker, from 0. Set by the launcher."""
    worker_socket: str = ""
    """Path of the Unix socket between the HTTP workers and the scheduler process, which listens. Set by the launcher."""

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if self.prefill_replicas and (self.shards or self.prefill_replicas >= len(self.shard_address)):
            raise ValueError("`prefill_replicas` must be less than the number of shards, which do not come and go")
        if self.role == "all" and self.http_workers > 1:
            raise ValueError(
                "`http_workers` above 1 is for text-generation-launcher, which starts them: --parts router"
            )
        return self

    @property
    def process_name(self) -> str:
        """The name of the process in its log records."""
        return {"all": "router", "scheduler": "router-scheduler", "http": f"http-worker-{self.http_worker}"}[self.role]
