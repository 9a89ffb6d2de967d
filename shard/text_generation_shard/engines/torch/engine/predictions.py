"""Drafts by the layer of a checkpoint, or of an EAGLE draft model, that predicts the token after the next one.

The layer has keys and values of its own, in the blocks of the sequences. For a position they follow from the output of the model there
and from the next token, so they are computed once that is known: for all positions of the last step, before the next one. The
last position of a sequence gives its first draft. The output of the layer there, and that draft as the next token, give the second
one, and so on. Later steps overwrite the keys and values of drafts.

Outputs are kept of the last step alone. Where no draft was wanted then, positions stay without keys and values: drafts after them
are worse, texts are the same.
"""

from collections.abc import Mapping

from torch import Tensor

from text_generation_common.log import log
from text_generation_common.one_line import typed_line
from text_generation_shard.engines.torch.engine.executor import Executor
from text_generation_shard.step.sequence import Sequence, StepRow, StepRows


class Predictions:
    """The rows of the last step, whose outputs the runner keeps, and the drafts that follow from them."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._rows: list[tuple[Sequence, int, int, bool]] = []
        """Sequence, first position and length of each row, and True for a chunk of a prompt."""
        self._sequences: set[Sequence] = set()
        """The sequences whose next token is known."""

    def keep(self, rows: StepRows) -> None:
        """Keep the rows of a step that is recorded, until the next one is launched."""
        persistent = rows.persistent
        self._rows = [(row.sequence, row.start, row.length, row.prefills) for row in rows.others]
        if persistent is not None:
            starts = persistent.starts.tolist()
            self._rows[:0] = [(each, at, 1, False) for each, at in zip(persistent.sequences, starts, strict=True)]
        self._sequences = {each for each, start, length, _ in self._rows if len(each.tokens) > start + 1}

    def forget(self) -> None:
        self._rows = []
        self._sequences.clear()

    @property
    def has_prompts(self) -> bool:
        return any(is_chunk for *_, is_chunk in self._rows)

    def may_follow(self, sequence: Sequence) -> bool:
        return sequence in self._sequences

    def drafts(self, lengths: Mapping[int, int], *, prompts: bool) -> dict[int, tuple[int, ...]]:
        """Compute the keys and values of the last step, once, of chunks only with `prompts`; return drafts of these lengths, by slot.

        There are none after an error, such as a lack of memory, unless the device is broken.
        """
        try:
            return self._drafts(lengths, prompts=prompts)
        except Exception as error:
            if self._executor.is_broken():
                raise
            log.warning("no tokens are predicted", error=typed_line(error))
            return {}
        finally:
            self.forget()

    def _drafts(self, lengths: Mapping[int, int], *, prompts: bool) -> dict[int, tuple[int, ...]]:
        rows: list[StepRow] = []
        ids: list[int] = []
        places: list[int] = []
        first = 0
        for sequence, start, length, is_chunk in self._rows:
            count = min(length, len(sequence.tokens) - 1 - start)
            if sequence.is_held and count > 0 and (prompts or not is_chunk):
                samples = not is_chunk or start + count == sequence.prompt_length
                drafts = () if is_chunk else (0,) * (count - 1)
                rows.append(StepRow(sequence, start, count, samples=samples, drafts=drafts))
                ids += sequence.tokens[start + 1 : start + 1 + count]
                places += range(first, first + count)
            first += length
        if not rows:
            return {}
        tokens = self._executor.predict(StepRows(None, rows), places, ids)
        sequences = [row.sequence for row in rows if row.samples]
        drafted: list[tuple[list[Sequence], Tensor]] = []
        while left := [index for index, each in enumerate(sequences) if lengths.get(each.slot, 0) > len(drafted)]:
            if place := len(drafted):  # the drafts of the pass before are read on the device
                sequences = [sequences[index] for index in left]
                rows = [StepRow(each, len(each.tokens) - 2 + place, 1, samples=True) for each in sequences]
                tokens = self._executor.predict(StepRows(None, rows), left)
            drafted.append((sequences, tokens))
        found: dict[int, tuple[int, ...]] = {}
        for sequences, tokens in drafted:
            for sequence, token in zip(sequences, tokens.tolist(), strict=True):
                if lengths.get(sequence.slot):
                    found[sequence.slot] = (*found.get(sequence.slot, ()), token)
        return found
