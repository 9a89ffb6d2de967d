"""Compares a model's own attention with ours, before it serves: a difference means wrong texts.

A model may compute attention or mix its tokens in ways that our interfaces do not see. Two random sequences run in chunks in
one batch, and then decode, as in service; the logits must be those of the model alone with each sequence. Sliding windows are
made small for it, so that they matter within so few tokens. On a GPU the steps use the graphs of their sizes.

In a group, all ranks check at the same time, each with the executor of a single rank: the collectives are in the model.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from text_generation_common.log import log
from text_generation_proto.values import Stopping
from text_generation_shard.engine import EngineError, NewSequence
from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE
from text_generation_shard.engines.torch.engine.executor import Executor
from text_generation_shard.engines.torch.models.huggingface.library import LibraryConfig, LibraryModel, changed
from text_generation_shard.engines.torch.models.huggingface.model import TransformersModel
from text_generation_shard.engines.torch.parallel.group import ParallelGroup
from text_generation_shard.step import sequence as step

TOKENS = 64
CHUNKS = ((27, 11), (23, 29), (13, 23))
"""Prompt tokens of both sequences in each step; the last token is decoded."""
WINDOW, CHUNK = "sliding_window", "attention_chunk_size"
SMALL_WINDOW = 13
MOST_DIFFERENCE = {torch.float32: 1e-4}
MOST_DIFFERENCE_OF_16_BITS = 2e-2


def check_model(
    model: TransformersModel,
    vocab_size: int,
    longest: int,
    executor: Callable[[], Executor],
    group: ParallelGroup,
    limits: Sequence[str] = (WINDOW, CHUNK),
) -> None:
    """Raise EngineError if our logits differ from the model's own. `executor` builds one for the model as it is recorded.

    `longest` is the length of the longest sequence. `limits` are the names of the limits of attention that the executor knows.
    """
    with small_windows(model.library, limits, longest):
        model.record()
        ids = _random_ids(model.library.config, vocab_size)
        try:
            expected = torch.stack([model.own_logits(sequence) for sequence in ids])
            served = _served_logits(model, executor(), ids, group)
            difference = group.agreed(_difference(served, expected, model.dtype), model.library.device)
            most = MOST_DIFFERENCE.get(model.dtype, MOST_DIFFERENCE_OF_16_BITS)
            if difference > most and model.dtype not in MOST_DIFFERENCE and model.library._supports_sdpa:
                # Rounding in many layers: the library's own functions may differ as much. It has no public name for `_supports_sdpa`.
                other = torch.stack([model.own_logits(sequence, "sdpa") for sequence in ids])
                most = max(most, 2 * _difference(other, expected, model.dtype))
        except (EngineError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001 – a model that is not served can fail in many ways
            raise model.failure(error) from None
    if not difference <= most:
        raise model.refusal(f"with our attention its logits differ by {difference:.0e} from its own")
    log.info("attention checked", architecture=model.architecture, difference=f"{difference:.0e}")


def small_windows(model: LibraryModel, names: Sequence[str], longest: int) -> AbstractContextManager[None]:
    """Make the sliding windows of a model so small that they matter in a short text; those that never matter stay."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    places = [(holder, name) for holder in (*model.modules(), *configs.values()) for name in names]
    windows = [(holder, name, vars(holder).get(name)) for holder, name in places]
    large = [
        (holder, name)
        for holder, name, window in windows
        if isinstance(window, int) and not isinstance(window, bool) and SMALL_WINDOW < window < longest
    ]
    return changed(large, SMALL_WINDOW)


def _random_ids(config: LibraryConfig, vocab_size: int) -> Tensor:
    """Return two random sequences without the placeholders of images, which the library does not take as text."""
    ids = torch.randint(0, vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    special = {value for name, value in vars(config).items() if "token" in name and isinstance(value, int)}
    plain = next(each for each in range(len(special) + 1) if each not in special)
    return ids.masked_fill(torch.isin(ids, torch.tensor(sorted(special), dtype=ids.dtype)), plain)


@torch.inference_mode()
def _served_logits(model: TransformersModel, executor: Executor, ids: Tensor, group: ParallelGroup) -> Tensor:
    """Return the logits [sequences, tokens, vocabulary] that an executor computes chunk by chunk."""
    blocks = TOKENS // BLOCK_SIZE
    executor.allocate([len(ids) * (1 if kind.is_state else blocks) for kind in executor.kinds])
    tables = [tuple(range(slot * blocks, (slot + 1) * blocks)) for slot in range(len(ids))]
    executor.ready(max_tokens=TOKENS)
    sequences = [
        step.Sequence.of(
            NewSequence(
                slot=slot,
                prompt=tuple(tokens[:-1]),
                stopping=Stopping(max_new_tokens=2),
                blocks=table,
                further_blocks=tuple((0, table) for kind in executor.kinds[1:] if not kind.is_state),
            )
        )
        for slot, (tokens, table) in enumerate(zip(ids.tolist(), tables, strict=True))
    ]
    for sequence in sequences:
        sequence.state_read = sequence.state_write = sequence.slot
    parts: list[list[Tensor]] = [[] for _ in sequences]
    starts = [0] * len(sequences)
    for lengths in CHUNKS:
        rows = step.StepRows(
            None,
            [
                step.StepRow(sequence, start, length, samples=start + length == sequence.prompt_length)
                for sequence, start, length in zip(sequences, starts, lengths, strict=True)
            ],
        )
        launched = executor.launch(rows, greedy=False)
        hidden = launched.output.normed
        _check_ranks(model, hidden, group)
        for row, offset in launched.prefills:
            parts[row.sequence.slot].append(executor.logits(hidden, offset, offset + row.length).clone())
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    executor.store_sampled_tokens(rows, ids[:, -1].int().to(hidden.device))
    for sequence, token in zip(sequences, ids[:, -1].tolist(), strict=True):
        sequence.tokens.append(token)
    for sequence, start, part in zip(sequences, starts, parts, strict=True):
        # One at a time: steps of one row have kernels of their own.
        launched = executor.launch(step.StepRows(None, [step.StepRow(sequence, start, 1, samples=True)]), greedy=False)
        assert launched.output.logits is not None
        part.append(launched.output.logits[:1].clone())
    return torch.stack([torch.cat(part) for part in parts])


def _check_ranks(model: TransformersModel, hidden: Tensor, group: ParallelGroup) -> None:
    """Raise EngineError on all ranks if the hidden states of one differ from those of rank 0."""
    if group.tp.world_size == 1:
        return
    first = hidden.contiguous().clone()
    group.broadcast(first)
    error = ((hidden - first).float().norm() / first.float().norm()).reshape(1).contiguous()
    group.all_reduce(error)
    most = MOST_DIFFERENCE.get(hidden.dtype, MOST_DIFFERENCE_OF_16_BITS)
    if not float(error) <= most:
        raise model.refusal(f"divided by its plan, its hidden states differ between ranks by {float(error):.0e}")


def _difference(logits: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Return the relative error: of all logits, or in 16 bits of the median token, as rounding may choose other experts.

    Both are [sequences, tokens, vocabulary].
    """
    logits, expected = logits.float().cpu(), expected.float().cpu()
    if dtype in MOST_DIFFERENCE:
        return float((logits - expected).norm() / expected.norm())
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    # The last position is the one that was decoded.
    return max(float(errors.median()), float(errors[:, -1].min()))
