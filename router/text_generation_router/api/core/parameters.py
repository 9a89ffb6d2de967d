"""The options of one generation, in the same terms for every dialect, and the rules that they must keep.

    check_options    rules 1 to 13, before the prompt is tokenized
    new_tokens       rules 15 and 16, once its length is known
                     rules 17 to 19, of grammars: RequestPreparer
    check_supported  rule 20: parameters that the engine does not support

The numbers give the order of TGI's rules, which clients can see: the first broken rule is reported. Rules 0 and 1, and
values that only TGI refuses, are in tgi/generate.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np

from text_generation_proto.parameters import Api, Parameter
from text_generation_proto.values import (
    LOGIT_BIAS,
    LOGPROB_PARAMETERS,
    MAX_LOGIT_BIAS,
    SAMPLING_PARAMETERS,
    STOPPING_PARAMETERS,
    Grammar,
    LogprobOptions,
    Sampling,
)
from text_generation_router.api.core.settings import Limits
from text_generation_router.errors import ContextLengthExceeded, InvalidRequest, NotSupported
from text_generation_router.request import Request, TokenId

MAX_STOP_TOKENS = 64
MIN_REPETITION_PENALTY = 1e-6
"""A score divided by less may be infinite, and no token could be chosen."""
MAX_JUDGED_TOKENS = 1024
"""New tokens that rule 15 judges; see `new_tokens`."""

INPUTS = {
    Api.TGI: "inputs",
    Api.CHAT: "messages",
    Api.COMPLETIONS: "prompt",
    Api.RESPONSES: "input",
    Api.MESSAGES: "messages",
}
"""The field of the prompt in each API."""

_OF_TOKENS = ("logit_bias_ids", "allowed_token_ids", "bad_words")
_TGI_SAMPLING = [parameter for parameter in SAMPLING_PARAMETERS if Api.TGI in parameter.names]
_TOP_N = next(parameter for parameter in LOGPROB_PARAMETERS if parameter.field == "top_n")
_OTHER_SAMPLING = [parameter for parameter in SAMPLING_PARAMETERS if Api.TGI not in parameter.names]


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """The options of one generation.

    The dialects differ in what their words mean:

                            TGI                                     OpenAI, Anthropic
        stop text           stays in the text                       is cut
        frequency_penalty   minus f · count / length,               minus f · count, output alone
                            prompt and output
        presence_penalty    –                                       minus p once, output alone
        top_p 1.0           refused                                 off
        temperature 0       refused                                 greedy
        sampling            only if asked for                       unless temperature is 0
    """

    api: Api
    """The API whose names messages use."""
    sampling: Sampling = Sampling(seed=None)
    """The seed is None if the client gave none."""
    max_new_tokens: int | None = None
    """None: as many as fit after the prompt."""
    length_field: str = "max_new_tokens"
    """The client's name of `max_new_tokens`."""
    min_new_tokens: int = 0
    stop_token_ids: tuple[TokenId, ...] = ()
    bad_words: tuple[str, ...] = ()
    """Texts that the output must not contain, read as tokens."""
    ignore_eos: bool = False
    stop_sequences: tuple[str, ...] = ()
    keep_stop_text: bool = False
    logprobs: LogprobOptions = LogprobOptions()
    grammar: Grammar | Mapping[str, Any] | None = None
    """A mapping is TGI's form: it is read after the prompt was tokenized, as the order of TGI's rules wants."""
    grammar_field: str | None = None
    """The client's name of `grammar`; None: no error names it."""
    adapter: str = ""
    """LoRA adapter; "": the model alone."""
    best_of: int = 1
    truncate: int | None = None
    """Keep this number of tokens at the end of the prompt."""
    add_special_tokens: bool = True
    """False for chats: the template writes special tokens itself."""
    visible_special: frozenset[TokenId] = frozenset()
    """Special tokens that are part of the text."""
    prediction: str = ""
    """The text that the client expects."""

    def check_prompt(self, prompt: str | Sequence[TokenId]) -> None:
        """Raise InvalidRequest if the prompt is empty."""
        if not prompt:
            raise InvalidRequest(f"`{INPUTS[self.api]}` cannot be empty")


