"""OpenAI's words into TGI's parameters and `Extras`; what they leave to TGI's rules, those judge."""

from __future__ import annotations

from text_generation_proto.values import Grammar
from text_generation_router.api.core.extras import Extras
from text_generation_router.api.core.parameters import GenerateParameters
from text_generation_router.api.core.supported import Names
from text_generation_router.api.openai.schemas import ChatBody, CompletionBody, OpenAIBody
from text_generation_router.errors import InvalidRequest
from text_generation_router.grammar.forms import guided, response_format
from text_generation_router.request import TokenId

CHAT_NAMES: Names = {"top_n": "`top_logprobs`"}
COMPLETION_NAMES: Names = {"top_n": "`logprobs`", "prompt": "`echo` with `logprobs`"}
"""What parameters are called that TGI knows by another name."""


def chat_parameters(body: ChatBody) -> GenerateParameters:
    """The parameters of a chat; `top_logprobs` counts without `logprobs` too, as in TGI."""
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _parameters(body, max_new_tokens=wanted, top_n_tokens=body.top_logprobs)


def completion_parameters(body: CompletionBody) -> GenerateParameters:
    """The parameters of a completion. `max_tokens` of 0 generates one token that is then not shown."""
    wanted = body.max_tokens
    return _parameters(
        body,
        max_new_tokens=1 if wanted == 0 and body.echo else wanted,
        top_n_tokens=body.logprobs,
        prompt_logprobs=bool(body.echo) and body.logprobs is not None,
    )


def extras(body: OpenAIBody) -> Extras:
    """What TGI's parameters have no place for. Raises InvalidRequest."""
    return Extras(
        keep_stop_text=False,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_new_tokens=body.min_tokens or 0,
        min_p=body.min_p or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=_logit_bias(body),
        names=COMPLETION_NAMES if isinstance(body, CompletionBody) else CHAT_NAMES,
    )


def asked_grammar(body: OpenAIBody) -> Grammar | None:
    """What the answer must look like; `response_format` wins over vLLM's fields. Raises InvalidRequest."""
    if body.response_format is not None:
        return response_format(body.response_format)
    return guided(
        {
            "guided_json": body.guided_json,
            "guided_regex": body.guided_regex,
            "guided_choice": body.guided_choice,
            "structured_outputs": body.structured_outputs,
        }
    )


def _parameters(
    body: OpenAIBody, *, max_new_tokens: int | None, top_n_tokens: int | None, prompt_logprobs: bool = False
) -> GenerateParameters:
    greedy = body.temperature == 0.0
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    # Built from values that were validated already: only the rules' ranges are left to judge.
    return GenerateParameters.model_construct(
        temperature=None if greedy else body.temperature,
        do_sample=not greedy,
        # With no choice left to sample, what narrows the choice is idle.
        top_p=None if greedy or body.top_p is None or body.top_p >= 1.0 else body.top_p,
        top_k=None if greedy or body.top_k in (None, 0, -1) else body.top_k,
        repetition_penalty=body.repetition_penalty,
        max_new_tokens=max_new_tokens,
        stop=[one for one in stop if one],
        seed=None if body.seed is None else body.seed % 2**64,
        top_n_tokens=top_n_tokens,
        decoder_input_details=prompt_logprobs,
    )


def _logit_bias(body: OpenAIBody) -> dict[TokenId, float]:
    if not isinstance(body.logit_bias, dict):
        return {}
    biases: dict[TokenId, float] = {}
    for token_id, bias in body.logit_bias.items():
        if not (token_id.isascii() and token_id.isdecimal()):
            raise InvalidRequest("`logit_bias` keys must be token ids")
        biases[int(token_id)] = bias
    return biases
