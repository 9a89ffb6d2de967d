"""Chats in OpenAI's dialect.

The echo engine repeats the prompt, and the prompt is the text of the messages: a test sets the model's answer.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest
from every_dialect import VERBATIM
from http_stack import Stack, serve, served
from jsonschema import Draft202012Validator
from sse_client import Json, asking, chunks, joined, post, whole

CHAT = "/v1/chat/completions"
NONE_CACHED: Json = {
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


stack = served(chat_template=VERBATIM, tool_call_parser="hermes", reasoning=True, grammars=True)


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


async def test_a_reply_has_openais_shape_and_tgis_headers(stack: Stack) -> None:
    body = asking(stack.tokenizer, "Hello there, you.", model="dummy")
    _, reply, headers = await stack.ask(CHAT, body)
    assert reply.pop("id").startswith("chatcmpl-")
    assert reply.pop("created") > 1_700_000_000
    assert reply == {
        "object": "chat.completion",
        "model": "dummy",
        "system_fingerprint": "0.0.0-native",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there, you.", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10, **NONE_CACHED},
    }
    assert headers["x-compute-characters"] == "17"
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"]) == ("5", "5")
    assert float(headers["x-compute-time"]) > 0


async def test_the_model_defaults_to_the_served_one(stack: Stack) -> None:
    for model in (None, "tgi", ""):
        assert (await post(stack.client, CHAT, asking(stack.tokenizer, "Hi", model=model)))["model"] == "echo"


WEATHER_CALL = {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}
CLOCK_CALL = {"name": "clock", "arguments": "{}"}
BROKEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
SAYINGS: list[tuple[str, str, Json, Json]] = [
    # (name, the model's text, fields of the body, parts of the reply)
    ("text", "Plain text, of any kind: größer, 你好, 🙂.", {}, {"finish_reason": "length"}),
    ("stop", "One two three four", {"stop": "two three"}, {"content": "One ", "finish_reason": "stop"}),
    (
        "calls",
        f"{CALL}\n{CLOCK}\nSTOP",
        {"stop": ["zzz", "STOP"]},
        {"content": "", "tool_calls": [WEATHER_CALL, CLOCK_CALL], "finish_reason": "tool_calls"},
    ),
    ("text and calls", f"Let me see. {CALL}\n{CLOCK}", {}, {"content": "Let me see. "}),
    ("thoughts", "<think>\nHm, a call.\n</think>\n\n" + CALL, {}, {"reasoning_content": "Hm, a call.", "content": ""}),
    ("thoughts alone", "<think>No answer", {}, {"reasoning_content": "No answer", "content": ""}),
    ("unknown tool", CALL.replace("weather", "stocks"), {}, {"tool_calls": []}),
    ("broken call", BROKEN, {}, {"finish_reason": "length"}),
    ("cut call", CALL + " and more", {"max_tokens": 18}, {"finish_reason": "length"}),
    (
        "one call",
        f"{CALL}\n{CLOCK}STOP",
        {"stop": "STOP", "parallel_tool_calls": False},
        {"tool_calls": [WEATHER_CALL]},
    ),
    ("no tools", CALL, {"tool_choice": "none"}, {"content": CALL, "tool_calls": []}),
]


@pytest.mark.parametrize(("name", "says", "fields", "expected"), SAYINGS, ids=[row[0] for row in SAYINGS])
async def test_an_answer_is_parsed_and_streamed_as_it_is_returned_whole(
    stack: Stack, name: str, says: str, fields: Json, expected: Json
) -> None:
    body = asking(stack.tokenizer, says, **{"tools": TOOLS, **fields})
    reply = await post(stack.client, CHAT, body)
    answer = whole(reply)
    assert {part: answer[part] for part in expected} == expected
    calls = reply["choices"][0]["message"].get("tool_calls", [])
    assert all(call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    assert joined(await chunks(stack.client, CHAT, body)) == answer


async def test_every_delta_has_the_role_and_a_call_begins_with_its_name(stack: Stack) -> None:
    body = asking(stack.tokenizer, f"{CALL}STOP", tools=TOOLS, stop="STOP")
    stream = await chunks(stack.client, CHAT, body)
    deltas = [chunk["choices"][0]["delta"] for chunk in stream]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert {delta["role"] for delta in deltas} == {"assistant"}
    first_call = next(delta for delta in deltas if "tool_calls" in delta)["tool_calls"][0]
    assert first_call.pop("id").startswith("call_")
    assert first_call == {"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert stream[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert len({chunk["id"] for chunk in stream}) == 1


@pytest.mark.parametrize("options", [{}, {"logprobs": True}])
async def test_the_stream_helper_of_openais_client_gets_the_role_once(stack: Stack, options: Json) -> None:
    """The helper joins the roles of all deltas to one text. Other clients, such as TGI's clients, need one in each delta."""
    body = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 3, "stream": True, **options}
    for helper in ("chat.completions.stream", None):
        headers = {} if helper is None else {"x-stainless-helper-method": helper}
        text = (await stack.ask(CHAT, body, headers)).body
        assert text.count('"role":"assistant"') == (text.count('"delta":') if helper is None else 1)


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("weather"), named("other")]}}


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [("required", None), (named("weather"), "weather"), ("clock", "clock"), (ALLOWED, "weather")],
)
async def test_a_forced_call_follows_its_schema(stack: Stack, choice: str | Json, wanted: str | None) -> None:
    body = asking(stack.tokenizer, "I would rather talk.", tools=TOOLS, tool_choice=choice, max_tokens=200)
    streamed, answer = joined(await chunks(stack.client, CHAT, body)), whole(await post(stack.client, CHAT, body))
    assert streamed == answer
    assert answer["finish_reason"] == "tool_calls"
    [call] = answer["tool_calls"]
    assert wanted is None or call["name"] == wanted
    arguments = orjson.loads(call["arguments"])
    assert isinstance(arguments, dict)
    if call["name"] == "weather":
        Draft202012Validator(WEATHER).validate(arguments)


