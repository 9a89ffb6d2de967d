"""Guided decoding that really follows its guide, by llguidance.

Source of the guides' forms: _torch/pyexecutor/grammar_matcher.py, LLGuidanceMatcherFactory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer


class GuidedDecoder:
    """Makes choosers that follow a guide, with the tokenizer in a folder."""

    def __init__(self, backend: str, folder: Path) -> None:
        self._tokenizer = LLTokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"))
        self._backend = backend

    def follow(self, params: Any, end_id: int) -> GuidedChooser:  # noqa: ANN401 - GuidedDecodingParams
        """Raises ValueError for an invalid guide."""
        matcher = LLMatcher(self._tokenizer, self._grammar(params), log_level=0)
        if matcher.is_error():
            raise ValueError(f"LLGuidance matcher error: {matcher.get_error()}")
        return GuidedChooser(matcher, self._tokenizer, end_id)

    def _grammar(self, params: Any) -> str:  # noqa: ANN401 - GuidedDecodingParams
        if params.json:
            return LLMatcher.grammar_from_json_schema(params.json)
        if params.regex:
            return LLMatcher.grammar_from_regex(params.regex)
        if params.grammar and self._backend == "llguidance":
            return LLMatcher.grammar_from_lark(params.grammar)
        raise NotImplementedError("the stand-in imitates json, regex, and with llguidance grammar")


class GuidedChooser:
    """Follows a matcher: ends as soon as it may, and repeats the prompt only where that fits."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, end_id: int) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._end_id = end_id

    def choose(self, wanted: int) -> int:
        """See Guide."""
        if self._matcher.is_stopped() or self._matcher.is_accepting():
            return self._end_id
        allowed = self._matcher.compute_logit_bias()
        if not allowed[wanted]:
            plain = (t for t, bias in enumerate(allowed) if bias and not self._tokenizer.is_special_token(t))
            wanted = next(plain, self._end_id)
        self._matcher.consume_token(wanted)
        return wanted
