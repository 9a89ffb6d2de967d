"""The compile of a grammar, to run in a sandbox: `compile_job(config)` returns the job.

A job gets {"kind": …, "text": …} as JSON and answers nothing when the grammar is fine, else TGI's words for its fault.
Compiling proves little, for the engine works lazily: so a few texts are walked through, and every step is timed.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from text_generation_proto.values import Grammar, GrammarKind
from text_generation_router.errors import InvalidRequest
from text_generation_router.grammar.checks import check_schema
from text_generation_router.grammar.expressions import BadExpression, check_expression
from text_generation_router.grammar.options import JSON_OPTIONS, LIMITS
from text_generation_router.grammar.refusals import not_compilable, not_valid
from text_generation_router.grammar.tools import EMBEDDED_SCHEMA

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WALKS, STEPS = 3, 40
"""Texts tried, and tokens of each."""
SLOW_COMPILE_S = 0.5
"""CPU time of a compile, which the shard does again."""
SLOW_STEP_S = 0.05
"""CPU time of a mask and a token that a step of the engine cannot wait for."""
WALKS_S = 0.4
"""CPU time of all walks, some 3 ms a token: a step waits for all its sequences."""
_FRAMES = 5_000
"""Python frames: the meta-schema takes some dozen for every level of a schema."""


def compile_job(config: dict[str, Any]) -> Callable[[bytes], bytes]:
    """A job for one model; `config`: `tokenizer`, the path of its tokenizer.json. Raises FileNotFoundError, ValueError."""
    path = Path(config["tokenizer"])
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no tokenizer")
    tokenizer = LLTokenizer(str(path))
    sys.setrecursionlimit(_FRAMES)

    def job(payload: bytes) -> bytes:
        values = json.loads(payload)
        try:
            prove(Grammar(GrammarKind(values["kind"]), values["text"]), tokenizer)
        except InvalidRequest as refusal:
            return str(refusal).removeprefix(InvalidRequest.prefix).encode()
        return b""

    return job


def prove(grammar: Grammar, tokenizer: LLTokenizer) -> None:
    """Check, compile and try a grammar. Raises InvalidRequest."""
    check(grammar)
    start = time.thread_time()
    matcher = compiled(grammar, tokenizer)
    if time.thread_time() - start > SLOW_COMPILE_S:
        raise not_compilable("it takes too long to compile")
    if matcher.is_error():
        refuse = not_valid if grammar.kind is GrammarKind.REGEX else not_compilable
        raise refuse(_reason(matcher))
    _try(matcher)


def check(grammar: Grammar) -> None:
    """What can be said of a grammar before an engine sees it. Raises InvalidRequest."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            check_schema(json.loads(grammar.text))
        case GrammarKind.REGEX:
            try:
                check_expression(grammar.text)
            except BadExpression as error:
                raise not_valid(str(error)) from None
        case GrammarKind.LARK:
            for line in grammar.text.split("\n"):
                if line.startswith(EMBEDDED_SCHEMA):
                    check_schema(json.loads(line.removeprefix(EMBEDDED_SCHEMA)))


def compiled(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher, which may hold an error."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            text = LLMatcher.grammar_from_json_schema(grammar.text, overrides=cast("JsonCompileOptions", JSON_OPTIONS))
        case GrammarKind.REGEX:
            text = LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            text = LLMatcher.grammar_from_lark(grammar.text)
    return LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))


def _try(matcher: LLMatcher) -> None:
    """Walk random texts. Raises InvalidRequest where a step fails or is slow."""
    spent = 0.0
    for seed in range(WALKS):
        walker, choose = matcher.deep_copy(), random.Random(seed)
        for _ in range(STEPS):
            start = time.thread_time()
            mask = walker.compute_bitmask()
            ended = walker.is_error() or walker.is_stopped() or not walker.consume_token(_any_token(mask, choose))
            if walker.is_error():  # of the mask, or of the step after it
                raise not_compilable(_reason(walker))
            taken = time.thread_time() - start
            spent += taken
            if taken > SLOW_STEP_S or spent > WALKS_S:
                raise not_compilable("it takes too long to follow")
            if ended:
                break


def _any_token(mask: bytes, choose: random.Random) -> int:
    """One of the tokens whose bits are set, and at least one is."""
    start = choose.randrange(len(mask))
    at = next(place % len(mask) for place in range(start, start + len(mask)) if mask[place % len(mask)])
    return 8 * at + choose.choice([bit for bit in range(8) if mask[at] >> bit & 1])


def _reason(matcher: LLMatcher) -> str:
    """The engine's words; without its hints at options nobody can set, and the picture of the place in the grammar."""
    words = matcher.get_error().split("\n   1 |")[0].removeprefix("at 1(8): ").replace("<non-verbose/>", "")
    if words.startswith("oneOf constraints are not supported"):
        return "`oneOf` is supported where its schemas exclude each other, by type or by a required constant"
    return words
