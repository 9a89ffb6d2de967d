"""What TGI's routes and the service routes answer, for the OpenAPI document. Tests hold the real answers against it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Base of what is answered: nothing is in it that is not described."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Token(Answer):
    """A generated token."""

    id: int
    text: str
    logprob: float | None
    """Null where it is not known, or where the token could not come."""
    special: bool


class PrefillToken(Answer):
    """A token of the prompt."""

    id: int
    text: str
    logprob: float | None
    """Null for the first, and where the engine does not know it."""


FinishReason = Literal["length", "eos_token", "stop_sequence"]


class BestOfSequence(Answer):
    """One of the other sequences of `best_of`."""

    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] = []


class Details(Answer):
    """How a text came about."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] = []
    top_tokens: list[list[Token]] = []
    cached_tokens: int = 0
    """Tokens of the prompt that were found in the KV cache; absent where none was."""


class GenerateAnswer(Answer):
    """A generated text."""

    generated_text: str
    details: Details | None = None


class StreamDetails(Answer):
    """How a streamed text came about."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int
    cached_tokens: int = 0
    """Tokens of the prompt that were found in the KV cache; absent where none was."""


class StreamEvent(Answer):
    """One token of a streamed text; the last one has the text and, where asked for, details."""

    index: int
    token: Token
    top_tokens: list[Token] = []
    generated_text: str | None
    details: StreamDetails | None


class SimpleToken(Answer):
    """A token, and which bytes of the text it stands for."""

    id: int
    text: str
    start: int
    stop: int


class ChatTokenizeAnswer(Answer):
    """A conversation as the model reads it, and its tokens."""

    tokenize_response: list[SimpleToken]
    templated_text: str


class TokenIdsAnswer(Answer):
    """The answer to a `prompt`, as vLLM gives it."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(Answer):
    """A text, under our name and under vLLM's."""

    text: str
    prompt: str


class TokenizerInfo(Answer):
    """What clients that render and count for themselves need to know."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None
    model_max_length: int


class PrefixCacheAnswer(Answer):
    """Prompt tokens asked for and found in the KV cache, since the server started, and those kept now."""

    query_tokens: int
    hit_tokens: int
    hit_rate: float
    cached_tokens: int


class InfoAnswer(Answer):
    """What is served, and within which limits."""

    model_config = ConfigDict(protected_namespaces=())

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
    model_dtype: str
    model_device_type: str
    """`cuda` or `cpu`."""
    engine: str
    """`tensorrt-llm`, `torch` or `echo`."""
    unsupported: dict[str, str]
    """What the engine cannot honour, as the shards call it, and why. A request that asks for it is refused."""
    replicas: int
    replicas_serving: int
    prefix_cache: PrefixCacheAnswer


class ModelAnswer(Answer):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelsAnswer(Answer):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelAnswer]


class VertexAnswer(Answer):
    """A text an instance, in order."""

    predictions: list[str]


class LiveAnswer(Answer):
    """KServe's answer of both its probes."""

    live: bool


class ServerMetadata(Answer):
    """KServe's view of the server."""

    name: str
    version: str
    extensions: list[str]


class InferOutput(Answer):
    """One output: bytes as numbers, or texts, as the inputs were given."""

    name: str
    shape: list[int]
    datatype: Literal["BYTES"]
    data: list[int] | list[str]


class InferAnswer(Answer):
    """KServe's inference answer."""

    id: str | None
    outputs: list[InferOutput]
