"""TGI's validation rules, in TGI's order and words. Parameters and limits in; nothing, values or InvalidRequest out.

    0a 0b | 0s 0t   check_whole, check_streamed      before a permit is taken
    1 … 13          check_parameters                 before the prompt is tokenized
    15 16           new_tokens                       once its length is known
    17 18 19        RequestPreparer, with grammar/
    20              check_supported, in supported.py

The numbers are those of the rules' order, which clients can see: the first rule broken is the one reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from text_generation_router.api.core.parameters import GenerateParameters
from text_generation_router.api.core.settings import Limits
from text_generation_router.errors import InvalidRequest
from text_generation_router.request import TokenId

LEG_TOKENS = 1024
"""As many new tokens rule 15 judges; see `new_tokens`."""


def check_whole(parameters: GenerateParameters, limits: Limits) -> None:
    """Rules 0a and 0b, of replies sent whole. Raises InvalidRequest."""
    best_of = parameters.best_of or 1
    if best_of > 1 and limits.max_best_of == 1:
        raise InvalidRequest("`best_of` != 1 is not allowed for this endpoint")
    if best_of > limits.max_best_of:
        raise InvalidRequest(f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}")


def check_streamed(parameters: GenerateParameters) -> None:
    """Rules 0s and 0t, of streamed replies. Raises InvalidRequest."""
    if parameters.best_of not in (None, 1):
        raise InvalidRequest("`best_of` != 1 is not supported when streaming tokens")
    if parameters.decoder_input_details:
        raise InvalidRequest("`decoder_input_details` == true is not supported when streaming tokens")


def check_parameters(inputs: str | Sequence[TokenId], parameters: GenerateParameters, limits: Limits) -> None:
    """Rules 1 to 13. Raises InvalidRequest for the first one broken."""
    for broken, message in _rules(inputs, parameters, limits):
        if broken:
            raise InvalidRequest(message)


def _rules(inputs: str | Sequence[TokenId], p: GenerateParameters, limits: Limits) -> Iterator[tuple[bool, str]]:
    several = (p.best_of or 1) > 1
    yield several and not asks_for_sampling(p), "you must use sampling when `best_of` is > 1"
    yield p.temperature is not None and p.temperature <= 0, "`temperature` must be strictly positive"
    yield (
        p.repetition_penalty is not None and p.repetition_penalty <= 0,
        "`repetition_penalty` must be strictly positive",
    )
    yield (
        p.frequency_penalty is not None and not -2.0 <= p.frequency_penalty <= 2.0,
        "`frequency_penalty` must be >= -2.0 and <= 2.0",
    )
    yield p.top_p is not None and not 0.0 < p.top_p < 1.0, "`top_p` must be > 0.0 and < 1.0"
    yield p.typical_p is not None and not 0.0 < p.typical_p < 1.0, "`typical_p` must be > 0.0 and < 1.0"
    yield p.top_k is not None and p.top_k <= 0, "`top_k` must be strictly positive"
    yield p.max_new_tokens == 0, "`max_new_tokens` must be strictly positive"
    yield (
        len(p.stop) > limits.max_stop_sequences,
        f"`stop` supports up to {limits.max_stop_sequences} stop sequences. Given: {len(p.stop)}",
    )
    yield several and p.seed is not None, "`seed` must not be set when `best_of` > 1"
    yield (
        (p.top_n_tokens or 0) > limits.max_top_n_tokens,
        f"`top_n_tokens` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {p.top_n_tokens}",
    )
    yield not inputs, "`inputs` cannot be empty"
    yield (
        p.truncate is not None and not 0 < p.truncate <= limits.max_input_tokens,
        f"`truncate` must be strictly positive and less than {limits.max_input_tokens}. Given: {p.truncate}",
    )


def new_tokens(input_tokens: int, parameters: GenerateParameters, limits: Limits) -> int:
    """Rules 15 and 16, then how many tokens to generate. Raises InvalidRequest.

    TGI generates in legs of 1024 tokens and judges only the first one: `max_new_tokens` of 100000 is accepted where 1024
    fit, and the text may be as long as fits. So here, but in one generation that is never longer than was asked for.
    """
    check_total(input_tokens, parameters, limits, given=str(input_tokens))
    if input_tokens > limits.max_input_tokens:
        raise InvalidRequest(f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {input_tokens}")
    return min(_wanted(input_tokens, parameters, limits), limits.max_total_tokens - input_tokens)


def check_total(input_tokens: int, parameters: GenerateParameters, limits: Limits, *, given: str) -> None:
    """Rule 15; `given` is how the message calls the prompt's length. Raises InvalidRequest."""
    wanted = min(_wanted(input_tokens, parameters, limits), LEG_TOKENS)
    if input_tokens + wanted > limits.max_total_tokens:
        raise InvalidRequest(
            f"`inputs` tokens + `max_new_tokens` must be <= {limits.max_total_tokens}. "
            f"Given: {given} `inputs` tokens and {wanted} `max_new_tokens`"
        )


def asks_for_sampling(parameters: GenerateParameters) -> bool:
    """Rule 1's notion: any sampling parameter is present, whatever its value. `to_sampling` has the engine's notion."""
    return parameters.do_sample or any(
        value is not None
        for value in (parameters.temperature, parameters.top_k, parameters.top_p, parameters.typical_p)
    )


def _wanted(input_tokens: int, parameters: GenerateParameters, limits: Limits) -> int:
    if parameters.max_new_tokens is None:
        return max(limits.max_total_tokens - input_tokens, 0)
    return parameters.max_new_tokens