def given_sampling(body: object, api: Api) -> dict[str, Any]:
    """Return the sampling parameters that `body` sets, by field of Sampling, without those that name tokens."""
    return {
        parameter.field: value
        for parameter in SAMPLING_PARAMETERS
        if parameter.field not in _OF_TOKENS
        and (name := parameter.names.get(api)) is not None
        and (value := getattr(body, name, None)) is not None
    }


def open_sampling(
    body: object,
    api: Api,
    logit_bias: Mapping[TokenId, float] | None = None,
    allowed_token_ids: Sequence[TokenId] | None = None,
) -> Sampling:
    """Return the sampling of OpenAI and Anthropic: greedy at temperature or `top_p` 0; a filter that keeps all is off."""
    given = {"seed": None, **given_sampling(body, api)}
    greedy = 0.0 in (given.get("temperature"), given.get("top_p"))
    for parameter in SAMPLING_PARAMETERS:
        allowed, value = parameter.allowed(api), given.get(parameter.field, nan)
        if allowed and value in allowed and (not parameter.allows(value) or (greedy and parameter.samples)):
            del given[parameter.field]
    if given["seed"] is not None:
        given["seed"] %= 2**64
    biases = logit_bias or {}
    return Sampling(
        greedy=greedy,
        logit_bias_ids=tuple(biases),
        logit_bias_values=tuple(biases.values()),
        allowed_token_ids=tuple(allowed_token_ids or ()),
        **given,
    )


def check_options(inputs: str | Sequence[TokenId], options: GenerationOptions, limits: Limits) -> None:
    """Check rules 2 to 13, then the ranges of parameters that TGI lacks. Raises InvalidRequest for the first broken."""
    sampling, top_n = options.sampling, options.logprobs.top_n
    _check_ranges(options, _TGI_SAMPLING)
    if options.max_new_tokens == 0:
        raise InvalidRequest(f"`{options.length_field}` must be strictly positive")
    if len(options.stop_sequences) > limits.max_stop_sequences:
        given = len(options.stop_sequences)
        field = "stop_sequences" if options.api is Api.MESSAGES else "stop"
        raise InvalidRequest(f"`{field}` supports up to {limits.max_stop_sequences} stop sequences. Given: {given}")
    if options.best_of > 1 and sampling.seed is not None:
        raise InvalidRequest("`seed` must not be set when `best_of` > 1")
    most_tops = limits.max_top_n_tokens if options.api is Api.TGI else limits.max_top_logprobs
    if top_n > most_tops:
        raise InvalidRequest(f"{_TOP_N.label(options.api)} must be >= 0 and <= {most_tops}. Given: {top_n}")
    if options.logprobs.prompt_top_n > most_tops:
        given = options.logprobs.prompt_top_n
        raise InvalidRequest(f"`prompt_logprobs` must be >= 0 and <= {most_tops}. Given: {given}")
    options.check_prompt(inputs)
    if options.truncate is not None and not 0 < options.truncate <= limits.max_input_tokens:
        name = "truncate" if options.api is Api.TGI else "truncate_prompt_tokens"
        raise InvalidRequest(
            f"`{name}` must be strictly positive and less than {limits.max_input_tokens}. Given: {options.truncate}"
        )
    _check_ranges(options, _OTHER_SAMPLING)
    if options.max_new_tokens is not None and options.min_new_tokens > options.max_new_tokens:
        raise InvalidRequest(
            f"`min_tokens` must be <= `{options.length_field}`. "
            f"Given: {options.min_new_tokens} and {options.max_new_tokens}"
        )
    if sampling.repetition_penalty < MIN_REPETITION_PENALTY:
        raise InvalidRequest(
            f"`repetition_penalty` must be >= {MIN_REPETITION_PENALTY}. Given: {sampling.repetition_penalty:g}"
        )
    if len(sampling.logit_bias_ids) > MAX_LOGIT_BIAS:
        given = len(sampling.logit_bias_ids)
        raise InvalidRequest(f"`logit_bias` supports up to {MAX_LOGIT_BIAS} tokens. Given: {given}")
    if not all(bias in LOGIT_BIAS for bias in sampling.logit_bias_values):
        raise InvalidRequest(f"`logit_bias` values {LOGIT_BIAS.rule}")
    check_token_ids("logit_bias", sampling.logit_bias_ids, limits)
    check_token_ids("allowed_token_ids", sampling.allowed_token_ids, limits)
    if len(options.stop_token_ids) > MAX_STOP_TOKENS:
        given = len(options.stop_token_ids)
        raise InvalidRequest(f"`stop_token_ids` supports up to {MAX_STOP_TOKENS} tokens. Given: {given}")
    check_token_ids("stop_token_ids", options.stop_token_ids, limits)


