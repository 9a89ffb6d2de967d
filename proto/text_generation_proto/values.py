"""Values that cross the wire between router and shard. Their fields are those of v1/shard.proto, which explains them.

Pure: this module imports neither protobuf nor gRPC. `convert` translates.
"""

from dataclasses import dataclass, fields, replace
from enum import Enum

from text_generation_proto.parameters import Range, parameter, parameters_of

POSITIVE = Range(0.0, exclusive=True)
SHARE = Range(0.0, 1.0, exclusive=True)
PENALTY = Range(-2.0, 2.0)
LOGIT_BIAS = Range(-100, 100)
"""Values of logit_bias."""
MAX_LOGIT_BIAS = 1024
"""Tokens that one sequence may bias."""
MAX_ALLOWED_TOKENS = 16_384
"""Tokens that one sequence may list as the only ones."""
MAX_BAD_WORDS = 256
"""Sequences of tokens that one sequence may ban."""
MAX_BAD_WORD_TOKENS = 4096
"""Tokens of all of them."""

DRAFT_SOURCES = "own", "recent", "prediction", "mtp", "eagle", "synthetic", "engine"
OWN, RECENT, PREDICTION, MTP, EAGLE, SYNTHETIC, ENGINE = DRAFT_SOURCES
"""The values of Drafting.source; ENGINE where the engine does not tell."""

SEEDS = 2**64
"""Seeds are below this."""


class FinishReason(Enum):
    """Reasons why a sequence ended normally; the values are TGI's words."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    """A stop token other than EOS; in the router also a stop string."""


class FailureCode(Enum):
    """Kinds of errors that end a sequence."""

    INVALID = "invalid"
    NUMERICS = "numerics"
    STEP = "step"
    GRAMMAR = "grammar"
    IMAGE = "image"
    EXPIRED = "expired"
    """Router only: its deadline passed."""
    LOST = "lost"
    """Router only: its replica was lost too often."""


class GrammarKind(Enum):
    UNSPECIFIED = "unspecified"
    """A kind that this version does not know: refused."""
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """llguidance's dialect of Lark."""
    EBNF = "ebnf"
    """xgrammar's dialect of EBNF."""
    STRUCTURAL_TAG = "structural_tag"
    """xgrammar's structural tag, as JSON."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the generated text: a JSON schema, a regular expression or Lark rules."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters that choose the next token. The default of each field is neutral: it switches its stage off.

    Ranges are checked in the order of the fields; that of the first ones is TGI's.
    """

    greedy: bool = True
    temperature: float = parameter(
        1.0, POSITIVE, samples=True, open=Range(0.0), tgi="temperature", openai="temperature", anthropic="temperature"
    )
    repetition_penalty: float = parameter(1.0, POSITIVE, tgi="repetition_penalty", openai="repetition_penalty")
    frequency_penalty: float = parameter(0.0, PENALTY, tgi="frequency_penalty")
    """TGI's: minus f · count / length, over prompt and output."""
    top_p: float = parameter(
        1.0, SHARE, samples=True, open=Range(0.0, 1.0), tgi="top_p", openai="top_p", anthropic="top_p"
    )
    typical_p: float = parameter(1.0, SHARE, samples=True, tgi="typical_p")
    top_k: int = parameter(0, Range(1), samples=True, open=Range(-1), tgi="top_k", openai="top_k", anthropic="top_k")
    watermark: bool = parameter(False, tgi="watermark")  # noqa: FBT003 - its neutral value
    seed: int | None = parameter(0, tgi="seed", openai="seed")
    """None: the engine takes no seed and the client asked for none. The wire has 0 for it."""
    output_frequency_penalty: float = parameter(0.0, PENALTY, openai="frequency_penalty")
    """OpenAI's frequency_penalty: minus f · count, over the output alone."""
    output_presence_penalty: float = parameter(0.0, PENALTY, openai="presence_penalty")
    """OpenAI's presence_penalty: minus p for each token that the output holds."""
    min_p: float = parameter(0.0, Range(0.0, 1.0), openai="min_p")
    """Drop tokens less probable than this share of the most probable one's probability."""
    logit_bias_ids: tuple[int, ...] = parameter((), openai="logit_bias")
    logit_bias_values: tuple[float, ...] = ()
    """logit_bias_values[i] is added to the logit of logit_bias_ids[i]."""
    allowed_token_ids: tuple[int, ...] = parameter((), openai="allowed_token_ids")
    """The only tokens that may be chosen; empty: any."""
    bad_words: tuple[tuple[int, ...], ...] = parameter((), openai="bad_words")
    """Sequences of tokens that the output must not contain."""

    @property
    def cuts(self) -> bool:
        """True if a stage drops tokens, which may turn on less than the accuracy of their probabilities."""
        return bool(self.top_k or self.min_p) or self.top_p < 1 or self.typical_p < 1

    def for_answer(self, index: int) -> "Sampling":
        """Return the parameters of one of several answers to a prompt. Its seed follows from the first one's."""
        return self if self.seed is None else replace(self, seed=(self.seed + index) % SEEDS)


@dataclass(frozen=True, slots=True)
class Stopping:
    """Conditions that end a sequence."""

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = parameter(frozenset(), openai="stop_token_ids")
    min_new_tokens: int = parameter(0, openai="min_tokens")
    """Number of new tokens before an EOS or stop token may be chosen."""


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    top_n: int = parameter(0, tgi="top_n_tokens", openai="top_logprobs", completions="logprobs")
    """The most probable tokens of each position to report."""
    prompt: bool = parameter(
        False,  # noqa: FBT003
        tgi="decoder_input_details",
        chat="prompt_logprobs",
        completions="`prompt_logprobs` or `echo` with `logprobs`",
    )
    """Report the log-probabilities of the prompt's tokens."""
    prompt_top_n: int = parameter(
        0, chat="prompt_logprobs", completions="`prompt_logprobs` or `echo` with `logprobs` above 0"
    )
    """With `prompt`: the most probable tokens of each prompt position to report."""
    tokens: bool = parameter(False, openai="logprobs", responses="`include` of message.output_text.logprobs")  # noqa: FBT003
    """Report the log-probabilities of the chosen tokens. Some engines do more work for them."""
    generated: bool = False
    """Score the tokens generated before, at the end of the prompt: a replay. No client asks for it."""

    def without_prompt(self) -> "LogprobOptions":
        return replace(self, prompt=False, prompt_top_n=0)


SAMPLING_PARAMETERS = parameters_of(Sampling)
STOPPING_PARAMETERS = parameters_of(Stopping)
LOGPROB_PARAMETERS = parameters_of(LogprobOptions)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The place of a request in a sampled trace, by W3C's recommendation Trace Context."""

    traceparent: str
    """Version, id of the trace, id of the caller's span, flags."""
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """The id of the trace, in hexadecimal digits."""
        return self.traceparent.split("-", 2)[1]


@dataclass(frozen=True, slots=True)
class WarmUpLimits:
    """The largest step that an engine prepares for. Zero leaves a limit to the engine."""

    max_batch_prefill_tokens: int = 0
    max_batch_size: int = 0
    max_batch_total_tokens: int = 0

    @classmethod
    def of(cls, source: object) -> "WarmUpLimits":
        """Return the limits that settings, or a message, have by these names."""
        return cls(*(getattr(source, each.name) or 0 for each in fields(cls)))
