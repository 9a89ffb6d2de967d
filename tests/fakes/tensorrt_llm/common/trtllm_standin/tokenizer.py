"""The part of the library's tokenizer that callers and the engine use, over a tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as RawTokenizer

from trtllm_standin.folder import read_json, read_model


class Tokenizer:
    """Text to ids and back. `tensorrt_llm.llmapi.tokenizer.TokenizerBase`, as far as it is used here."""

    def __init__(self, folder: Path) -> None:
        self.text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        """The file itself: the guided decoder builds its vocabulary from it."""
        self._raw = RawTokenizer.from_str(self.text)
        self.eos_token_id = self._find_end(folder)
        self.pad_token_id: int | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        return list(self._raw.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        return str(self._raw.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def _find_end(self, folder: Path) -> int | None:
        named = read_json(folder / "tokenizer_config.json").get("eos_token")
        content = named.get("content") if isinstance(named, dict) else named
        if content is not None and (found := self._raw.token_to_id(content)) is not None:
            return int(found)
        return next(iter(read_model(folder).eos_token_ids), None)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in `folder`; None where there is none, which the library only warns of (llm_utils.py)."""
    return Tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
