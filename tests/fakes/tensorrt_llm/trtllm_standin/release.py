"""The differences in behaviour between the imitated releases."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Release:
    """The behaviour of one release."""

    version: str
    ignores_stops_with_eos: bool = False
    """ignore_eos drops stop_token_ids as well. Main: base_worker.py; not near 1.2.1."""
    lacks_cancelled_logprobs: bool = False
    """The last item of a cancelled request can hold a token without log-probabilities, against which its reader asserts.

    1.2.1: result.py asserts for cancelled items too; main exempts them. Only with Settings.cancel_with_token.
    """
    announces_death: bool = False
    """A dead worker raises EngineDeadError in every pending result. Main: PR #15816.

    Before, they wait forever (inferred from what PRs #12718 and #16312 fix).
    """
    types_speculation: bool = False
    """`decoding_type` is a field, so a mapping may be given as speculative_config. Main; not 1.2.1 (llm_args.py)."""
    refuses_speculative_logprobs: bool = False
    """A request with log-probabilities is refused if the engine speculates (PR #18401), and one with unsupported sampling.

    Before, mtp.py and spec_sampler_base.py assert in the step, so that all running requests fail.
    """
    asserts_scored_prompts: bool = False
    """A request with prompt_logprobs that is cancelled before its first token ends the thread that delivers all responses.

    Main: base_worker.py, _compute_pytorch_prompt_logprobs; inferred from py_executor.py, _handle_canceled_requests.
    """
    blocks_for_stats: bool = False
    """get_stats and get_stats_async are remote calls that block their thread, 0.1 s if there are none (rpc_worker_mixin.py)."""
    tells_windows: bool = False
    """Entries of the statistics have the blocks on the GPU by attention window (kv_cache_iteration_stats_to_dict, main in 2026)."""
    reports_usage: bool = False
    """LLM() reports usage to NVIDIA unless TRTLLM_NO_USAGE_STATS=1 (usage_lib.py, main)."""
    graphs_have_adapters: bool = False
    """CUDA graphs compute LoRA adapters (PR #8279). Main; for 1.2.1 not known, and it is imitated without."""


RELEASES = {
    "1.2": Release("1.2.1", lacks_cancelled_logprobs=True),
    "1.3": Release(
        "1.3.0rc28",
        ignores_stops_with_eos=True,
        announces_death=True,
        types_speculation=True,
        refuses_speculative_logprobs=True,
        asserts_scored_prompts=True,
        blocks_for_stats=True,
        tells_windows=True,
        reports_usage=True,
        graphs_have_adapters=True,
    ),
}
