"""The differences in behaviour between the imitated releases."""

from __future__ import annotations

from dataclasses import dataclass

SAMPLING_EXTRAS = frozenset({"seed", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"})
"""Fields of SamplingParams that the default sampler of 1.2 silently ignores."""


@dataclass(frozen=True, slots=True)
class Release:
    """The behaviour of one release."""

    version: str
    sampling_extras: frozenset[str]
    """SAMPLING_EXTRAS that the default sampler supports.

    1.2: none. Penalties: issue #9442, fixed on main by PR #16485 (July 2026). min_p: PR #16590. Seeds: PR #17172.
    """
    zero_logprobs: bool
    """logprobs=0 requests the chosen token's. 1.2: `return_log_probs = bool(logprobs)`, so 0 means none."""
    own_prompt_logprobs: bool
    """prompt_logprobs contain the prompt's own token even if it is improbable. 1.2: only the top k (end of result.py)."""
    ignores_stops_with_eos: bool
    """ignore_eos drops stop_token_ids as well. Main: base_worker.py; not near 1.2.1."""
    lacks_cancelled_logprobs: bool
    """The last item of a cancelled request can hold a token without log-probabilities, against which its reader asserts.

    1.2.1: result.py asserts for cancelled items too; main exempts them. Only with Settings.cancel_with_token.
    """
    announces_death: bool
    """A dead worker raises EngineDeadError in every pending result. Main: PR #15816.

    Before, they wait forever (inferred from what PRs #12718 and #16312 fix).
    """
    fetches_stats: bool
    """Statistics are fetched by a call to the worker (PR #9980, December 2025), else pushed by its dispatch thread."""
    detailed_stats: bool
    """inflightBatchingStats counts queued requests (py_executor.py on main)."""


RELEASES = {
    "1.2": Release(
        version="1.2.1",
        sampling_extras=frozenset(),
        zero_logprobs=False,
        own_prompt_logprobs=False,
        ignores_stops_with_eos=False,
        lacks_cancelled_logprobs=True,
        announces_death=False,
        fetches_stats=False,
        detailed_stats=False,
    ),
    "1.3": Release(
        version="1.3.0rc28",
        sampling_extras=SAMPLING_EXTRAS,
        zero_logprobs=True,
        own_prompt_logprobs=True,
        ignores_stops_with_eos=True,
        lacks_cancelled_logprobs=False,
        announces_death=True,
        fetches_stats=True,
        detailed_stats=True,
    ),
}
