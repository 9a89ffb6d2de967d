"""Scores of tokens that are known, given the tokens before them.

Prompt log-probabilities are those of the raw logits. The tokens of a replay are scored as they were chosen, from the processed
logits: several rows of one sequence at consecutive positions, by the code that samples.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from text_generation_shard.engine import PromptScores
from text_generation_shard.engines.torch.device.copies import download, upload
from text_generation_shard.engines.torch.engine.executor import Executor
from text_generation_shard.engines.torch.sampling.penalties import SamplingRow, needs_history
from text_generation_shard.engines.torch.sampling.sampler import sample
from text_generation_shard.step.masks import Mask, TokenMasks, choice_of_tokens
from text_generation_shard.step.replay import Replay
from text_generation_shard.step.sequence import Sequence, StepRow

POSITIONS_AT_ONCE = 64
"""Positions whose logits are held at once: the logits of a whole prompt would take gigabytes."""


Write = Callable[[], None]
"""Writes scores; the device must have finished their copies to the host."""


def start_scores(
    row: StepRow, scores: PromptScores, offset: int, hidden: Tensor, logits: Callable[[Tensor, int, int], Tensor]
) -> list[Write]:
    """Launch the scoring of the prompt tokens that a row's hidden states predict; `offset` as in `StepInFlight.prefills`.

    `logits(hidden, first, end)` returns the logits of rows first <= row < end of the hidden states, without any sampling
    transformation. Position i predicts token i + 1.
    """
    pending: list[Write] = []
    last = min(row.start + row.length, len(scores.logprobs) - 1)
    for start in range(row.start, last, POSITIONS_AT_ONCE):
        end = min(start + POSITIONS_AT_ONCE, last)
        predicting = logits(hidden, offset + start - row.start, offset + end - row.start)
        pending.append(_start(row.sequence, scores, start + 1, predicting))
    return pending


def _start(sequence: Sequence, scores: PromptScores, first: int, logits: Tensor) -> Write:
    """Score the tokens that `logits` [n, vocabulary] predict; `first` is the position of the first of them."""
    logprobs = logits.float().log_softmax(-1)
    targets = upload(sequence.tokens[first : first + len(logits)], torch.int64, logits.device)
    count = 0 if scores.tops is None else min(sequence.prompt_top_n, logits.shape[1])
    best = logprobs.topk(count, dim=-1)
    of_tokens = download(logprobs.gather(1, targets.unsqueeze(1)).squeeze(1))
    top_ids, top_logprobs = download(best.indices), download(best.values)

    def write() -> None:
        span = slice(first, first + len(of_tokens))
        scores.logprobs[span] = of_tokens.tolist()
        if scores.tops is not None:
            pairs = zip(top_ids.tolist(), top_logprobs.tolist(), strict=True)
            scores.tops[span] = [(tuple(ids), tuple(logprobs)) for ids, logprobs in pairs]

    return write


def start_token_scores(
    row: StepRow, replay: Replay, offset: int, hidden: Tensor, executor: Executor, masks: TokenMasks | None
) -> list[Write]:
    """Launch the scoring of the generated tokens that a row's hidden states predict; `offset` as in `StepInFlight.prefills`."""
    pending: list[Write] = []
    tokens, walker, predicted = replay.tokens, replay.walker, replay.predicted(row.start, row.length)
    history = upload(tokens, torch.int32, hidden.device) if predicted and needs_history(walker.sampling) else None
    for start in range(predicted.start, predicted.stop, POSITIONS_AT_ONCE):
        end = min(start + POSITIONS_AT_ONCE, predicted.stop)
        logits = executor.logits(hidden, offset + start - 1 - row.start, offset + end - 1 - row.start)
        rows: list[SamplingRow] = []
        known: list[int] = []
        for position in range(start, end):
            mask = replay.mask(masks)
            if mask is None or mask.failure is None:
                known.append(position)
            before = None if history is None else history[:position]
            rows.append(sampling_row(walker, mask, before, logits.shape[1]))
            replay.advance()
        sampled = sample(logits, rows, executor.threshold_search)
        targets = upload(tokens[start:end], torch.int64, logits.device).unsqueeze(1)
        logprobs = sampled.scores.gather(1, targets).squeeze(1) - sampled.normalizers
        drawn, both = download(sampled.token_ids), download(torch.stack((logprobs, sampled.logprobs)))
        pending.append(partial(_write, replay, start, known, drawn, both))
    return pending


def _write(replay: Replay, first: int, known: list[int], drawn: Tensor, logprobs: Tensor) -> None:
    """Write the scores at the positions `known`. `logprobs` [2, n] are those of the tokens from `first` on, and of those drawn."""
    columns = list(zip(logprobs[0].tolist(), drawn.tolist(), logprobs[1].tolist(), strict=True))
    for position in known:
        replay.write(position, *columns[position - first])


def sampling_row(sequence: Sequence, mask: Mask | None, history: Tensor | None, vocab_size: int) -> SamplingRow:
    """Return the row that chooses the next token of `sequence`; `history` are its tokens, for the penalties."""
    allowed, suppressed = choice_of_tokens(sequence, mask, vocab_size)
    return SamplingRow(
        sampling=sequence.sampling,
        position=len(sequence.tokens),
        last_token=sequence.tokens[-1],
        history=history,
        generated=sequence.generated_before + sequence.generated,
        suppressed=suppressed,
        allowed=None if allowed is None else torch.from_numpy(allowed),
    )
