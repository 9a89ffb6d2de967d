"""The parts behind the routes, started and stopped together. Chat templates and grammars run in worker processes."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from text_generation_common.log import log
from text_generation_proto.values import GrammarKind
from text_generation_router.admission_queue import MAX_WAITING_CHARACTERS, PendingWork
from text_generation_router.api.core.admission import RequestPreparer
from text_generation_router.api.core.chat import ChatPreparer
from text_generation_router.api.core.serving import Serving
from text_generation_router.api.core.settings import Settings
from text_generation_router.chat.parsers import FORMATS, NAMES, detect_format, detect_reasoning
from text_generation_router.chat.template import TemplateRenderer
from text_generation_router.chat.template_files import ChatTemplates
from text_generation_router.cluster_interface import ClusterInterface
from text_generation_router.config import RouterConfig
from text_generation_router.grammar.compiler import GrammarCompiler, grammar_sandbox
from text_generation_router.media.reader import UNUSABLE, ImageReader, ImageTokens
from text_generation_router.metrics import HttpMetrics
from text_generation_router.permits import ConcurrencyLimit
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.text.tokenizer_pool import TokenizerPool


@asynccontextmanager
async def assemble(
    tokenizer: Tokenizer,
    templates: ChatTemplates,
    grammar_kinds: Collection[GrammarKind],
    cluster: ClusterInterface,
    permits: ConcurrencyLimit,
    metrics: HttpMetrics,
    settings: Settings,
) -> AsyncIterator[tuple[Serving, ChatPreparer, Callable[[], Awaitable[None]]]]:
    """Start the parts that routes need; `grammar_kinds`: those that the engine supports.

    The third part waits until the worker processes are ready, which may take longer than the rest; requests that need one
    wait for it. It raises ChatTemplateError, or SandboxError if a worker cannot start.
    """
    config = settings.config
    async with AsyncExitStack() as running:
        stage = PendingWork(MAX_WAITING_CHARACTERS // config.http_workers)
        metrics.stage = stage
        grammars = sandbox = None
        if grammar_kinds and not config.disable_grammar_support:
            sandbox = grammar_sandbox(Path(config.model_path) / "tokenizer.json", stage=stage)
            await running.enter_async_context(sandbox)
            grammars = GrammarCompiler(sandbox)
        renderer = await running.enter_async_context(TemplateRenderer(templates, stage=stage))
        pool = TokenizerPool(tokenizer, config.validation_workers, stage)
        await running.enter_async_context(pool)
        reader = _image_reader(tokenizer, settings, stage)
        if reader is not None:
            await running.enter_async_context(reader)
        preparer = RequestPreparer(pool, settings.limits, metrics, cluster.ids, grammars, grammar_kinds, reader)
        serving = Serving(cluster, tokenizer, pool, preparer, permits, metrics, settings, stage)
        call_format = find_call_format(config, templates, tokenizer)
        reasoning = detect_reasoning(*_marks(templates, tokenizer)) if config.split_reasoning else None

        async def ready() -> None:
            await renderer.ready()
            if sandbox is not None:
                await sandbox.ready()

        yield serving, ChatPreparer(serving, renderer, call_format=call_format, reasoning=reasoning), ready


def _image_reader(tokenizer: Tokenizer, settings: Settings, stage: PendingWork) -> ImageReader | None:
    """Return a reader of images; None if the model takes none, or its layouts are not known here."""
    config, most = settings.config, settings.limits.max_images
    if not most:
        return None
    try:
        tokens = ImageTokens.load(Path(config.model_path), tokenizer)
    except UNUSABLE as error:
        log.warning("images are not served: the files of the model do not tell their tokens", reason=repr(error))
        return None
    if tokens is None:
        return None
    return ImageReader(tokens, most, config, stage)


def find_call_format(config: RouterConfig, templates: ChatTemplates, tokenizer: Tokenizer) -> str:
    """Return the format of the model's tool calls: that of the settings, else the one that its template shows."""
    if config.tool_call_parser != "auto":
        return NAMES[config.tool_call_parser]
    found = detect_format(*_marks(templates, tokenizer))
    # Without them, the prompt asks for JSON.
    return found if templates.using_tools or FORMATS[found].has_channels else "json"


def _marks(templates: ChatTemplates, tokenizer: Tokenizer) -> tuple[str, frozenset[str]]:
    """Return the texts of all templates, and the special tokens."""
    return "\n".join(templates.sources.values()), frozenset(tokenizer.special_texts.values())
