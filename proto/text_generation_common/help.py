"""The text of --help: the options of a command by topic, in short, or some of them in full."""

import re
import shutil
from collections.abc import Iterator
from textwrap import wrap

from text_generation_common.options import Option, options_by_topic
from text_generation_common.settings import ProcessConfig

WIDTH = 80
"""Most columns of a line."""
INDENT = " " * 6


def help_page(config: type[ProcessConfig], word: str = "") -> str:
    """Return the help of a command: all options, each with its first sentence.

    With a `word`: full help for options whose topic or flag has a word starting with it. Raises ValueError if there is none.
    """
    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH)
    program = str(config.model_config.get("cli_prog_name"))
    found = [
        (topic.value, option)
        for topic, options in options_by_topic(config).items()
        for option in options.values()
        if re.search(rf"\b{re.escape(word.lstrip('-'))}", f"{topic.value} {option.flag}", re.IGNORECASE)
    ]
    if not found:
        raise ValueError(f"--help {word}: no flag and no topic has that name")
    lines = [] if word else list(_head(config, program, width))
    title = ""
    for topic, option in found:
        if topic != title:
            lines += ["", title := topic]
        lines += _entry(option, width, whole=bool(word))
    if not word:
        lines += ["", *wrap(f"`{program} --help WORD` shows the whole text of the flags and topics with WORD.", width)]
    return "\n".join(lines).strip("\n") + "\n"


def _head(config: type[ProcessConfig], program: str, width: int) -> Iterator[str]:
    start = "usage: "
    for usage in config.usages:
        yield f"{start}{program} {usage}"
        start = " " * len(start)
    yield ""
    yield from wrap(" ".join((config.__doc__ or "").split()), width)
    yield from wrap(
        "A setting is given by its flag, else by the environment variable beside it, else it has its default.", width
    )


def _entry(option: Option, width: int, *, whole: bool) -> Iterator[str]:
    # The other switches are off unless they are given.
    negation = option.negation if option.default != "false" else ""
    flags = ", ".join(filter(None, (option.shortcut, option.flag, negation)))
    value = "{" + ",".join(option.choices) + "}" if option.choices else option.placeholder
    facts = [f"{option.variable}"] if option.variable else []
    facts += [f"default: {option.default}"] if option.default else []
    end = f"[{'; '.join(facts)}]" if facts else ""
    first = f"  {flags} {value}".rstrip()
    if len(first) + len(end) + 2 <= width:
        yield f"{first}  {end}".rstrip()
    else:
        # Lists of choices may be longer than a line.
        yield from wrap(first.strip().replace(",", ", "), width, initial_indent="  ", subsequent_indent=INDENT)
        yield f"{INDENT}{end}"
    text = option.meaning if whole else first_sentence(option.meaning)
    yield from wrap(text, width, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False)


def first_sentence(text: str) -> str:
    """Return the first sentence of a text: to the first full stop before a capital letter, or the end."""
    return re.split(r"(?<=\.)\s+(?=[A-Z0-9`])", text, maxsplit=1)[0]
