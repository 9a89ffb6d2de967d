"""TGI's parameters as GenerationOptions, and the rules that only TGI has: 0, 1 and the refusal of neutral values."""

from __future__ import annotations

from text_generation_proto.parameters import Api
from text_generation_proto.values import SAMPLING_PARAMETERS, LogprobOptions, Sampling
from text_generation_router.api.core.parameters import GenerationOptions, given_sampling
from text_generation_router.api.core.settings import Limits
from text_generation_router.api.tgi.schemas import GenerateParameters
from text_generation_router.errors import InvalidRequest


def check_whole(parameters: GenerateParameters, limits: Limits) -> None:
    """Check rules 0a and 0b, of replies sent whole. Raises InvalidRequest."""
    best_of = parameters.best_of or 1
    if best_of > 1 and limits.max_best_of == 1:
        raise InvalidRequest("`best_of` != 1 is not allowed for this endpoint")
    if best_of > limits.max_best_of:
        raise InvalidRequest(f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}")


def check_streamed(parameters: GenerateParameters) -> None:
    """Check rules 0s and 0t, of streamed replies. Raises InvalidRequest."""
    if parameters.best_of not in (None, 1):
        raise InvalidRequest("`best_of` != 1 is not supported when streaming tokens")
    if parameters.decoder_input_details:
        raise InvalidRequest("`decoder_input_details` == true is not supported when streaming tokens")


def to_options(parameters: GenerateParameters) -> GenerationOptions:
    """Return the options. Raises InvalidRequest for rules 1 to 7, which TGI applies to neutral values too.

    Sampling is greedy unless `do_sample` is set or a parameter that filters or scales has another value than its
    neutral one. Rule 1 counts any such parameter as sampling, also at its neutral value.
    """
    given = given_sampling(parameters, Api.TGI)
    best_of = parameters.best_of or 1
    present = [parameter for parameter in SAMPLING_PARAMETERS if parameter.field in given]
    sampled = parameters.do_sample
    if best_of > 1 and not (sampled or any(parameter.samples for parameter in present)):
        raise InvalidRequest("you must use sampling when `best_of` is > 1")
    for parameter in present:
        value = given[parameter.field]
        if parameter.range is not None and value not in parameter.range:
            raise InvalidRequest(f"{parameter.label(Api.TGI)} {parameter.range.rule}")
        sampled = sampled or (parameter.samples and value != parameter.neutral)
    return GenerationOptions(
        api=Api.TGI,
        sampling=Sampling(**{"greedy": not sampled, "seed": None, **given}),
        max_new_tokens=parameters.max_new_tokens,
        stop_sequences=tuple(parameters.stop),
        keep_stop_text=True,
        logprobs=LogprobOptions(parameters.top_n_tokens or 0, prompt=parameters.decoder_input_details),
        grammar=parameters.grammar,
        best_of=best_of,
        truncate=parameters.truncate,
    )
