"""Request bodies of the TGI dialect, as strict as TGI's own (serde): no coercion, sized numbers, unknown fields ignored.

`null` means absent for a field without a default value; for others it is a wrong type.
"""

from typing import Any

from pydantic import Field

from text_generation_router.api.http.caller import QosFields
from text_generation_router.api.http.fields import Float32, Int32, Name, StopTexts, UInt32, UInt64


class GenerateParameters(QosFields):
    """Parameters of a generation: types and defaults; their ranges are checked in tgi/generate.py."""

    best_of: UInt64 | None = None
    """Generate this many sequences, return the one with the highest mean log-probability."""
    temperature: Float32 | None = None
    """Divides the logits; setting it implies sampling."""
    repetition_penalty: Float32 | None = None
    """1.0 means no penalty."""
    frequency_penalty: Float32 | None = None
    """Penalises tokens by their count so far."""
    top_k: Int32 | None = None
    """Keep the k most probable tokens."""
    top_p: Float32 | None = None
    """Keep the smallest set of most probable tokens whose probabilities reach this sum."""
    typical_p: Float32 | None = None
    """Typical decoding mass."""
    do_sample: bool = False
    """Sample instead of taking the most probable token. True when a body has no `parameters` at all."""
    max_new_tokens: UInt32 | None = None
    """Tokens to generate; default: all that fit after the prompt."""
    return_full_text: bool | None = None
    """Prepend the prompt to the generated text."""
    stop: StopTexts = Field(default=[])
    """Stop at the first of these strings; it stays in the text."""
    truncate: UInt64 | None = None
    """Keep this number of tokens at the end of the prompt."""
    watermark: bool = False
    """Watermark the text (A Watermark for Large Language Models)."""
    details: bool = False
    """Report finish reason, seed and tokens."""
    decoder_input_details: bool = False
    """Report the prompt's tokens; implies `details`."""
    seed: UInt64 | None = None
    """Seed of the sampling; random if absent."""
    top_n_tokens: UInt32 | None = None
    """Report this number of most probable tokens of every step."""
    grammar: dict[str, Any] | None = None
    """Constrain the text: `type` is `json`, `json_schema` or `regex`, `value` the schema or the expression."""
    adapter_id: Name | None = None
    """LoRA adapter to use, one of --lora-adapters. A name that is not loaded is rejected."""


class GenerateBody(QosFields):
    """Body of /generate, /generate_stream and /tokenize."""

    inputs: str
    """The prompt."""
    parameters: GenerateParameters = GenerateParameters(do_sample=True)


class CompatGenerateBody(GenerateBody):
    """Body of POST /."""

    stream: bool = False
    """Answer as /generate_stream does."""
