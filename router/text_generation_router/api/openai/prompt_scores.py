"""The log-probabilities of a prompt in vLLM's form: `prompt_logprobs`."""

from __future__ import annotations

import asyncio
from itertools import zip_longest

import orjson

from text_generation_router.api.core.serving import TOKENS_AT_ONCE, Collector
from text_generation_router.api.openai.answers import PromptToken, alternative
from text_generation_router.text.tokenizer import Tokenizer


async def written_prompt_scores(collector: Collector, tokenizer: Tokenizer, tops_each: int) -> orjson.Fragment:
    """Return a list as JSON: for each prompt token null, or an object of it and the `tops_each` most probable tokens, by id."""
    written: list[bytes] = []
    scores = zip_longest(collector.request.prompt, collector.prompt_logprobs, collector.prompt_tops)
    for at, (token_id, logprob, tops) in enumerate(scores):
        if at % TOKENS_AT_ONCE == 0:
            await asyncio.sleep(0)
        if at == 0 or logprob in (None, b"null"):
            written.append(b"null")
            continue
        best = list(tops or ())[:tops_each]
        ranks = {top: rank for rank, (top, _) in enumerate(best, 1)}
        tokens: dict[str, PromptToken] = {}
        for top, value in ((token_id, orjson.Fragment(logprob)), *((top, alternative(value)) for top, value in best)):
            tokens.setdefault(
                str(top), {"logprob": value, "rank": ranks.get(top), "decoded_token": tokenizer.token_text(top)}
            )
        written.append(orjson.dumps(tokens))
    return orjson.Fragment(b"[%b]" % b",".join(written))
