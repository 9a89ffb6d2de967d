"""Guided decoding: answers that really keep to a schema, an expression or a grammar, by llguidance.

Both backends of the library are served by it: xgrammar's grammars are translated. Source of the guides' forms:
_torch/pyexecutor/grammar_matcher.py, LLGuidanceMatcherFactory.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from trtllm_standin.choice import ChoiceError, Chooser

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from trtllm_standin.tokenizer import Tokenizer

CLOSING = ('"', "}", "]")
"""Tried first, so that an answer ends."""


class GuidedDecoder:
    """Makes choosers that stay within a guide."""

    def __init__(self, backend: str, tokenizer: Tokenizer | None) -> None:
        # py_executor_creator.py, get_guided_decoding_config: without a tokenizer the executor is not made.
        assert tokenizer is not None, "tokenizer is not None"
        from llguidance import LLTokenizer

        self._tokenizer = LLTokenizer(tokenizer.text, eos_token=tokenizer.eos_token_id)
        self._backend = backend

    def chooser(self, params: Any, end_id: int, min_tokens: int, inner: Chooser) -> Chooser:  # noqa: ANN401 - GuidedDecodingParams
        """One that chooses as `inner` where the guide allows it. Raises ValueError for a guide that cannot be used."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, self._grammar(params), log_level=0)
        if matcher.is_error():
            raise ValueError(f"LLGuidance matcher error: {matcher.get_error()}")
        return GuidedChooser(matcher, self._tokenizer, end_id, min_tokens, inner)

    def _grammar(self, params: Any) -> str:  # noqa: ANN401 - GuidedDecodingParams
        from llguidance import LLMatcher

        if params.json_object:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}')
        if params.json:
            schema = params.json if isinstance(params.json, str | dict) else params.json.model_json_schema()
            return LLMatcher.grammar_from_json_schema(schema if isinstance(schema, str) else json.dumps(schema))
        if params.regex:
            return LLMatcher.grammar_from_regex(params.regex)
        if params.grammar:
            return LLMatcher.grammar_from_lark(self._lark(params.grammar))
        raise ValueError("Unsupported guide type: structural_tag.")

    def _lark(self, grammar: str) -> str:
        """xgrammar takes EBNF as GGML writes it; llguidance takes Lark, and the library hands it over as it is."""
        if self._backend == "llguidance":
            return grammar
        from llguidance.gbnf_to_lark import gbnf_to_lark

        return str(gbnf_to_lark(grammar))


class GuidedChooser:
    """Follows a matcher: ends as soon as it may, closes what is open, and repeats the prompt only where that fits."""

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, end_id: int, min_tokens: int, inner: Chooser
    ) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._end_id = end_id if end_id >= 0 else tokenizer.eos_token
        self._min_tokens = min_tokens
        self._inner = inner
        self._closing = [ids[0] for text in CLOSING if len(ids := tokenizer.tokenize_str(text)) == 1]

    def choose(self, generated: list[int]) -> int:
        """See Chooser."""
        if self._matcher.is_stopped() or (self._matcher.is_accepting() and len(generated) >= self._min_tokens):
            return self._end_id
        allowed = self._matcher.compute_logit_bias()
        token = next((t for t in self._wishes(generated) if t < len(allowed) and allowed[t]), None)
        if token is None:
            plain = (t for t, bias in enumerate(allowed) if bias and not self._tokenizer.is_special_token(t))
            token = next(plain, self._end_id)
        if token != self._end_id and not self._matcher.consume_token(token):
            raise ChoiceError(f"LLGuidance matcher error: {self._matcher.get_error()}")
        return token

    def _wishes(self, generated: list[int]) -> list[int]:
        return [*self._closing, self._inner.choose(generated)]
