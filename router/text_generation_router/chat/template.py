"""Conversations become prompts: a model's chat template, rendered as transformers renders it, where it can be killed."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from text_generation_router.chat.conversation import Conversation
from text_generation_router.chat.template_files import DEFAULT, TOOL_USE, ChatTemplateError, ChatTemplates
from text_generation_router.chat.template_input import template_input
from text_generation_router.errors import TemplateError, Unhealthy
from text_generation_router.sandbox.pool import (
    Sandbox,
    SandboxBroken,
    SandboxError,
    SandboxOutOfMemory,
    SandboxTimeout,
)

__all__ = ["ChatTemplateError", "ChatTemplates", "TemplateRenderer"]

MEMORY_BYTES = 256 << 20
"""A worker's heap. It needs some 15 MB, and a few times the size of what it renders."""
MAX_CHARACTERS = 2_000_000
"""Of a rendered text; more is no prompt."""
BYTES_A_CHARACTER = 4
"""Of UTF-8, at most."""


class TemplateRenderer:
    """Renders a model's chat templates in workers of its own."""

    def __init__(
        self,
        templates: ChatTemplates,
        *,
        workers: int = 2,
        timeout_s: float = 2.0,
        max_waiting: int = 128,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        """With two workers a conversation that takes all of its time does not hold up the others."""
        self._templates = templates
        sources = {name: templates.sources[name] for name in (DEFAULT, TOOL_USE) if name in templates.sources}
        self._sandbox = Sandbox(
            "text_generation_router.chat.template_job:renderer",
            {"sources": sources, "max_characters": max_characters},
            workers=workers,
            timeout_s=timeout_s,
            memory_bytes=MEMORY_BYTES,
            max_waiting=max_waiting,
            max_output=BYTES_A_CHARACTER * max_characters,
        )
        self._without_templates = not sources

    async def start(self) -> None:
        """Start the workers, which compile the templates. Raises ChatTemplateError."""
        if self._without_templates:
            return
        try:
            await self._sandbox.start()
        except SandboxError as error:
            raise ChatTemplateError(f"the chat templates cannot be compiled: {error}") from error

    async def close(self) -> None:
        """Stop the workers; renderings under way fail."""
        await self._sandbox.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def render(self, conversation: Conversation) -> str:
        """The prompt. Raises TemplateError, Overloaded, and InvalidRequest as `template_input` does."""
        request = template_input(conversation, self._templates)
        try:
            text = (await self._sandbox.call(request.to_json())).decode()
        except SandboxTimeout as error:
            raise TemplateError("the template took too long") from error
        except SandboxOutOfMemory as error:
            raise TemplateError("the template needs too much memory") from error
        except SandboxBroken as error:
            raise Unhealthy("chat templates cannot be rendered now") from error
        except SandboxError as error:
            raise TemplateError(str(error)) from error
        return text.rstrip() if request.trim else text