async def test_a_strict_tool_may_be_called_or_not(stack: Stack) -> None:
    strict = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    for says in ("No call.", f"{CALL}STOP"):
        body = asking(stack.tokenizer, says, tools=strict, stop="STOP", min_tokens=20, max_tokens=60)
        answer = whole(await post(stack.client, CHAT, body))
        assert joined(await chunks(stack.client, CHAT, body)) == answer
        for call in answer["tool_calls"]:
            Draft202012Validator(WEATHER).validate(orjson.loads(call["arguments"]))


async def test_an_answer_follows_its_response_format(stack: Stack) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": WEATHER}}
    body = asking(stack.tokenizer, "No JSON here.", response_format=form, max_tokens=200)
    answer = whole(await post(stack.client, CHAT, body))
    assert answer["finish_reason"] == "stop"
    Draft202012Validator(WEATHER).validate(orjson.loads(answer["content"]))
    assert joined(await chunks(stack.client, CHAT, body)) == answer


async def test_a_constrained_answer_ends_the_reasoning_that_the_prompt_starts(stack: Stack) -> None:
    body = asking(stack.tokenizer, "Hi<think>\n", guided_choice=["yes", "no"])
    reply = await stack.ask(CHAT, body)
    assert reply.headers["x-compute-characters"] == str(len("Hi<think>\n\n</think>\n\n"))
    answer = whole(reply.body)
    assert (answer["content"] in ("yes", "no"), answer["reasoning_content"]) == (True, "")


async def test_tools_that_may_not_be_called_leave_room_for_a_format(stack: Stack) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    body = asking(stack.tokenizer, "x", tools=TOOLS, tool_choice="none", response_format=form, max_tokens=200)
    Draft202012Validator(WEATHER).validate(orjson.loads(whole(await post(stack.client, CHAT, body))["content"]))


FORM = {"name": "weather", "schema": WEATHER}
IN_FORM = '{"city": "Rome", "days": 2}'


