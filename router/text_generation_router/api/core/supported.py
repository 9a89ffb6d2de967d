"""Rule 20, the last one: what the engine cannot honour is refused by name, never dropped in silence.

The shards say what that is, in the words of shard.proto (`InfoResponse.unsupported`). Here stands what a request that asks
for it looks like, and what clients call it. A parameter at its neutral value is not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from text_generation_router.errors import InvalidRequest
from text_generation_router.request import Request

Names = Mapping[str, str]
"""What a dialect calls some of the parameters below: name on the wire → as messages have it."""

_PARAMETERS: Mapping[str, tuple[str, Callable[[Request], object]]] = {
    # name on the wire: (its name in messages, unless a dialect has another one; what is true of who asks for it)
    "temperature": ("`temperature`", lambda asked: asked.sampling.temperature != 1.0),
    "top_k": ("`top_k`", lambda asked: asked.sampling.top_k),
    "top_p": ("`top_p`", lambda asked: asked.sampling.top_p < 1.0),
    "typical_p": ("`typical_p`", lambda asked: asked.sampling.typical_p < 1.0),
    "min_p": ("`min_p`", lambda asked: asked.sampling.min_p),
    "repetition_penalty": ("`repetition_penalty`", lambda asked: asked.sampling.repetition_penalty != 1.0),
    "frequency_penalty": ("`frequency_penalty`", lambda asked: asked.sampling.frequency_penalty),
    "output_frequency_penalty": ("`frequency_penalty`", lambda asked: asked.sampling.output_frequency_penalty),
    "output_presence_penalty": ("`presence_penalty`", lambda asked: asked.sampling.output_presence_penalty),
    "logit_bias_ids": ("`logit_bias`", lambda asked: any(asked.sampling.logit_bias_values)),
    "watermark": ("`watermark`", lambda asked: asked.sampling.watermark),
    # Where nothing is drawn, every seed is honoured: evaluation tools send one whatever they ask for.
    "seed": ("`seed`", lambda asked: asked.sampling.seed is not None and not asked.sampling.greedy),
    "stop_token_ids": ("`stop_token_ids`", lambda asked: asked.stop_token_ids),
    "min_new_tokens": ("`min_tokens`", lambda asked: asked.min_new_tokens),
    "top_n": ("`top_n_tokens`", lambda asked: asked.top_n_tokens),
    "prompt": ("`decoder_input_details`", lambda asked: asked.prompt_logprobs),
    "prompt_top_n": ("`echo` with `logprobs` above 0", lambda asked: asked.prompt_top_n),
    "cache_salt": ("`cache_salt`", lambda asked: asked.qos.salt),
}


def check_supported(request: Request, unsupported: Mapping[str, str], names: Names) -> None:
    """Nothing is asked for that the engine cannot honour; `unsupported` is by name on the wire, and says why. What else
    is in it no client of ours can ask for. `names` are the dialect's. Raises InvalidRequest."""
    for field, (name, is_asked_for) in _PARAMETERS.items():
        if field in unsupported and is_asked_for(request):
            raise InvalidRequest(f"{names.get(field, name)} is not supported by this engine: {unsupported[field]}")
