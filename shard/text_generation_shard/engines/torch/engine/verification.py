"""The rows that sample the tokens of a sequence with drafts: one for each position, as if the drafts before it had been sampled."""

from text_generation_shard.engines.torch.engine.scoring import sampling_row
from text_generation_shard.engines.torch.sampling.history import TokenHistories
from text_generation_shard.engines.torch.sampling.penalties import SamplingRow, needs_history
from text_generation_shard.step.masks import Mask, TokenMasks
from text_generation_shard.step.sequence import StepRow

UNKNOWN = "the mask is computed in a later step"


def verifying_rows(
    row: StepRow, histories: TokenHistories, masks: TokenMasks | None, vocab_size: int
) -> tuple[list[SamplingRow], list[Mask | None]]:
    """Return the row and the mask of each position of a row with drafts.

    The matcher of a grammar stays where it is; a copy of it follows the drafts, up to the first that is not allowed or has a mask
    for which steps do not wait. The masks behind have a failure.
    """
    sequence, matcher = row.sequence, row.sequence.matcher
    known, generated = len(sequence.tokens), sequence.generated
    history = histories.along(sequence, row.drafts) if needs_history(sequence.sampling) else None
    rows: list[SamplingRow] = []
    allowed: list[Mask | None] = []
    mask: Mask | None = None
    for place, draft in enumerate((*row.drafts, None)):
        if masks is not None and matcher is not None and (mask is None or mask.failure is None):
            mask = masks.now(sequence, matcher)
        before = None if history is None else history[: known + place]
        rows.append(sampling_row(sequence, mask, before, vocab_size))
        allowed.append(mask)
        if draft is None:
            break
        if mask is not None and matcher is not None and mask.failure is None:
            matcher = matcher.copy()
            if matcher.is_slow or not mask.allowed[draft]:
                mask = Mask(mask.allowed, may_end=False, failure=UNKNOWN)
            else:
                matcher.accept(draft)
        sequence.tokens.append(draft)
        sequence.generated += 1
    if sequence.matcher is not None and matcher is not None:
        sequence.matcher.count(matcher)
    del sequence.tokens[known:]
    sequence.generated = generated
    return rows, allowed
