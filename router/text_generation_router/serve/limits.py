"""The limits of a request, from the settings and from the model that the shards serve."""

from text_generation_proto.values import LOGPROB_PARAMETERS
from text_generation_router.api.core.settings import Limits
from text_generation_router.config import RouterConfig
from text_generation_router.serve.shards import token_limits
from text_generation_router.shards.join import ReplicaInfo

TGI_TOP_N_TOKENS, OPENAI_TOP_LOGPROBS = 5, 20
"""The default of `--max-top-n-tokens` in each dialect: its own."""


def resolve_limits(config: RouterConfig, model: ReplicaInfo) -> Limits:
    """Return the limits of one request: the settings, else the limits of model and KV cache. Raises CannotServe."""
    longest, total = token_limits(config, model)
    unsupported = dict(model.unsupported)
    if config.token_logprobs == "never":
        names = [parameter.field for parameter in LOGPROB_PARAMETERS]
        unsupported |= dict.fromkeys(names, "the server runs with --token-logprobs never")

    def most_tops(default: int) -> int:
        asked = default if config.max_top_n_tokens is None else config.max_top_n_tokens
        # If the engine has none, its reason is more useful than a limit of 0.
        return asked if "top_n" in unsupported else min(asked, model.info.max_top_n_tokens)

    return Limits(
        max_best_of=config.max_best_of,
        max_stop_sequences=config.max_stop_sequences,
        max_top_n_tokens=most_tops(TGI_TOP_N_TOKENS),
        max_top_logprobs=most_tops(OPENAI_TOP_LOGPROBS),
        max_input_tokens=longest,
        max_total_tokens=total,
        vocab_size=model.info.vocab_size,
        max_images=model.info.max_images,
        unsupported=unsupported,
        always_logprobs=config.token_logprobs == "always",
        drafts=model.info.max_tokens_per_step > 1,
        marks_turns=any(group.state for group in model.pool.further_groups),
    )
