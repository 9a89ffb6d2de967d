"""Fields that bodies of OpenAI's dialect share: the constraints of vLLM and SGLang, and what is known but not served.

docs/api.md lists the request parameters of OpenAI, vLLM, SGLang and trtllm-serve, one by one.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from text_generation_router.api.http.fields import Name
from text_generation_router.web.bodies import Body

MAX_CHOICE_TEXTS = 10_000
"""Texts of `guided_choice` that are read; a grammar has fewer."""

ChoiceTexts = Annotated[list[str], Field(max_length=MAX_CHOICE_TEXTS, fail_fast=True)]


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
        other = ("response_format", "guided_decoding_backend")
        return {name: getattr(self, name) for name in ConstraintFields.model_fields if name not in other}

    @property
    def grammar_field(self) -> str | None:
        """The field that has the constraint. `response_format` is the last: a text without one may be asked for beside it."""
        values = {**self.constraints, "response_format": self.response_format}
        return next((name for name, value in values.items() if value not in (None, {})), None)


_WITHOUT_DEFAULT = """
    audio web_search_options chat_template guided_whitespace_pattern kv_transfer_params logits_processors media_io_kwargs
    mm_processor_kwargs prompt_embeds thinking_token_budget vllm_xargs custom_logit_processor custom_params extra_key
    input_ids lora_path session_params stop_regex prompt_token_ids prompt_token_ids_b64 disaggregated_params
    conversation_params agent_hierarchy thinking
"""
_OFF = """
    return_token_ids return_tokens_as_token_ids use_beam_search return_hidden_states return_routed_experts
    return_context_logits
"""
_ON = "include_reasoning skip_special_tokens separate_reasoning stream_reasoning detokenize"
UNSERVED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_WITHOUT_DEFAULT.split(), (None,)),
    **dict.fromkeys(_OFF.split(), (None, False)),
    **dict.fromkeys(_ON.split(), (None, True)),
    **dict.fromkeys(("top_p_min", "prompt_ignore_length"), (None, 0)),
    "modalities": (None, [], ["text"]),
}
"""Fields of OpenAI, vLLM, SGLang and trtllm-serve with a known meaning that is not served, and their values that ask for nothing."""
