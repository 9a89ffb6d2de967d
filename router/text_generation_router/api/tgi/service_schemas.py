"""Bodies of the service routes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, FailFast, Field

from text_generation_router.api.http.bodies import Body, UInt32, validate
from text_generation_router.api.tgi.schemas import GenerateBody, GenerateParameters


class PromptBody(Body):
    """Body of /tokenize in vLLM's form, which evaluation tools send."""

    prompt: str
    """The text."""
    add_special_tokens: bool = True
    """Count the special tokens that the tokenizer adds."""


class UnjudgedParameters(GenerateParameters):
    """Parameters whose ranges are not checked."""


class InputsBody(GenerateBody):
    """Body of /tokenize in TGI's form: that of /generate; only `inputs` is used."""

    inputs: str
    """The text."""
    parameters: UnjudgedParameters = UnjudgedParameters()


TokenizeBody = InputsBody | PromptBody
"""Body of /tokenize: TGI's with `inputs`, vLLM's with `prompt`."""


def tokenize_body(value: object) -> TokenizeBody:
    """Return the parsed body. Raises InvalidBody."""
    vllm = isinstance(value, dict) and "prompt" in value and "inputs" not in value
    return validate(value, PromptBody) if vllm else validate(value, InputsBody)


class DetokenizeBody(Body):
    """Body of /detokenize."""

    ids: Annotated[list[UInt32], FailFast(), Field(validation_alias=AliasChoices("ids", "tokens"))]
    """The token ids; also accepted as `tokens`, vLLM's name."""
