"""Response headers about a request's cost: TGI's, and x-cached-tokens. Times are in milliseconds, x-compute-time in seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence

from text_generation_router.api.core.settings import Settings
from text_generation_router.api.http.record import GenerationRecord, cached_tokens


def cost_headers(settings: Settings, characters: int) -> dict[str, str]:
    """Return the headers known in advance; `characters` is the length of the prompt."""
    return {"x-compute-type": settings.config.compute_type, "x-compute-characters": str(characters)}


def timing_headers(generations: Sequence[GenerationRecord]) -> dict[str, str]:
    """Return the times and tokens of finished generations, summed as TGI does for several prompts."""
    now = time.monotonic()
    spent = [generation.spent(now) for generation in generations]
    prompts = [generation.request.prompt for generation in generations if generation.request is not None]
    return {
        "x-total-time": _milliseconds(sum(times.total_s for times in spent)),
        "x-validation-time": _milliseconds(sum(times.validation_s for times in spent)),
        "x-queue-time": _milliseconds(sum(times.queue_s for times in spent)),
        "x-inference-time": _milliseconds(sum(times.inference_s for times in spent)),
        "x-time-per-token": _milliseconds(sum(times.per_token_s for times in spent)),
        "x-prompt-tokens": str(sum(len(prompt) for prompt in prompts)),
        "x-generated-tokens": str(sum(times.generated_tokens for times in spent)),
        "x-cached-tokens": str(_cached_tokens(generations)),
    }


def compute_time_header(generation: GenerationRecord) -> dict[str, str]:
    """Return the header of replies to a single prompt."""
    return {"x-compute-time": str(generation.spent(time.monotonic()).total_s)}


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


def _cached_tokens(generations: Sequence[GenerationRecord]) -> int:
    """Return the cached tokens of all prompts. A prompt with several answers counts once, as in `usage`."""
    by_prompt: dict[int, list[GenerationRecord]] = {}
    for generation in generations:
        if generation.request is not None:
            by_prompt.setdefault(id(generation.request.prompt), []).append(generation)
    return sum(cached_tokens(group) for group in by_prompt.values())