def _check_ranges(options: GenerationOptions, parameters: Sequence[Parameter]) -> None:
    for parameter in parameters:
        if parameter.range is not None and not parameter.allows(getattr(options.sampling, parameter.field)):
            allowed = parameter.allowed(options.api) or parameter.range
            raise InvalidRequest(f"{parameter.label(options.api)} {allowed.rule}")


def check_token_ids(name: str, ids: Sequence[TokenId], limits: Limits) -> None:
    """Raise InvalidRequest if one of `ids` is outside the vocabulary."""
    values = np.asarray(ids)  # without a copy of a prompt, which is an array
    if values.size and not 0 <= values.min() <= values.max() < limits.vocab_size:
        raise InvalidRequest(f"`{name}` has a token id that is not one of {limits.vocab_size}")


def new_tokens(input_tokens: int, options: GenerationOptions, limits: Limits) -> int:
    """Check rules 15 and 16 and return the number of tokens to generate. Raises ContextLengthExceeded, InvalidRequest.

    TGI generates in legs of 1024 tokens and judges only the first: it accepts `max_new_tokens` of 100000 where 1024 fit,
    and the text may be as long as fits. So here, but in one generation.
    """
    check_total(input_tokens, options, limits, given=str(input_tokens))
    if input_tokens > limits.max_input_tokens:
        raise ContextLengthExceeded(
            f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {input_tokens}",
            tokens=str(input_tokens),
            limit=limits.max_input_tokens,
            context=limits.max_total_tokens,
            param=INPUTS[options.api],
        )
    return min(_wanted(input_tokens, options, limits), limits.max_total_tokens - input_tokens)


def check_total(input_tokens: int, options: GenerationOptions, limits: Limits, *, given: str) -> None:
    """Check rule 15; `given` is the prompt's length as the message has it. Raises ContextLengthExceeded."""
    wanted = min(_wanted(input_tokens, options, limits), MAX_JUDGED_TOKENS)
    if input_tokens + wanted > limits.max_total_tokens:
        raise ContextLengthExceeded(
            f"`inputs` tokens + `max_new_tokens` must be <= {limits.max_total_tokens}. "
            f"Given: {given} `inputs` tokens and {wanted} `max_new_tokens`",
            tokens=given,
            limit=max(limits.max_total_tokens - wanted, 0),
            context=limits.max_total_tokens,
            param=INPUTS[options.api],
        )


def _wanted(input_tokens: int, options: GenerationOptions, limits: Limits) -> int:
    if options.max_new_tokens is None:
        return max(limits.max_total_tokens - input_tokens, 0)
    return options.max_new_tokens


def check_supported(request: Request, api: Api, unsupported: Mapping[str, str]) -> None:
    """Check rule 20: raise InvalidRequest if `request` asks for a parameter that the engine does not support.

    `unsupported` maps names on the wire to reasons. A parameter at its neutral value is not asked for.
    """
    for values, parameters in (
        (request.sampling, SAMPLING_PARAMETERS),
        (request, STOPPING_PARAMETERS),
        (request.logprobs, LOGPROB_PARAMETERS),
    ):
        for parameter in parameters:
            if parameter.field in unsupported and _asks_for(values, parameter, api):
                raise _not_supported(parameter.label(api), unsupported[parameter.field])
    if "cache_salt" in unsupported and request.qos.salt:
        raise _not_supported("`cache_salt`", unsupported["cache_salt"])


def _asks_for(values: object, parameter: Parameter, api: Api) -> bool:
    if parameter.field == "tokens" and api not in parameter.names:
        return False  # TGI's replies show the log-probabilities that the engine knows
    if isinstance(values, Sampling) and parameter.field == "seed":
        # Without sampling every seed is honoured: evaluation tools send one in any case.
        return values.seed is not None and not values.greedy
    if isinstance(values, Sampling) and parameter.field == "logit_bias_ids":
        return any(values.logit_bias_values)
    return bool(getattr(values, parameter.field) != parameter.neutral)


def _not_supported(name: str, reason: str) -> NotSupported:
    return NotSupported(f"{name} is not supported by this engine: {reason}")
