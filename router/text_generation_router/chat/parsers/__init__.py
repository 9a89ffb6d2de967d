"""Parsers of model answers by format name, and the format that a chat template implies."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from text_generation_router.chat.events import OutputParser
from text_generation_router.chat.parsers import channels, formats, pythonic, sections, special_tags, tagged
from text_generation_router.chat.parsers.base import Tools
from text_generation_router.chat.parsers.reasoning import END_THINK, THINK
from text_generation_router.chat.parsers.syntax import CallSyntax, Pieces


@dataclass(frozen=True, slots=True)
class Format:
    parser: Callable[[Tools], OutputParser]
    """Returns a new parser for one answer. Calls of other tools are text."""
    signs: Sequence[str] = ()
    """Texts in the chat template, or special tokens, of the models that write it."""
    aliases: Sequence[str] = ()
    """Names that vLLM or SGLang give it."""
    unmarked: bool = False
    """JSON with the name of a tool may be a call without any marker."""
    has_channels: bool = False
    """Reasoning and text are apart by special tokens: answers without calls need the parser too."""
    assistant: str = ""
    """The start of the model's message. The rest of the prompt belongs to the answer."""
    answer_start: str = ""
    """Continues the prompt of an answer that a grammar constrains."""
    call_start: str = ""
    """Continues the prompt of a call that is forced."""
    thought: Pieces = ()
    """Reasoning in a channel, and the start of the next message."""

    @property
    def calls(self) -> Sequence[CallSyntax]:
        """The ways to write calls; empty if the format has none."""
        return getattr(self.parser, "CALLS", ())


FORMATS: Final[dict[str, Format]] = {
    "openai": Format(
        channels.HarmonyParser,
        (channels.HARMONY_CHANNEL,),
        ("gpt-oss", "harmony"),
        has_channels=True,
        assistant=channels.HARMONY_ASSISTANT,
        answer_start=channels.HARMONY_ANSWER,
        call_start=channels.HARMONY_CALL,
        thought=channels.HARMONY_THOUGHT,
    ),
    "gemma4": Format(channels.Gemma4Parser, (channels.GEMMA_CALL,), has_channels=True, thought=channels.GEMMA_THOUGHT),
    "functiongemma": Format(channels.FunctionGemmaParser, (channels.FUNCTION_CALL,)),
    "deepseek_v3": Format(
        sections.DeepSeekParser, (sections.DEEPSEEK_CALLS,), ("deepseek_v31", "deepseekv3", "deepseekv31")
    ),
    "deepseek_v4": Format(
        special_tags.DeepSeek4Parser, (f"{special_tags.DSML}tool_calls", "dsml_token + 'tool_calls"), ("deepseekv4",)
    ),
    "deepseek_v32": Format(
        special_tags.DeepSeek32Parser, (f"{special_tags.DSML}function_calls", special_tags.DSML), ("deepseekv32",)
    ),
    "kimi_k2": Format(sections.KimiParser, (sections.KIMI_CALLS,)),
    "hy_v3": Format(tagged.Hunyuan3Parser, tagged.HUNYUAN_SEPARATORS),
    "hunyuan_a13b": Format(formats.HunyuanParser, (f"{formats.HUNYUAN_CALLS}[",), ("hunyuan",)),
    "glm45": Format(tagged.GlmParser, (tagged.GLM_KEY,), ("glm47", "glm", "poolside_v1", "ling3")),
    "minimax_m3": Format(special_tags.MiniMaxM3Parser, (special_tags.MINIMAX_TOKEN,)),
    "minimax_m2": Format(tagged.MiniMaxParser, (tagged.MINIMAX_BLOCK,), ("minimax-m2",)),
    "seed_oss": Format(tagged.SeedParser, (tagged.SEED_BLOCK,)),
    "cohere_command": Format(formats.CohereParser, (formats.COHERE_CALLS,), ("cohere_command3", "cohere_command4")),
    "apertus": Format(formats.ApertusParser, (formats.APERTUS_CALLS,)),
    "phi4_mini_json": Format(formats.PhiParser, (f"{formats.PHI_CALLS}[", formats.PHI_END)),
    "granite": Format(formats.GraniteParser, (formats.GRANITE_CALLS,)),
    "lfm2": Format(pythonic.Lfm2Parser, (pythonic.LFM_START,)),
    "olmo3": Format(pythonic.Olmo3Parser, (pythonic.OLMO_START,)),
    "qwen3_coder": Format(tagged.Qwen3CoderParser, (tagged.QWEN_FUNCTION,), ("qwen3_xml", "step3p5")),
    "hermes": Format(
        formats.HermesParser, (formats.HERMES_START,), ("qwen25", "qwen", "qwen3_json", "ernie45", "granite4")
    ),
    "mistral": Format(formats.MistralParser, (formats.MISTRAL_CALLS,)),
    "llama4_pythonic": Format(pythonic.PythonicParser, (pythonic.PYTHON_START,), ("pythonic", "llama4")),
    "llama3_json": Format(formats.Llama3JsonParser, (formats.LLAMA_TAG,), ("llama3", "llama4_json"), unmarked=True),
    "json": Format(formats.JsonAnswerParser, unmarked=True),
    "json_calls": Format(formats.JsonCallsParser, unmarked=True),
    "plain": Format(lambda tools: formats.PlainParser()),
}
"""By name. A template with the signs of several has the first one."""

NAMES: Final = {alias: name for name, form in FORMATS.items() for alias in (name, *form.aliases)}
"""The names of formats by the names and aliases that operators use."""

REASONING: Final = (
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    (f"<think{tagged.HUNYUAN_SUFFIX}>", f"</think{tagged.HUNYUAN_SUFFIX}>"),
    ("<mm:think>", "</mm:think>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Markers of the reasoning of models that do not use THINK and END_THINK."""


def detect_format(template: str, special_tokens: Collection[str]) -> str:
    """Return the format in which a model with this chat template writes calls; `json` if the template implies none.

    A special token counts only if the template reads `tools`: otherwise the prompt asks the model to answer with JSON.
    """
    signed = [(sign, name) for name, form in FORMATS.items() for sign in form.signs]
    found = [name for sign, name in signed if sign in template]
    if not found and "tools" in template:
        found = [name for sign, name in signed if sign in special_tokens]
    return found[0] if found else "json"


def detect_reasoning(template: str, special_tokens: Collection[str]) -> tuple[str, str]:
    """Return the markers of a model's reasoning."""
    return next((pair for pair in REASONING if pair[0] in template or pair[0] in special_tokens), (THINK, END_THINK))


def begun_answer(prompt: str, start: str) -> str:
    """Return the part of a rendered prompt after the last `start`, which begins the model's message; empty without one."""
    return prompt.rpartition(start)[2] if start and start in prompt else ""
