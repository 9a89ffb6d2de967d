"""Guided decoding that really follows its guide, by llguidance, and the tokenizer that it needs.

Source of the guides' forms: _torch/pyexecutor/grammar_matcher.py, LLGuidanceMatcherFactory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as RawTokenizer

from trtllm_standin.choice import ChoiceError, Chooser
from trtllm_standin.folder import read_json, read_model

CLOSING = ('"', "}", "]")
"""Texts tried first, so that an answer ends."""


class Tokenizer:
    """The part of `tensorrt_llm.llmapi.tokenizer.TokenizerBase` that is used here."""

    def __init__(self, folder: Path) -> None:
        self.text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        """The content of the file."""
        self._raw = RawTokenizer.from_str(self.text)
        named = read_json(folder / "tokenizer_config.json").get("eos_token")
        content = named.get("content") if isinstance(named, dict) else named
        found = None if content is None else self._raw.token_to_id(content)
        self.eos_token_id = found if found is not None else next(iter(read_model(folder).eos_token_ids), None)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return list(self._raw.encode(text).ids)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ids, without special tokens."""
        return str(self._raw.decode(token_ids))


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer in `folder`; None if there is none, about which the library only warns (llm_utils.py)."""
    return Tokenizer(folder) if (folder / "tokenizer.json").is_file() else None


class GuidedDecoder:
    """Makes choosers that follow a guide."""

    def __init__(self, backend: str, tokenizer: Tokenizer | None) -> None:
        # py_executor_creator.py, get_guided_decoding_config: without a tokenizer the executor is not created.
        assert tokenizer is not None, "tokenizer is not None"
        self._tokenizer = LLTokenizer(tokenizer.text, eos_token=tokenizer.eos_token_id)
        self._backend = backend

    def chooser(self, params: Any, end_id: int, min_tokens: int, inner: Chooser) -> Chooser:  # noqa: ANN401 - GuidedDecodingParams
        """Return a chooser that follows `inner` where the guide allows it. Raises ValueError for an invalid guide."""
        matcher = LLMatcher(self._tokenizer, self._grammar(params), log_level=0)
        if matcher.is_error():
            raise ValueError(f"LLGuidance matcher error: {matcher.get_error()}")
        return GuidedChooser(matcher, self._tokenizer, end_id, min_tokens, inner)

    def _grammar(self, params: Any) -> str:  # noqa: ANN401 - GuidedDecodingParams
        if params.json:
            return LLMatcher.grammar_from_json_schema(params.json)
        if params.regex:
            return LLMatcher.grammar_from_regex(params.regex)
        if params.grammar and self._backend == "llguidance":
            return LLMatcher.grammar_from_lark(params.grammar)
        raise NotImplementedError("the stand-in imitates json, regex, and with llguidance grammar")


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
        wanted = (*self._closing, self._inner.choose(generated))
        token = next((t for t in wanted if t < len(allowed) and allowed[t]), None)
        if token is None:
            plain = (t for t, bias in enumerate(allowed) if bias and not self._tokenizer.is_special_token(t))
            token = next(plain, self._end_id)
        if token != self._end_id and not self._matcher.consume_token(token):
            raise ChoiceError(f"LLGuidance matcher error: {self._matcher.get_error()}")
        return token
