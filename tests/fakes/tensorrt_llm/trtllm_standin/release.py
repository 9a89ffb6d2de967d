"""The differences in behaviour between the imitated releases."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Release:
    """The behaviour of one release."""

    version: str
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
    graphs_have_adapters: bool
    """CUDA graphs compute LoRA adapters (PR #8279). Main; for 1.2.1 not known, and it is imitated without."""


RELEASES = {
    "1.2": Release(
        "1.2.1",
        ignores_stops_with_eos=False,
        lacks_cancelled_logprobs=True,
        announces_death=False,
        graphs_have_adapters=False,
    ),
    "1.3": Release(
        "1.3.0rc28",
        ignores_stops_with_eos=True,
        lacks_cancelled_logprobs=False,
        announces_death=True,
        graphs_have_adapters=True,
    ),
}
