"""The proof that an engine can follow a grammar. It runs in a sandbox: `compile_job(config)` returns the job.

The input of a job is {"kind": …, "text": …} as JSON. Its result is {"error": TGI's text}, {"lark": the rules to which the
grammar was translated} or {}. llguidance compiles lazily, so a compile alone proves little: a few random texts are walked
through, and every step is timed.
"""

import json
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from text_generation_common.grammar_tokenizer import compiled, load_tokenizer
from text_generation_common.panics import without_backtrace
from text_generation_proto.values import Grammar, GrammarKind
from text_generation_router.errors import InvalidRequest
from text_generation_router.grammar.lark import embedded_schemas
from text_generation_router.grammar.schema import (
    Schema,
    applied,
    check_size,
    every,
    is_local,
    not_compilable,
    not_valid,
    resolve,
    shallow,
)
from text_generation_router.grammar.translate import translated

MAX_COUNT = 10_000
"""Limit of `minItems` and its like. llguidance needs none, but another engine's grammar library may write them out."""
MAX_STEP = 100_000
"""Limit of `multipleOf`: llguidance makes an automaton with as many states, in microseconds each."""
NUM_WALKS, NUM_STEPS = 3, 40
"""Texts that are tried, and tokens of each."""
SLOW_COMPILE_S = 0.5
"""CPU time of a compile, which the shard repeats."""
SLOW_STEP_S = 0.05
"""CPU time of a mask and a token for which a step of the engine cannot wait."""
WALKS_S = 0.4
"""CPU time of all walks, about 3 ms a token: a step waits for all its sequences."""
_FRAMES = 5_000
"""Python frames: the meta-schema takes a few dozen for every level of a schema."""
_METASCHEMA = Draft202012Validator(Draft202012Validator.META_SCHEMA)
_NO_TOKENS = "the model has no tokens for a character of it"
_UNSUPPORTED = {
    r'Unimplemented keys: \["([^"]*)"': "the keyword `{}` is not supported",
    r"Unknown format: (\S+)": "the format '{}' is not supported",
    r"oneOf constraints are not supported": (
        "`oneOf` is supported where its schemas exclude each other, by type or by a required constant"
    ),
    r"^NoExtensionBias": "no text satisfies it",
    r"doesn't satisfy the grammar; forced bytes": _NO_TOKENS,
}
"""Error messages of llguidance (patterns) and the text for clients."""


def compile_job(config: dict[str, Any]) -> Callable[[], Callable[[bytes], bytes]]:
    """Return a function that returns the job for one model; `config`: `tokenizer`, the path of its tokenizer.json.

    Raises OSError, ValueError or PanicError.
    """
    tokenizer = load_tokenizer(Path(config["tokenizer"]).read_text(encoding="utf-8"))
    sys.setrecursionlimit(_FRAMES)
    special = {
        tokenizer.decode_str([token_id]): token_id
        for token_id in range(tokenizer.vocab_size)
        if tokenizer.is_special_token(token_id)
    }

    def job(payload: bytes) -> bytes:
        values = json.loads(payload)
        grammar = Grammar(GrammarKind(values["kind"]), values["text"])
        try:
            followed = translated(grammar, special)
            prove(followed, tokenizer)
        except InvalidRequest as refusal:
            return orjson.dumps({"error": str(refusal).removeprefix(InvalidRequest.prefix)})
        return orjson.dumps({} if followed is grammar else {"lark": followed.text})

    return lambda: job


def prove(grammar: Grammar, tokenizer: LLTokenizer) -> None:
    """Check, compile and try a grammar. Raises InvalidRequest."""
    _check_characters(grammar.text, tokenizer)
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            _check_schema(json.loads(grammar.text))
        case GrammarKind.LARK:
            _check_embedded(grammar.text)
    start = time.thread_time()
    matcher = compiled(grammar, tokenizer)
    if time.thread_time() - start > SLOW_COMPILE_S:
        raise not_compilable("it takes too long to compile")
    if matcher.is_error():
        refuse = not_valid if grammar.kind is GrammarKind.REGEX else not_compilable
        raise refuse(_reason(matcher))
    _walk(matcher)


def _check_characters(text: str, tokenizer: LLTokenizer) -> None:
    """Refuse characters that no tokens spell: random texts may miss the place that needs one. Raises InvalidRequest."""
    for character in {character for character in text if not character.isascii()}:
        if tokenizer.decode_bytes(tokenizer.greedy_tokenize(character)) != character.encode():
            raise not_compilable(_NO_TOKENS)


