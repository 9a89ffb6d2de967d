"""The parts behind the routes, started and stopped together: chat templates and grammars have processes of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from text_generation_proto.values import GrammarKind
from text_generation_router.api.core.admission import Permits, RequestPreparer
from text_generation_router.api.core.chat import ChatPreparer
from text_generation_router.api.core.serving import Serving
from text_generation_router.api.core.settings import Settings
from text_generation_router.chat.parsers import detect_format
from text_generation_router.chat.template import TemplateRenderer
from text_generation_router.chat.template_files import ChatTemplates
from text_generation_router.grammar.compiler import GrammarCompiler, grammar_sandbox
from text_generation_router.metrics import Metrics
from text_generation_router.shards.cluster import Cluster
from text_generation_router.text.tokenizer import Tokenizer

AUTO = "auto"
"""Take the tool call format from the chat template."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the API knows of the model."""

    tokenizer: Tokenizer
    templates: ChatTemplates
    grammar_vocabulary: Path | None = None
    """The tokenizer.json that grammars are compiled for; None: grammars are not served."""
    grammar_kinds: Collection[GrammarKind] = tuple(GrammarKind)
    """Those that the engine follows."""
    tool_call_parser: str = AUTO
    reasoning: bool = False
    """Whether to part what the model thinks from what it says."""


@asynccontextmanager
async def assemble(
    model: Model, cluster: Cluster, permits: Permits, metrics: Metrics, settings: Settings
) -> AsyncIterator[tuple[Serving, ChatPreparer]]:
    """What routes work with. Raises ChatTemplateError, SandboxError if a worker cannot start."""
    async with AsyncExitStack() as running:
        grammars = None
        if model.grammar_vocabulary is not None:
            grammars = GrammarCompiler(await running.enter_async_context(grammar_sandbox(model.grammar_vocabulary)))
        renderer = await running.enter_async_context(TemplateRenderer(model.templates))
        preparer = RequestPreparer(model.tokenizer, settings.limits, metrics, grammars, model.grammar_kinds)
        serving = Serving(cluster, model.tokenizer, preparer, permits, metrics, settings)
        yield serving, ChatPreparer(serving, renderer, call_format=_call_format(model), reasoning=model.reasoning)


def _call_format(model: Model) -> str:
    if model.tool_call_parser != AUTO:
        return model.tool_call_parser
    special = frozenset(model.tokenizer.special_texts.values())
    return detect_format("\n".join(model.templates.sources.values()), special)
