"""What differs between the two releases that are imitated, beyond signatures."""

from __future__ import annotations

from dataclasses import dataclass

SAMPLING_EXTRAS = frozenset(
    {"seed", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bad_token_ids"}
)
"""Fields of SamplingParams that 1.2's default sampler drops in silence."""


@dataclass(frozen=True, slots=True)
class Release:
    """One release's ways."""

    version: str
    default_sampler_honours: frozenset[str]
    """Which of SAMPLING_EXTRAS take effect with the default sampler.

    1.2: none. Penalties: issue #9442, mended in main by PR #16485 (July 2026). min_p: PR #16590. Seed: PR #17172. Bad
    words: not in the feature table of docs/source/features/sampling.md at 1.2.1.
    """
    zero_logprobs: bool
    """Whether logprobs=0 asks for the chosen token's. 1.2: `return_log_probs = bool(logprobs)`, so 0 means none."""
    always_scores_prompt: bool
    """Whether prompt_logprobs holds the prompt's own token even where it is not among the most probable. 1.2: no
    (result.py, end: only the top k of the context logits)."""
    eos_ignored_with_stops: bool
    """Whether ignore_eos drops stop_token_ids as well. Main's base_worker.py: yes; near 1.2.1: no."""
    lacks_cancelled_logprobs: bool
    """Whether the last item of a cancelled request can bring a token without its logprobs, which its reader asserts
    against. 1.2.1: result.py asserts for cancelled items too; main exempts them. Only where Settings.cancel_with_token."""
    announces_death: bool
    """Whether a dead worker raises EngineDeadError in every pending result. Main: PR #15816. Before: they wait for
    ever (behaviour inferred from what PRs #12718 and #16312 mend)."""
    stats: str
    """queue: what the dispatch thread put by; rpc: what a call to the worker brings (PR #9980, December 2025)."""
    detailed_stats: bool
    """Whether inflightBatchingStats counts queued work (main's py_executor.py)."""


V1_2 = Release(
    version="1.2.1",
    default_sampler_honours=frozenset(),
    zero_logprobs=False,
    always_scores_prompt=False,
    eos_ignored_with_stops=False,
    lacks_cancelled_logprobs=True,
    announces_death=False,
    stats="queue",
    detailed_stats=False,
)
V1_3 = Release(
    version="1.3.0rc28",
    default_sampler_honours=SAMPLING_EXTRAS,
    zero_logprobs=True,
    always_scores_prompt=True,
    eos_ignored_with_stops=True,
    lacks_cancelled_logprobs=False,
    announces_death=True,
    stats="rpc",
    detailed_stats=True,
)
