"""Parameters of OpenAI's bodies as GenerationOptions."""

from __future__ import annotations

from dataclasses import replace

from text_generation_proto.parameters import Api
from text_generation_proto.values import Grammar, LogprobOptions
from text_generation_router.api.core.parameters import GenerationOptions, open_sampling
from text_generation_router.api.openai.schemas import ChatBody, CompletionBody, OpenAIBody
from text_generation_router.errors import InvalidRequest, NotSupported
from text_generation_router.grammar.forms import guided, response_format
from text_generation_router.request import TokenId
from text_generation_router.web.body_reasons import about


def chat_options(body: ChatBody) -> GenerationOptions:
    """Return the options of a chat; as in TGI, `top_logprobs` counts without `logprobs` too. Raises InvalidRequest."""
    is_new = body.max_completion_tokens is not None
    max_tokens = body.max_completion_tokens if is_new else body.max_tokens
    top_n = body.top_logprobs or 0
    options = _options(body, Api.CHAT, max_tokens, LogprobOptions(top_n, tokens=bool(body.logprobs) or top_n > 0))
    return replace(options, length_field="max_completion_tokens") if is_new else options


def completion_options(body: CompletionBody) -> GenerationOptions:
    """Return the options of a completion. Raises InvalidRequest.

    `max_tokens` of 0 with `echo` generates one token that the answer leaves out.
    """
    top_n = body.logprobs or 0
    scored = body.logprobs is not None
    logprobs = LogprobOptions(
        top_n, prompt=bool(body.echo) and scored, prompt_top_n=top_n if body.echo else 0, tokens=scored
    )
    max_tokens = 1 if body.max_tokens == 0 and body.echo else body.max_tokens
    return _options(
        body,
        Api.COMPLETIONS,
        max_tokens,
        logprobs,
        add_special_tokens=body.add_special_tokens is not False,
        grammar=asked_grammar(body),
    )


def asked_grammar(body: OpenAIBody) -> Grammar | None:
    """Return the grammar of the answer. Raises InvalidRequest."""
    with about("response_format"):
        form = None if body.response_format is None else response_format(body.response_format)
    other = guided(body.constraints)
    if form is not None and other is not None:
        raise InvalidRequest("`response_format` and another constraint cannot be combined")
    return form or other


def _options(
    body: OpenAIBody,
    api: Api,
    max_tokens: int | None,
    logprobs: LogprobOptions,
    *,
    add_special_tokens: bool = True,
    grammar: Grammar | None = None,
) -> GenerationOptions:
    if body.prompt_logprobs is not None:
        if body.stream:
            raise NotSupported("`prompt_logprobs` is not supported with `stream`")
        most = max(logprobs.prompt_top_n, body.prompt_logprobs)
        logprobs = replace(logprobs, prompt=True, prompt_top_n=most)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return GenerationOptions(
        api=api,
        sampling=open_sampling(body, api, _logit_bias(body), body.allowed_token_ids),
        max_new_tokens=max_tokens,
        length_field="max_tokens",
        min_new_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        bad_words=tuple(body.bad_words or ()),
        ignore_eos=bool(body.ignore_eos),
        stop_sequences=tuple(text for text in stop if text),
        keep_stop_text=bool(body.include_stop_str_in_output or body.no_stop_trim),
        truncate=body.truncate_prompt_tokens,
        logprobs=logprobs,
        grammar=grammar,
        add_special_tokens=add_special_tokens,
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
