"""What OpenAI's dialects can ask for and TGI's cannot, and where the two mean different things by one word.

Read this, then `Request` and `text/stop.py`: there is no other place where the dialects part ways below their JSON.

                        TGI                                     OpenAI, Anthropic
    stop text           stays in the text                       is cut
    frequency_penalty   minus f · count / length,               minus f · count, output alone
                        prompt and output
    presence_penalty    (chat) repetition_penalty + 2           minus p once, output alone
    top_p 1.0           refused                                 off
    temperature 0       refused                                 greedy
    sampling            only if asked for                       unless temperature is 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from text_generation_proto.values import MAX_LOGIT_BIAS, Grammar
from text_generation_router.api.core.settings import Limits
from text_generation_router.api.core.supported import Names
from text_generation_router.errors import InvalidRequest
from text_generation_router.request import TokenId

MAX_STOP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Extras:
    """Beside TGI's GenerateParameters; the defaults are TGI's behaviour."""

    add_special_tokens: bool = True
    """False for chat: the template has them already."""
    keep_stop_text: bool = True
    visible_special: frozenset[TokenId] = frozenset()
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    """OpenAI's."""
    presence_penalty: float = 0.0
    """OpenAI's."""
    logit_bias: Mapping[TokenId, float] = field(default_factory=dict)
    prompt_top_n: int = 0
    grammar: Grammar | None = None
    names: Names = field(default_factory=dict)
    """What the dialect calls parameters, where TGI has another word."""


TGI = Extras()
"""A request of TGI's own routes."""


def check_extras(extras: Extras, limits: Limits) -> None:
    """Every range that TGI's rules do not know. Raises InvalidRequest for the first one broken."""
    for name, penalty in (
        ("frequency_penalty", extras.frequency_penalty),
        ("presence_penalty", extras.presence_penalty),
    ):
        if not -2.0 <= penalty <= 2.0:
            raise InvalidRequest(f"`{name}` must be >= -2.0 and <= 2.0")
    if not 0.0 <= extras.min_p <= 1.0:
        raise InvalidRequest("`min_p` must be >= 0.0 and <= 1.0")
    if len(extras.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"`logit_bias` supports up to {MAX_LOGIT_BIAS} tokens. Given: {len(extras.logit_bias)}")
    for token_id, bias in extras.logit_bias.items():
        if not -100.0 <= bias <= 100.0:
            raise InvalidRequest("`logit_bias` values must be >= -100 and <= 100")
        check_token_ids("logit_bias", (token_id,), limits)
    if len(extras.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            f"`stop_token_ids` supports up to {MAX_STOP_TOKENS} tokens. Given: {len(extras.stop_token_ids)}"
        )
    check_token_ids("stop_token_ids", extras.stop_token_ids, limits)
    if extras.prompt_top_n > limits.max_top_n_tokens:
        raise InvalidRequest(f"`logprobs` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {extras.prompt_top_n}")


def check_token_ids(name: str, ids: Sequence[TokenId], limits: Limits) -> None:
    """Every id is one of the model's. Raises InvalidRequest."""
    if ids and not 0 <= min(ids) <= max(ids) < limits.vocab_size:
        raise InvalidRequest(f"`{name}` has a token id that is not one of {limits.vocab_size}")
