"""Any JSON as a Responses or Messages body becomes a conversation or a clear refusal."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from text_generation_router.api.anthropic import input as messages_input
from text_generation_router.api.anthropic.schemas import MessagesBody
from text_generation_router.api.openai import responses_input
from text_generation_router.api.openai.responses_schemas import ResponsesBody
from text_generation_router.errors import ServingError
from text_generation_router.web.bodies import validate

TEXTS = st.sampled_from(["", "a", "x" * 300])
NAMES = st.sampled_from(["f", "g"])
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 2),
    TEXTS,
    st.just([]),
    st.just({}),
    st.just({"a": [1.5]}),
    st.just([None]),
)


def one(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The usual value in 20 of 21 cases, otherwise any JSON."""
    return st.integers(0, 20).flatmap(lambda chance: ANYTHING if chance == 20 else usual)


def objects(types: list[str], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects with these fields; null stands for an absent one."""
    return st.fixed_dictionaries(
        {"type": one(st.sampled_from(types)), **{name: one(value) for name, value in fields.items()}}
    )


PARTS = st.lists(objects(["text"], text=TEXTS), max_size=2)
ITEMS = objects(
    ["message", "function_call", "function_call_output", "reasoning"],
    role=st.sampled_from(["user", "assistant", "developer"]),
    content=st.one_of(TEXTS, PARTS),
    call_id=NAMES,
    name=NAMES,
    arguments=st.sampled_from(["", "{}", "[1", '{"a": 1}']),
    output=st.one_of(TEXTS, PARTS),
    summary=PARTS,
)
SCHEMAS = st.sampled_from([{}, {"type": "object"}, {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}])
FORMATS = objects(["text", "json_object", "json_schema"], name=NAMES, schema=SCHEMAS, value=SCHEMAS)
RESPONSES = st.fixed_dictionaries(
    {"input": one(st.one_of(TEXTS, st.lists(ITEMS, max_size=4)))},
    optional={
        "instructions": one(TEXTS),
        "tools": one(st.lists(objects(["function"], name=NAMES, parameters=SCHEMAS), max_size=2)),
        "tool_choice": one(objects(["function"], name=NAMES)),
        "text": one(st.fixed_dictionaries({"format": one(FORMATS)})),
        "temperature": ANYTHING,
        "max_output_tokens": ANYTHING,
    },
)
BLOCKS = objects(
    ["text", "tool_use", "tool_result", "thinking", "redacted_thinking"],
    text=TEXTS,
    thinking=TEXTS,
    id=NAMES,
    name=NAMES,
    input=SCHEMAS,
    tool_use_id=NAMES,
    content=st.one_of(TEXTS, PARTS),
    is_error=st.booleans(),
)
MESSAGES = st.fixed_dictionaries(
    {
        "max_tokens": one(st.just(5)),
        "messages": one(
            st.lists(
                st.fixed_dictionaries(
                    {
                        "role": one(st.sampled_from(["user", "assistant", "system"])),
                        "content": one(st.one_of(TEXTS, st.lists(BLOCKS, max_size=3))),
                    }
                ),
                max_size=4,
            )
        ),
    },
    optional={
        "system": one(st.one_of(TEXTS, PARTS)),
        "tools": one(st.lists(objects(["custom"], name=NAMES, input_schema=SCHEMAS), max_size=2)),
        "tool_choice": one(objects(["auto", "any", "none"], name=NAMES)),
        "stop_sequences": one(st.lists(TEXTS, max_size=2)),
        "thinking": one(objects(["enabled", "disabled"])),
        "output_config": one(st.fixed_dictionaries({"format": one(FORMATS)})),
        "temperature": ANYTHING,
    },
)


@given(RESPONSES)
def test_responses(value: object) -> None:
    try:
        body = validate(value, ResponsesBody)
        responses_input.to_options(body)
        conversation = responses_input.to_conversation(body)
    except ServingError:
        return
    assert conversation.messages


@given(MESSAGES)
def test_messages(value: object) -> None:
    try:
        body = validate(value, MessagesBody)
        messages_input.to_options(body)
        conversation = messages_input.to_conversation(body)
    except ServingError:
        return
    assert conversation.messages
