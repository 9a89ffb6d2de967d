"""The check of any list or dict in a body stops at its first wrong entry, so that no body stops the server."""

from __future__ import annotations

import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args, get_origin

import orjson
import pytest
from pydantic import BaseModel, ValidationError

import text_generation_router.api.table  # noqa: F401 - imports all bodies
from text_generation_router.api.anthropic import input as messages_input
from text_generation_router.api.anthropic.schemas import MessagesBody
from text_generation_router.api.openai import input as chat_input
from text_generation_router.api.openai import responses_input
from text_generation_router.api.openai.responses_schemas import ResponsesBody
from text_generation_router.api.openai.schemas import ChatBody, CompletionBody
from text_generation_router.chat.conversation import Conversation
from text_generation_router.web.bodies import Body, validate
from text_generation_router.web.body_errors import InvalidBody

LARGE = 1_800_000
"""Bytes of a body that is let in."""
IN_LIST = ""
"""Step of a path: an entry of the list."""

Path = tuple[tuple[type[BaseModel], str], ...]
"""From a body to a container in it: the model and the field, at each step."""


def bodies(base: type[Body] = Body) -> list[type[Body]]:
    """Return the types of bodies; of one that another extends, the other."""
    inner = dict.fromkeys(body for each in base.__subclasses__() for body in bodies(each))
    return [*inner] or ([base] if base.__name__.endswith("Body") else [])


@pytest.mark.parametrize("number", [2.0, -0.0, 1e300, 2.5, "2", True, 2**70])
def test_a_number_without_a_fraction_is_an_integer(number: object) -> None:
    """Texts and truth values are no numbers, as in JSON Schema."""
    ids = {"prompt": [[1, number]], "max_tokens": 2.0}
    if number in (2.0, 0.0) and not isinstance(number, bool):
        body = validate(ids, CompletionBody)
        assert (body.prompt, body.max_tokens) == ([array("I", [1, int(number)])], 2)
        assert not any(isinstance(token, float) for tokens in body.prompt for token in tokens)  # type: ignore[union-attr]
    else:
        with pytest.raises(InvalidBody, match="prompt"):
            validate(ids, CompletionBody)


@pytest.mark.parametrize("place", [0, 500, 1000])
@pytest.mark.parametrize("other", [True, False, -1, 2**32, 0.5, "1", None, [1]])
def test_a_value_among_many_token_ids_that_is_none_is_refused(other: object, place: int) -> None:
    ids: list[object] = [0, 1] * 250 + [2**32 - 1] * 500
    assert validate({"prompt": ids}, CompletionBody).prompt == array("I", ids)  # type: ignore[arg-type]
    ids.insert(place, other)
    for prompt in (ids, [[1], ids]):
        with pytest.raises(InvalidBody, match=r"`prompt"):
            validate({"prompt": prompt}, CompletionBody)


def test_other_numbers_of_such_a_body_stay_as_they_are() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1.0, 2]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    messages = [{"role": "user", "content": "Hi"}]
    body = validate(
        {"messages": messages, "tools": [tool], "max_tokens": 4.0, "stop_token_ids": [1.0, 2, 3.0]}, ChatBody
    )
    assert (body.max_tokens, body.stop_token_ids) == (4, [1, 2, 3])
    assert body.tools is not None
    assert repr(body.tools[0].function.parameters) == repr(schema)
    count = 2000  # a round of validation for each would take minutes
    assert validate({"prompt": [[float(id)] for id in range(count)]}, CompletionBody).prompt == [
        array("I", [i]) for i in range(count)
    ]


@pytest.mark.parametrize(("given", "count"), [(True, 1), (False, None), (0, 0), (3, 3), (None, None)])
def test_the_logprobs_of_a_completion_may_be_those_of_a_chat(given: object, count: int | None) -> None:
    assert validate({"prompt": "a", "logprobs": given}, CompletionBody).logprobs == count


CONTENT = frozenset(
    (
        *("inputs", "prompt", "text", "content", "output", "summary", "arguments", "instructions", "thinking"),
        *("description", "parameters", "tool_prompt", "reasoning_content", "suffix", "data", "conversation"),
        *("image_url", "url"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "system", "input"),
        *("json_schema", "regex", "ebnf", "structural_tag", "value", "choice"),
    )
)
"""Fields whose texts are as long as a body may be. An answer repeats such a text three times at most."""


def unbounded_texts(schema: Any, root: dict[str, Any], name: str = "") -> Iterator[str]:  # noqa: ANN401
    """The fields in a JSON schema that take a text of any length."""
    if isinstance(schema, list):
        for one in schema:
            yield from unbounded_texts(one, root, name)
    elif isinstance(schema, dict):
        if schema.get("type") == "string" and schema.keys().isdisjoint(("maxLength", "enum", "const")):
            yield name
        if "$ref" in schema:
            yield from unbounded_texts(root["$defs"][schema["$ref"].rpartition("/")[2]], root, name)
        for key, inner in schema.get("properties", {}).items():
            yield from unbounded_texts(inner, root, key)
        for key in schema.keys() & {"anyOf", "oneOf", "items", "additionalProperties", "propertyNames"}:
            yield from unbounded_texts(schema[key], root, name)


