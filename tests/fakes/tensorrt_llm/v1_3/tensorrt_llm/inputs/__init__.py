"""What a prompt may be."""

from __future__ import annotations

from tensorrt_llm.inputs.data import PromptInputs, TextPrompt, TokensPrompt, prompt_inputs

__all__ = ["PromptInputs", "TextPrompt", "TokensPrompt", "prompt_inputs"]
