"""RouterConfig: every setting of the router, written once. Flags, environment names and --help come from here."""

from __future__ import annotations

import ipaddress
import json
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic_settings import NoDecode

from text_generation_proto.process import ProcessConfig


def _split(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value.startswith("["):  # as CliApp.serialize writes it
        return tuple(json.loads(value))
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _keys(value: object) -> object:
    """Keys that are asked for and then not there would leave the server open."""
    keys = _split(value)
    if isinstance(value, str) and value and not keys:
        raise ValueError("there is no key in it")
    return keys


def _weights(value: object) -> object:
    """name=weight, …: positive numbers. Names may have any character but commas."""
    if isinstance(value, str):
        if value.startswith("{"):  # as CliApp.serialize writes it
            return json.loads(value)
        value = _split(value)
    if not isinstance(value, tuple | list):
        return value
    pairs = [str(part).rpartition("=") for part in value]
    if not all(name and equals for name, equals, _ in pairs):
        raise ValueError("a weight is written as tenant=weight")
    return {name: weight for name, _, weight in pairs}


CommaList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""A flag given several times, or once with commas; in the environment, with commas."""
Weights = Annotated[dict[str, Annotated[float, Field(ge=0.001, le=1000)]], NoDecode, BeforeValidator(_weights)]
"""Tenants and their shares, as a flag given once with commas, or so in the environment."""
Keys = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_keys)]
"""The same for secrets; a comma always separates two."""


def listen_host(hostname: str) -> str:
    """The address to listen on. As in TGI a name means all of them: in a container HOSTNAME is the container's id."""
    if hostname == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(hostname))
    except ValueError:
        return "0.0.0.0"


class RouterConfig(ProcessConfig, cli_prog_name="text-generation-router"):
    """Serve HTTP in front of a shard: text, queue, continuous batching."""

    model_path: str = ""
    """Folder with tokenizer.json (and config.json)."""
    model_id: str = ""
    """Name to report for the model; default: the folder."""
    revision: str | None = None
    """Revision of the model, for /info."""
    shard_address: CommaList = ("unix:///tmp/text-generation-server-0",)
    """Where the replicas' shards listen: unix:///path or host:port, one a replica."""
    hostname: str = "0.0.0.0"
    """Address to listen on. A name that is no IP address means 0.0.0.0, as in TGI."""
    port: Annotated[int, Field(ge=0, le=65535)] = 3000
    """Port to listen on; 0 takes a free one."""
    max_concurrent_requests: PositiveInt = 128
    """Requests in the building at once; the next one is refused with 429."""
    max_best_of: PositiveInt = 2
    """Largest `best_of`."""
    max_stop_sequences: NonNegativeInt = 4
    """Most stop sequences a request may name."""
    max_top_n_tokens: NonNegativeInt = 5
    """Largest `top_n_tokens`."""
    max_input_tokens: PositiveInt | None = None
    """Longest prompt, in tokens; default: max_total_tokens - 1."""
    max_total_tokens: PositiveInt | None = None
    """Prompt plus new tokens of a request; default: what the model and the KV cache allow."""
    max_batch_prefill_tokens: PositiveInt | None = None
    """Prompt tokens computed in one step; longer prompts are cut in chunks. Default: what the engine suggests."""
    max_batch_total_tokens: PositiveInt | None = None
    """KV cache over all running requests, in tokens; default: what warm-up measures."""
    max_batch_size: PositiveInt | None = None
    """Requests running at once; default: what the engine can hold."""
    waiting_served_ratio: NonNegativeFloat = 0.0
    """Let waiting requests in only once they number this share of the running ones. 0: at the next step."""
    max_waiting_tokens: NonNegativeInt = 20
    """Decode steps after which waiting requests are let in whatever waiting_served_ratio says."""
    target_itl_ms: NonNegativeFloat = 0.0
    """Milliseconds between two tokens of a stream to which prompts may stretch it: they are computed in chunks that keep
    to it. 0: in chunks of max_batch_prefill_tokens."""
    prefix_caching: bool = True
    """Keep what was computed of prompts and answers for prompts that begin alike."""
    prefix_cache_per_tenant: bool = False
    """Share nothing of that between tenants, so that nobody can tell by the time it takes what others asked."""
    dispatch: Literal["prefix", "least-loaded", "round-robin", "random"] = "prefix"
    """How a replica is chosen for a request: by cached prefix and load, by load alone, in turn, at random."""
    tenant_weights: Weights = Field(default_factory=dict)
    """Shares of tenants that have not the usual one, as tenant=weight, from 0.001 to 1000; the usual one is 1."""
    max_queued_tokens: PositiveInt | None = None
    """Work that may wait, in tokens; what would make it more is refused with 429. Default: eight times the KV cache."""
    queue_timeout: NonNegativeFloat = 0.0
    """Longest time a request may wait in the queue, in seconds; 0: any."""
    request_timeout: NonNegativeFloat = 0.0
    """Longest time from a request's arrival to its end, in seconds; 0: any."""
    max_request_moves: NonNegativeInt = 3
    """Times in a row a running request may lose its shard, and go on elsewhere, without a new token in between."""
    max_client_batch_size: PositiveInt = 4
    """Most prompts in one request of the OpenAI dialect."""
    validation_workers: PositiveInt = 2
    """Threads that tokenize."""
    payload_limit: PositiveInt = 2_000_000
    """Largest request body, in bytes."""
    enable_prefill_logprobs: bool = False
    """Accepted for TGI's sake: prefill log-probabilities are always served when a request asks for them."""
    api_key: Keys = ()
    """Keys that let a request in, asked for on every route but health checks; default: anyone may call. Better given as
    API_KEY in the environment: a command line is seen by everyone on the machine."""
    tokenizer_config_path: str = ""
    """A tokenizer_config.json whose chat template and special tokens are used instead of the model's."""
    chat_template: str | None = None
    """Chat template to use instead of the model's: a file, or the template itself."""
    disable_grammar_support: bool = False
    """Refuse grammars, response formats and forced tool calls."""
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "json"] = "auto"
    """Format in which the model writes tool calls; default: what its chat template says."""
    split_reasoning: bool = False
    """Answer what the model writes between <think> and </think> apart, as `reasoning_content`."""
    aip_predict_route: str = ""
    """A further path for Vertex AI's predictions, as AIP_PREDICT_ROUTE says."""
    aip_health_route: str = ""
    """A further path for Vertex AI's health checks, as AIP_HEALTH_ROUTE says."""
    docker_label: str = ""
    """Name of the build, for /info."""
    cors_allow_origin: CommaList = ()
    """Origins allowed to call from a browser; default: any."""
    compute_type: str = "gpu+optimized"
    """Value of the x-compute-type header."""
    graceful_termination_timeout: NonNegativeFloat = 90.0
    """Seconds a stopping router gives running requests to finish."""
    shard_connect_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds to wait for the shard to become ready."""
