"""An echo engine with scripted answers, for clients that call tools: the text of a prompt decides what the model says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from checked_echo import CheckedEcho
from tokenizers import Tokenizer

from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.echo import LOGPROB
from text_generation_shard.step.masks import Mask
from text_generation_shard.step.sequence import SamplerOutput, Sequence


@dataclass
class ScriptedEngine(CheckedEcho):
    """Says `answer(prompt)`, then ends, instead of the prompt."""

    tokenizer: Tokenizer = field(init=False)
    answer: Callable[[str], str] = field(init=False)
    prompts: list[str] = field(init=False, default_factory=list)
    """The prompts so far."""
    _answers: dict[int, list[int]] = field(init=False, default_factory=dict)
    """By slot."""

    @classmethod
    def build_with(cls, config: ShardConfig, tokenizer: Tokenizer, answer: Callable[[str], str]) -> ScriptedEngine:
        """Build the engine of `config` with these answers."""
        engine = cls.build(config)
        assert isinstance(engine, cls)
        engine.tokenizer, engine.answer = tokenizer, answer
        return engine

    def sample(self, sequences: list[Sequence], masks: dict[int, Mask]) -> SamplerOutput:
        output = SamplerOutput([], [LOGPROB] * len(sequences))
        for index, sequence in enumerate(sequences):
            said = len(sequence.tokens) - (sequence.prompt_length - sequence.generated_before)
            if not said:
                self.prompts.append(self.tokenizer.decode([*sequence.tokens], skip_special_tokens=False))
                answer = self.answer(self.prompts[-1])
                self._answers[sequence.slot] = self.tokenizer.encode(answer, add_special_tokens=False).ids
            rest = self._answers[sequence.slot][said:]
            output.token_ids.append(rest[0] if rest else 0)
            if not rest:
                output.grammar_ended.add(index)
        return output
