"""Policy: what a step may spend and when the queue may move. Pure questions over numbers."""

from __future__ import annotations

from dataclasses import dataclass

from text_generation_router.scheduling.steps import JoinReason


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's limits."""

    max_batch_prefill_tokens: int
    """Prompt tokens computed in one step, over all chunks."""
    max_batch_size: int
    """Entries running at once."""
    waiting_served_ratio: float = 0.0
    """Admit only once the queue holds this share of the running entries; 0: always."""
    max_decode_steps_between_prefills: int = 20
    """Steps without an admission after which the ratio no longer counts; `--max-waiting-tokens`."""

    def may_admit(self, *, waiting: int, running: int, steps_since_admission: int) -> bool:
        """Whether waiting entries may join the next step (TGI, backends/v3 `batching_task`)."""
        if running == 0 or steps_since_admission >= self.max_decode_steps_between_prefills:
            return True
        return waiting >= int(running * self.waiting_served_ratio)

    def join_reason(self, *, running: int, steps_since_admission: int) -> JoinReason:
        """Why waiting entries may join so many running ones, given that they may."""
        if int(running * self.waiting_served_ratio) == 0:
            return JoinReason.CHUNKING
        if steps_since_admission >= self.max_decode_steps_between_prefills:
            return JoinReason.WAIT_EXCEEDED
        return JoinReason.BACKPRESSURE