@pytest.mark.parametrize("model", bodies(), ids=lambda model: model.__name__)
def test_every_text_that_is_no_content_has_a_length(model: type[Body]) -> None:
    schema = model.model_json_schema()
    assert {*unbounded_texts(schema, schema)} <= CONTENT


@pytest.mark.parametrize(
    "body",
    [
        {"model": "a" * 257},
        {"model": "\x01" * 100},  # six bytes each as JSON
        {"stop": "a" * 1025},
        {"stop": ["a" * 1025]},
        {"logit_bias": {"1" * 5000: 1.0}},
        {"logit_bias": dict.fromkeys(map(str, range(1025)), 1.0)},
        {"n": 129},
        {"chat_template_kwargs": {str(key): 0 for key in range(257)}},
        {"tools": [{"function": {"name": "f"}}] * 129},
        {"messages": [{"role": "a" * 257}]},
        {"user": "a" * 257},
    ],
    ids=lambda body: next(iter(body)),
)
def test_a_long_text_or_list_is_refused_and_not_repeated(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidBody) as refused:
        validate({"messages": []} | body, ChatBody)
    assert len(str(refused.value)) < 300
    assert next(iter(body)) in str(refused.value)


def containers(annotation: Any, path: Path = ()) -> Iterator[tuple[Path, type]]:  # noqa: ANN401
    """The lists and the dicts of checked values in an annotation: where, and what."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from containers(field.annotation, (*path, (annotation, name)))
    elif annotation in (list, set, tuple) or get_origin(annotation) in (list, set, tuple, frozenset):
        yield path, list
        for entry in get_args(annotation):
            yield from containers(entry, (*path, (BaseModel, IN_LIST)))
    elif get_origin(annotation) is dict:
        if get_args(annotation)[1] is not Any:
            yield path, dict
    else:
        for one in get_args(annotation):
            yield from containers(one, path)


def body_with(path: Path, value: object) -> object:
    """A body that is right but for `value` at its place, as far as a discriminator needs it."""
    for model, name in reversed(path):
        if name == IN_LIST:
            value = [value]
        else:
            others = {key: _some(field.annotation) for key, field in model.model_fields.items() if field.is_required()}
            value = others | {name: value}
    return value


def _some(annotation: Any) -> object:  # noqa: ANN401
    return "a" if annotation is str else 1 if annotation is int else []


def _leads_through(steps: Sequence[int | str], names: Sequence[str]) -> bool:
    left = iter(steps)
    return all(name in left for name in names)


PLACES = [(model, *place) for model in bodies() for place in containers(model)]
NAMES = [
    f"{model.__name__}-{'.'.join(name or '0' for _, name in path)}-{kind.__name__}" for model, path, kind in PLACES
]


def test_all_bodies_are_looked_at() -> None:
    assert {"CompletionBody-prompt-list", "MessagesBody-messages.0.content.0.content-list"} <= {*NAMES}
    assert {
        "InferBody-inputs.0.data-list",
        "ResponsesBody-metadata-dict",
        "CompatGenerateBody-parameters.stop-list",
    } <= {*NAMES}


@pytest.mark.parametrize("entry", [None, {}], ids=repr)
@pytest.mark.parametrize(("model", "path", "kind"), PLACES, ids=NAMES)
def test_a_large_wrong_body_is_refused_at_once(model: type[Body], path: Path, kind: type, entry: object) -> None:
    count = LARGE // (len(orjson.dumps(entry)) + 1)
    wrong: object = [entry] * count if kind is list else dict.fromkeys(map(str, range(count)), entry)
    body = body_with(path, wrong)
    with pytest.raises(ValidationError) as refused:  # for what is wrong here, not for something on the way
        model.model_validate(body)
    names = [name for _, name in path if name != IN_LIST]
    assert any(_leads_through(error["loc"], names) for error in refused.value.errors())
    start = time.thread_time()  # of the processor: others may want it too
    with pytest.raises(InvalidBody):
        validate(body, model)
    assert time.thread_time() - start < 0.25


def test_metadata_is_counted_before_it_is_checked() -> None:
    few = {str(number): "a" for number in range(16)}
    for model, body in ((ResponsesBody, {"input": "a"}), (MessagesBody, {"messages": [], "max_tokens": 1})):
        validate(body | {"metadata": few}, model)
        with pytest.raises(InvalidBody, match=r"metadata.*at most 16 keys"):
            validate(body | {"metadata": few | {"one more": "a"}}, model)


@pytest.mark.parametrize(
    ("model", "field", "convert"),
    [
        (ChatBody, "messages", lambda body: chat_input.to_conversation(body, None)),
        (ResponsesBody, "input", responses_input.to_conversation),
        (MessagesBody, "messages", messages_input.to_conversation),
    ],
    ids=["chat", "responses", "messages"],
)
def test_a_body_does_not_keep_messages_that_were_read(
    model: type[Body], field: str, convert: Callable[[Any], Conversation]
) -> None:
    message = {"role": "user", "content": [{"type": "input_text" if field == "input" else "text", "text": "Hi"}]}
    body: Any = validate(
        {"max_tokens": 1, field: [message, message]} if field == "messages" else {field: [message]}, model
    )
    kept = [weakref.ref(entry) for entry in getattr(body, field)]
    assert convert(body).messages[0] == {"role": "user", "content": "Hi"}
    assert [entry() for entry in kept] == [None] * len(kept)