def _check_schema(root: Schema) -> None:
    """Refuse a normalised schema that llguidance would accept and not enforce. Raises InvalidRequest."""
    schemas = _applied_schemas(root)
    _check_metaschema(root)
    for schema in schemas:
        if "$id" in schema and schema is not root:
            raise not_compilable("the keyword `$id` is supported at the top of the schema only")
        for keyword in ("minItems", "minLength", "minProperties"):
            if schema.get(keyword, 0) > MAX_COUNT:
                raise not_compilable(f"`{keyword}` is more than {MAX_COUNT}")
        if schema.get("multipleOf", 0) > MAX_STEP:
            raise not_compilable(f"`multipleOf` is more than {MAX_STEP}")


def _check_embedded(text: str) -> None:
    """Check the schemas in Lark rules. Raises InvalidRequest."""
    try:
        schemas = list(embedded_schemas(text))
    except ValueError as error:  # of a client's own rules
        raise not_valid(str(error)) from None
    except RecursionError:
        raise not_valid("the schema is nested too deeply") from None
    for schema in schemas:
        check_size(schema)
        if isinstance(schema, dict):  # llguidance reads `true`, and refuses the rest
            _check_schema(schema)


def _applied_schemas(root: Schema) -> list[Schema]:
    """Return every schema that `root` applies to a text, each once. Raises InvalidRequest for references that are
    recursive, remote or point at no schema."""
    done: dict[int, Schema] = {}
    entered: set[int] = set()
    stack = [root]
    while stack:
        schema = stack[-1]
        inner = list(applied(schema))
        if "$ref" in schema:
            inner.append(_target(root, schema["$ref"]))
        waiting = [item for item in inner if id(item) not in done]
        if not waiting:
            done[id(schema)] = stack.pop()
        elif any(id(item) in entered for item in waiting):
            raise not_compilable("recursive references are not supported")
        else:
            entered.add(id(schema))
            stack.extend(waiting)
    return list(done.values())


def _target(root: Schema, reference: object) -> Schema:
    if not isinstance(reference, str) or not is_local(reference):
        raise not_compilable(f"only references into the schema itself (`#/…`) are supported, not {reference!r}")
    target = resolve(root, reference)
    if target is None:
        raise not_compilable(f"the reference {reference!r} points at no schema")
    return target


def _check_metaschema(root: Schema) -> None:
    """TGI's rule 18: the schema obeys the meta-schema of draft 2020-12. Raises InvalidRequest.

    Each schema is checked alone, without the schemas inside it, and equal ones are checked once: the meta-schema costs
    about 300 µs per schema, and large schemas repeat a few shapes.
    """
    checked = set()
    for schema in every(root):
        alone = shallow(schema)
        if (key := json.dumps(alone)) in checked:
            continue
        checked.add(key)
        for error in _METASCHEMA.iter_errors(alone):
            place = "/".join(map(str, error.absolute_path))
            raise not_valid(f"{error.message[:200]}" + (f" at {place[:80]}" if place else ""))


def _walk(matcher: LLMatcher) -> None:
    """Walk through random texts. Raises InvalidRequest if a step fails or is slow."""
    spent = 0.0
    for seed in range(NUM_WALKS):
        walker, generator = matcher.deep_copy(), random.Random(seed)
        for _ in range(NUM_STEPS):
            start = time.thread_time()
            mask = walker.compute_bitmask()
            ended = walker.is_error() or walker.is_stopped() or not walker.consume_token(_random_token(mask, generator))
            if walker.is_error():  # of the mask, or of the token after it
                raise not_compilable(_reason(walker))
            taken = time.thread_time() - start
            spent += taken
            if taken > SLOW_STEP_S or spent > WALKS_S:
                raise not_compilable("it takes too long to follow")
            if ended:
                break


def _random_token(mask: bytes, generator: random.Random) -> int:
    """Return a token whose bit is set; at least one is."""
    start = generator.randrange(len(mask))
    at = next(place % len(mask) for place in range(start, start + len(mask)) if mask[place % len(mask)])
    return 8 * at + generator.choice([bit for bit in range(8) if mask[at] >> bit & 1])


def _reason(matcher: LLMatcher) -> str:
    """Return the engine's error, without its picture of the place in the grammar."""
    message = (
        without_backtrace(matcher.get_error())
        .split("\n   1 |")[0]
        .removeprefix("at 1(8): ")
        .replace("<non-verbose/>", "")
    )
    for pattern, text in _UNSUPPORTED.items():
        if (found := re.search(pattern, message)) is not None:
            return text.format(*found.groups())
    return message