@pytest.mark.parametrize("says", [CALL, f"{CALL}\n{CLOCK}", IN_FORM])
async def test_with_tools_and_a_format_the_model_calls_or_answers_in_the_format(stack: Stack, says: str) -> None:
    """The echo engine chooses the first token only. The texts: tests/unit/router/grammar/test_grammar_answers.py."""
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    form = {"type": "json_schema", "json_schema": FORM}
    body = asking(stack.tokenizer, says, tools=strict, response_format=form, max_tokens=200)
    answer = whole(await post(stack.client, CHAT, body))
    assert joined(await chunks(stack.client, CHAT, body)) == answer
    calls = [call["arguments"] for call in answer["tool_calls"]]
    assert (len(calls), answer["finish_reason"]) == ((1, "tool_calls") if says != IN_FORM else (0, "stop"))
    Draft202012Validator(WEATHER).validate(orjson.loads([*calls, answer["content"]][0]))
    assert answer["content"] == "" or not calls
    # A tool that is not strict may have a schema that cannot be enforced.
    recursive = {"type": "function", "function": {"name": "tree", "parameters": {"properties": {"a": {"$ref": "#"}}}}}
    before = stack.counted("tgi_request_input_length_count")
    loose = whole(await post(stack.client, CHAT, body | {"tools": [*TOOLS, recursive]}))
    assert len(loose["tool_calls"]) == (says != IN_FORM)
    assert stack.counted("tgi_request_input_length_count") == before + 1
    follows = whole(await post(stack.client, CHAT, body | {"tools": TOOLS[:1]}))
    assert follows == answer
    forced = whole(await post(stack.client, CHAT, body | {"tools": TOOLS, "tool_choice": "clock"}))
    assert (forced["tool_calls"], forced["finish_reason"]) == ([CLOCK_CALL], "tool_calls")


