"""Fields that bodies of OpenAI's dialect share: the constraints of vLLM and SGLang, and what is known but not served.

docs/api.md lists the request parameters of OpenAI, vLLM and SGLang, one by one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, WrapValidator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from text_generation_router.api.http.bodies import Body, Name

MAX_CHOICE_TEXTS = 10_000
"""Texts of `guided_choice` that are read; a grammar has fewer."""

ChoiceTexts = TypeAliasType("ChoiceTexts", Annotated[list[str], FailFast(), Field(max_length=MAX_CHOICE_TEXTS)])


class ConstraintFields(Body):
    """Constraints on the answer. At most one of them may be given.

    The OpenAPI document has the first two. It leaves out the older ones of vLLM and those of SGLang, which mean the same.
    """

    response_format: dict[str, Any] | None = None
    """OpenAI's `text`, `json_object` and `json_schema`; also TGI's forms, and `structural_tag` of vLLM and SGLang."""
    structured_outputs: dict[str, Any] | None = None
    """vLLM's: one of `json`, `regex`, `choice`, `grammar`, `structural_tag`, `json_object`."""
    guided_json: SkipJsonSchema[dict[str, Any] | str | None] = None
    """vLLM's: a JSON schema for the answer."""
    guided_regex: SkipJsonSchema[str | None] = None
    """vLLM's: a regular expression for the answer."""
    guided_choice: SkipJsonSchema[ChoiceTexts | None] = None
    """vLLM's: the answer is one of these."""
    guided_grammar: SkipJsonSchema[str | None] = None
    """vLLM's: rules for the answer, in EBNF or Lark."""
    guided_decoding_backend: Name | None = None
    """vLLM's. Accepted; not used: there is one backend."""
    json_schema: SkipJsonSchema[dict[str, Any] | str | None] = None
    """SGLang's: a JSON schema for the answer."""
    regex: SkipJsonSchema[str | None] = None
    """SGLang's: a regular expression for the answer."""
    ebnf: SkipJsonSchema[str | None] = None
    """SGLang's: rules for the answer, in EBNF or Lark."""
    structural_tag: SkipJsonSchema[dict[str, Any] | str | None] = None
    """SGLang's: a structural tag."""

    @property
    def constraints(self) -> dict[str, Any]:
        """The fields with their values, without `response_format`."""
        return {name: getattr(self, name) for name in ConstraintFields.model_fields if name != "response_format"}


def _named(value: Any, check: Any) -> Any:  # noqa: ANN401 - any JSON value
    try:
        return check(value)
    except ValueError:
        raise PydanticCustomError("not_supported", "is not supported by this server") from None


_Unserved = WrapValidator(_named)
Nothing = Annotated[None, _Unserved, SkipJsonSchema()]
"""Only null, which asks for nothing."""
Off = Annotated[Literal[False] | None, _Unserved, SkipJsonSchema()]
TextModality = TypeAliasType(
    "TextModality", Annotated[list[Literal["text"]], FailFast(), Field(max_length=1), _Unserved]
)
On = Annotated[Literal[True] | None, _Unserved, SkipJsonSchema()]


class UnservedFields(Body):
    """Fields with a known meaning that is not served. A value that asks for nothing is accepted.

    The OpenAPI document leaves them out.
    """

    modalities: SkipJsonSchema[TextModality | None] = None
    """OpenAI's: `["text"]`; audio is refused."""
    audio: Nothing = None
    """OpenAI's: refused."""
    web_search_options: Nothing = None
    """OpenAI's: refused."""
    use_beam_search: Off = None
    """vLLM's: true is refused."""
    guided_whitespace_pattern: Nothing = None
    """vLLM's: refused: JSON has the white space that json.dumps writes."""
    logits_processors: Nothing = None
    """vLLM's: refused."""
    custom_logit_processor: Nothing = None
    """SGLang's: refused."""
    custom_params: Nothing = None
    """SGLang's: refused."""
    chat_template: Nothing = None
    """vLLM's: refused: the operator chooses the template."""
    mm_processor_kwargs: Nothing = None
    """vLLM's: refused."""
    media_io_kwargs: Nothing = None
    """vLLM's: refused."""
    prompt_embeds: Nothing = None
    """vLLM's: refused."""
    input_ids: Nothing = None
    """SGLang's: refused; `prompt` of /v1/completions takes token ids."""
    kv_transfer_params: Nothing = None
    """vLLM's: refused."""
    vllm_xargs: Nothing = None
    """vLLM's: refused."""
    thinking_token_budget: Nothing = None
    """vLLM's: refused."""
    stop_regex: Nothing = None
    """SGLang's: refused."""
    lora_path: Nothing = None
    """SGLang's: refused; `model` names an adapter."""
    session_params: Nothing = None
    """SGLang's: refused: nothing is stored."""
    extra_key: Nothing = None
    """SGLang's: refused; `cache_salt` keeps cached computation apart."""
    return_tokens_as_token_ids: Off = None
    """vLLM's: true is refused."""
    return_token_ids: Off = None
    """vLLM's: true is refused."""
    return_hidden_states: Off = None
    """SGLang's: true is refused."""
    return_routed_experts: Off = None
    """SGLang's: true is refused."""
    skip_special_tokens: On = None
    """vLLM's: false is refused: special tokens are no text."""
    include_reasoning: On = None
    """vLLM's: false is refused."""
    separate_reasoning: On = None
    """SGLang's: false is refused: the operator decides it."""
    stream_reasoning: On = None
    """SGLang's: false is refused."""
