"""Values that cross the wire between router and shard. Their fields are those of v1/shard.proto, which explains them.

Pure: this module imports neither protobuf nor gRPC. `convert` translates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

MAX_LOGIT_BIAS = 1024
"""Tokens that one sequence may bias."""

SEEDS = 2**64
"""Seeds are below this."""


class FinishReason(Enum):
    """Reasons why a sequence ended normally; the values are TGI's words."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    """A stop token that is no EOS token; in the router also a stop string."""


class FailureCode(Enum):
    """Kinds of errors that end a sequence."""

    INVALID = "invalid"
    NUMERICS = "numerics"
    STEP = "step"
    EXPIRED = "expired"
    """Router only: its deadline passed."""
    LOST = "lost"
    """Router only: its replica was lost too often."""


class GrammarKind(Enum):
    """The language of a grammar."""

    UNSPECIFIED = "unspecified"
    """A kind that this version does not know: refused."""
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """llguidance's dialect of Lark."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the generated text: a JSON schema, a regular expression or Lark rules."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters that choose the next token. The default of each field is neutral: it switches its stage off."""

    greedy: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    """TGI's: minus f · count / length, over prompt and output."""
    seed: int | None = 0
    """None: the engine takes no seed and the client asked for none. The wire has 0 for it."""
    watermark: bool = False
    min_p: float = 0.0
    """Drop tokens less probable than this share of the most probable one's probability."""
    output_frequency_penalty: float = 0.0
    """OpenAI's frequency_penalty: minus f · count, over the output alone."""
    output_presence_penalty: float = 0.0
    """OpenAI's presence_penalty: minus p for each token that the output holds."""
    logit_bias_ids: tuple[int, ...] = ()
    logit_bias_values: tuple[float, ...] = ()
    """logit_bias_values[i] is added to the logit of logit_bias_ids[i]."""

    def for_answer(self, index: int) -> Sampling:
        """Return the parameters of one of several answers to a prompt. Its seed follows from the first one's."""
        return self if self.seed is None else replace(self, seed=(self.seed + index) % SEEDS)


@dataclass(frozen=True, slots=True)
class Stopping:
    """Conditions that end a sequence."""

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    """No EOS or stop token is chosen before so many new ones."""


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """Log-probabilities to report beside those of the chosen tokens."""

    top_n: int = 0
    """The most probable tokens of each position to report."""
    prompt: bool = False
    """Report the log-probabilities of the prompt's tokens."""
    prompt_top_n: int = 0
    """With `prompt`: the most probable tokens of each prompt position to report."""