async def test_prompt_logprobs_have_vllms_form_in_chats_and_completions(stack: Stack) -> None:
    """The echo engine gives each token the same log-probability, and its neighbours smaller ones."""
    says = "One two three"
    _, *ids = stack.tokenizer.encode_ids(says, add_special_tokens=False)
    reply = await post(stack.client, CHAT, asking(stack.tokenizer, says, prompt_logprobs=2, n=2))
    assert reply["prompt_logprobs"][0] is None
    assert [list(scored) for scored in reply["prompt_logprobs"][1:]] == [[str(one), str(one + 1)] for one in ids]
    scored = reply["prompt_logprobs"][1]
    assert (scored[str(ids[0])]["rank"], scored[str(ids[0])]["decoded_token"]) == (
        1,
        stack.tokenizer.token_text(ids[0]),
    )
    assert scored[str(ids[0])]["logprob"] > scored[str(ids[0] + 1)]["logprob"]
    body = {"prompt": [says, "One"], "max_tokens": 1, "prompt_logprobs": 0, "n": 2}
    choices = (await post(stack.client, "/v1/completions", body))["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [3, 3, 1, 1]
    assert choices[1]["prompt_logprobs"][1] == {str(ids[0]): scored[str(ids[0])] | {"rank": None}}
    for wrong, message in (
        ({"stream": True}, "with `stream`"),
        ({"prompt_logprobs": 21}, "must be >= 0 and <= 20. Given: 21"),
    ):
        refused = await stack.ask("/v1/completions", body | wrong)
        assert (refused.status, message in refused.body["error"]["message"]) == (400, True)
    assert "prompt_logprobs" not in await post(stack.client, CHAT, asking(stack.tokenizer, says))


async def test_functions_are_called_in_the_older_form(stack: Stack) -> None:
    functions = [tool["function"] for tool in TOOLS]
    body = asking(stack.tokenizer, f"{CALL}\n{CLOCK}STOP", functions=functions, stop="STOP")
    [choice] = (await post(stack.client, CHAT, body))["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None, "function_call": WEATHER_CALL}
    stream = await chunks(stack.client, CHAT, body)
    called = [delta["function_call"] for chunk in stream if "function_call" in (delta := chunk["choices"][0]["delta"])]
    assert called[0] == {"name": "weather", "arguments": ""}
    assert "".join(delta["arguments"] for delta in called) == WEATHER_CALL["arguments"]
    assert stream[-1]["choices"][0]["finish_reason"] == "function_call"
    clock = {"function_call": {"name": "clock"}, "max_tokens": 99}
    [choice] = (await post(stack.client, CHAT, body | clock))["choices"]
    assert choice["message"]["function_call"] == CLOCK_CALL
    [choice] = (await post(stack.client, CHAT, body | {"function_call": "none"}))["choices"]
    assert choice["message"]["content"].startswith(CALL)
    history = [
        {"role": "assistant", "content": "a", "function_call": CLOCK_CALL},
        {"role": "function", "name": "clock", "content": "9"},
    ]
    reply = await post(stack.client, CHAT, body | {"messages": [*history, *body["messages"]]})
    assert reply["choices"][0]["message"]["content"].startswith("a9")


@pytest.mark.parametrize("says", [CALL, IN_FORM])
async def test_responses_and_messages_take_tools_with_a_format(stack: Stack, says: str) -> None:
    form = {"type": "json_schema", **FORM}
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    asked = {"tools": [tool], "text": {"format": form}, "max_output_tokens": 200, "temperature": 0}
    [item] = (await post(stack.client, "/v1/responses", {"input": says, **asked}))["output"]
    assert item["type"] == ("function_call" if says == CALL else "message")
    Draft202012Validator(WEATHER).validate(orjson.loads(item.get("arguments") or item["content"][0]["text"]))
    asked = {
        "tools": [{"name": "weather", "input_schema": WEATHER, "strict": True}],
        "messages": [{"role": "user", "content": says}],
        "max_tokens": 200,
        "temperature": 0,
    }
    for where in ({"output_config": {"format": form}}, {"output_format": form}):
        [block] = (await post(stack.client, "/v1/messages", asked | where))["content"]
        assert block["type"] == ("tool_use" if says == CALL else "text")
        Draft202012Validator(WEATHER).validate(block.get("input") or orjson.loads(block["text"]))


async def test_each_of_n_answers_has_its_index(stack: Stack) -> None:
    body = asking(stack.tokenizer, "Four words are here", n=3, stream_options={"include_usage": True})
    reply = await post(stack.client, CHAT, body)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert reply["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16, **NONE_CACHED}
    stream = await chunks(stack.client, CHAT, body)
    assert [joined(stream, index) for index in range(3)] == [whole(reply, index) for index in range(3)]
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"] == reply["usage"]
    assert all(chunk["usage"] is None for chunk in stream[:-1])


async def test_counts_on_every_chunk_rise_to_the_whole(stack: Stack) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await chunks(stack.client, CHAT, asking(stack.tokenizer, "Four words are here", stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream if chunk["usage"] is not None]
    assert (counts[0], counts[-1], counts) == (0, 4, sorted(counts))
    assert len(counts) == len(stream)


@pytest.mark.parametrize("says", ["Hi 🙂", CALL, "<think>Hm.</think>Yes.", f"Well. {CALL}"])
async def test_logprobs_stand_beside_each_token(stack: Stack, says: str) -> None:
    body = asking(stack.tokenizer, says, logprobs=True, top_logprobs=2, tools=TOOLS)
    choice = (await post(stack.client, CHAT, body))["choices"][0]
    content = choice["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == says
    assert all(len(token["top_logprobs"]) == 2 and token["logprob"] == -0.5 for token in content)
    stream = await chunks(stack.client, CHAT, body)
    parts = [chunk["choices"][0]["logprobs"] or {"content": []} for chunk in stream]
    assert [token for part in parts for token in part["content"]] == content


async def test_values_that_tgi_refuses_are_accepted(stack: Stack) -> None:
    body = asking(
        stack.tokenizer, "Hello", top_p=1.0, stop=None, n=None, logit_bias={"5": -1.5}, max_completion_tokens=1, presence_penalty=0.5,
        frequency_penalty=-0.5, seed=-3, user="me", response_format={"type": "text"}, stream_options=None, tools=None,
        tool_choice=None, metadata={"unknown": "field"},
    )  # fmt: skip
    assert whole(await post(stack.client, CHAT, body))["content"] == "Hello"


async def test_message_parts_tool_results_and_developers_reach_the_template(demo_model: Path) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.tool_call_id }}|"
        "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}]{% endfor %}"
    )
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    async with serve(demo_model, chat_template=template) as stack:
        reply = await post(stack.client, "/chat_tokenize", {"messages": messages})
    assert reply["templated_text"] == "[system|Be brief.||][assistant|||weather(Rome)][tool|sunny|c1|]"
    assert "".join(token["text"] for token in reply["tokenize_response"]) == reply["templated_text"]


async def test_chats_at_once_do_not_mix(stack: Stack) -> None:
    async def one(number: int) -> None:
        body = asking(stack.tokenizer, f"I am number {number}, and no other.")
        assert joined(await chunks(stack.client, CHAT, body))["content"] == body["messages"][0]["content"]

    async with asyncio.TaskGroup() as tasks:
        for number in range(24):
            tasks.create_task(one(number))


async def test_nothing_is_left_behind(stack: Stack) -> None:
    await stack.assert_empty()
