"""Every schema is refused by name, or every text that the grammar allows parses and satisfies the schema.

GRAMMAR_SCHEMAS sets how many random schemas are tried (50): the bar is 500.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from random_schemas import Schemas

from text_generation_common.grammar_tokenizer import compiled
from text_generation_proto.values import Grammar
from text_generation_router.errors import InvalidRequest
from text_generation_router.grammar.forms import regex_grammar, response_format
from text_generation_router.grammar.proof import prove

SCHEMAS = int(os.environ.get("GRAMMAR_SCHEMAS", "50"))
ACCEPTED = 0.95
TOKENS = 3_000
"""A text that is longer is no evidence, and no fault."""
SPOKEN_BYTES = (*range(0x20, 0x7F), 0x0A)

Json = dict[str, Any]


class Writer:
    """Write tokens that a grammar allows: random ones first, then those that end the text soonest."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._endings = tokenizer.tokenize_str('"') + tokenizer.tokenize_str("}") + tokenizer.tokenize_str("]")
        # One byte a token: every text can be spelled, and the walk is short of surprises such as megabyte numbers.
        self._letters = [token for byte in SPOKEN_BYTES for token in tokenizer.greedy_tokenize(chr(byte))]

    def write(self, grammar: Grammar, seed: int) -> str | None:
        """A text, or None where it became too long."""
        choose = random.Random(seed)
        matcher = compiled(grammar, self._tokenizer)
        tokens: list[int] = []
        while len(tokens) < TOKENS:
            mask = matcher.compute_bitmask()
            assert not matcher.is_error(), matcher.get_error()
            if matcher.is_stopped() or (matcher.is_accepting() and choose.random() < 0.5):
                return str(self._tokenizer.decode_bytes(tokens).decode())
            token = self._choose(mask, choose, len(tokens))
            assert matcher.consume_token(token), matcher.get_error()
            tokens.append(token)
        return None

    def _choose(self, mask: bytes, choose: random.Random, written: int) -> int:
        if choose.random() < 0.2 + written / 200:
            allowed = [token for token in self._endings if mask[token // 8] >> token % 8 & 1]
            if allowed:
                return choose.choice(allowed)
        allowed = [token for token in self._letters if mask[token // 8] >> token % 8 & 1]
        if not allowed or choose.random() < 0.3:
            allowed = list(_allowed(mask))
        return choose.choice(allowed)


def _allowed(mask: bytes) -> Iterator[int]:
    for place, byte in enumerate(mask):
        if byte:
            yield from (8 * place + bit for bit in range(8) if byte >> bit & 1)


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> LLTokenizer:
    return LLTokenizer(str(demo_model / "tokenizer.json"))


def test_a_random_schema_is_refused_by_name_or_its_texts_satisfy_it(tokenizer: LLTokenizer) -> None:
    writer, refusals, unfinished = Writer(tokenizer), Counter[str](), 0
    for seed in range(SCHEMAS):
        schema = Schemas(seed).draw()
        try:
            grammar = response_format({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
            assert grammar is not None
            prove(grammar, tokenizer)
        except InvalidRequest as refusal:
            refusals[str(refusal)] += 1
            continue
        for walk in range(2):
            text = writer.write(grammar, walk)
            if text is None:
                unfinished += 1
                continue
            try:
                jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
            except (ValueError, jsonschema.ValidationError) as error:
                pytest.fail(f"seed {seed}: {text!r} does not satisfy {json.dumps(schema)}: {error}")
    assert refusals.total() <= (1 - ACCEPTED) * SCHEMAS, refusals
    assert unfinished <= 0.1 * SCHEMAS


KEYWORDS = (
    "type", "properties", "required", "items", "prefixItems", "anyOf", "oneOf", "allOf", "not", "enum", "const", "$ref",
    "$defs", "definitions", "$id", "pattern", "patternProperties", "format", "minItems", "maxItems", "minLength", "minimum",
    "additionalProperties", "unevaluatedProperties", "uniqueItems", "if", "then", "a", "",
)  # fmt: skip
WORDS = (
    "object", "array", "string", "integer", "#", "#/$defs/a", "#/properties/a", "#/anyOf/0", "[", "date", "é",
)  # fmt: skip
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(width=16)
    | st.sampled_from(WORDS)
    | st.text(max_size=3)
)
GARBAGE = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=5),
    max_leaves=25,
)


@settings(max_examples=200, deadline=60_000)
@given(st.dictionaries(st.sampled_from(KEYWORDS), GARBAGE, max_size=6))
def test_whatever_is_sent_as_a_schema_it_is_refused_in_words_or_followed(tokenizer: LLTokenizer, schema: Json) -> None:
    try:
        grammar = response_format({"type": "json_schema", "json_schema": {"schema": schema}})
        assert grammar is not None
        prove(grammar, tokenizer)
    except InvalidRequest as refusal:
        assert "\n" not in str(refusal)
        return
    text = Writer(tokenizer).write(grammar, 0)
    if text is not None:
        try:
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
        except jsonschema.SchemaError:  # a list of `items` is that of older drafts
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft201909Validator)


@settings(max_examples=200, deadline=60_000)
@given(st.text(alphabet="ab(|)*+?{1,9}[^]\\d.$", max_size=25))
def test_whatever_is_sent_as_an_expression_it_is_refused_in_words_or_its_texts_match(
    tokenizer: LLTokenizer, expression: str
) -> None:
    grammar = regex_grammar(expression)
    try:
        prove(grammar, tokenizer)
    except InvalidRequest as refusal:
        assert "\n" not in str(refusal)
        return
    Writer(tokenizer).write(grammar, 0)
