"""Bodies of the service routes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, FailFast, Field

from text_generation_router.api.http.bodies import Body, UInt32, validate
from text_generation_router.api.tgi.schemas import GenerateBody, GenerateParameters


class PromptBody(Body):
    """Body of /tokenize as vLLM has it, which evaluation tools send."""

    prompt: str
    """The text."""
    add_special_tokens: bool = True
    """Whether what the tokenizer puts around a text is counted."""


class UnjudgedParameters(GenerateParameters):
    """Parameters of which only the types are checked."""


class InputsBody(GenerateBody):
    """Body of /tokenize as TGI has it: that of /generate, of which only `inputs` is used."""

    inputs: str
    """The text."""
    parameters: UnjudgedParameters = UnjudgedParameters()


TokenizeBody = InputsBody | PromptBody
"""Body of /tokenize: with `inputs` TGI's, with `prompt` vLLM's."""


def tokenize_body(value: object) -> TokenizeBody:
    """Which of them a body is. Raises BodyRejected."""
    vllm = isinstance(value, dict) and "prompt" in value and "inputs" not in value
    return validate(value, PromptBody) if vllm else validate(value, InputsBody)


class DetokenizeBody(Body):
    """Body of /detokenize."""

    ids: Annotated[list[UInt32], FailFast(), Field(validation_alias=AliasChoices("ids", "tokens"))]
    """The tokens. vLLM's name for them, `tokens`, is taken too."""
