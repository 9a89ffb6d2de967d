"""From what a body says to how tokens are chosen."""

from __future__ import annotations

from text_generation_proto.values import Sampling
from text_generation_router.api.core.extras import Extras
from text_generation_router.api.core.parameters import GenerateParameters


def to_sampling(parameters: GenerateParameters, extras: Extras, random_seed: int | None) -> Sampling:
    """How to choose tokens. Greedy unless `do_sample` is set or a parameter differs from its neutral value.

    `random_seed` counts where none is given; None: the engine takes none.
    """
    temperature = 1.0 if parameters.temperature is None else parameters.temperature
    top_k = parameters.top_k or 0
    top_p = 1.0 if parameters.top_p is None else parameters.top_p
    typical_p = 1.0 if parameters.typical_p is None else parameters.typical_p
    return Sampling(
        greedy=not (parameters.do_sample or temperature != 1.0 or top_k != 0 or top_p < 1.0 or typical_p < 1.0),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        typical_p=typical_p,
        repetition_penalty=1.0 if parameters.repetition_penalty is None else parameters.repetition_penalty,
        frequency_penalty=parameters.frequency_penalty or 0.0,
        seed=random_seed if parameters.seed is None else parameters.seed,
        watermark=parameters.watermark,
        min_p=extras.min_p,
        output_frequency_penalty=extras.frequency_penalty,
        output_presence_penalty=extras.presence_penalty,
        logit_bias_ids=tuple(extras.logit_bias),
        logit_bias_values=tuple(extras.logit_bias.values()),
    )
