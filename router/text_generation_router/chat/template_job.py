"""What the template worker does: compile a model's templates once, then render conversations.

Imports nothing but Jinja: it runs in a process that must be small and start fast.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jinja2

from text_generation_router.chat.template_environment import template_environment

TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Set behind the final message, to find its end in what was rendered. Its blank shows whether the template trims."""


class RenderError(Exception):
    """Why there is no text."""


def renderer(config: dict[str, Any]) -> Callable[[bytes], bytes]:
    """A function from {template, variables, continue_final} as JSON to the text as UTF-8.

    `config`: `sources`, template texts by name; `max_characters` of a text.
    """
    environment = template_environment()
    templates = {name: _compile(environment, name, text) for name, text in config["sources"].items()}
    max_characters: int = config["max_characters"]

    def render(payload: bytes) -> bytes:
        request = json.loads(payload)
        template, variables = templates[request["template"]], request["variables"]
        if request["continue_final"]:
            text = _render_to_be_continued(template, variables, max_characters)
        else:
            text = _render(template, variables, max_characters)
        try:
            return text.encode()
        except UnicodeEncodeError:
            raise RenderError("the text is not valid Unicode") from None

    return render


def _compile(environment: jinja2.Environment, name: str, text: str) -> jinja2.Template:
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise RenderError(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise RenderError(f"chat template {name!r} is nested too deeply") from error


def _render(template: jinja2.Template, variables: dict[str, Any], max_characters: int) -> str:
    pieces, length = [], 0
    try:
        for piece in template.generate(variables):
            length += len(piece)
            if length > max_characters:
                raise RenderError(f"the text is longer than {max_characters} characters")
            pieces.append(piece)
    except (RenderError, MemoryError):
        raise
    except RecursionError:
        raise RenderError("the template recurses too deeply") from None
    except Exception as error:
        raise RenderError(str(error) or type(error).__name__) from error
    return "".join(pieces)


def _render_to_be_continued(template: jinja2.Template, variables: dict[str, Any], max_characters: int) -> str:
    """The text up to the end of the final message's content, found as transformers finds it: by a tag behind it.

    A template that trims the message takes the tag's blank, too; then the text before the tag is trimmed as well.
    """
    final = variables["messages"][-1]
    content = final["content"]
    final["content"] = content + TAG
    text = _render(template, variables, max_characters + len(TAG))
    end = text.rfind(TAG.rstrip())
    if end < 0 or content.strip() not in text:
        raise RenderError("the template does not show the final message, so it cannot be continued")
    return text[:end] if text.startswith(TAG, end) else text[:end].rstrip()
