"""Wrong requests: the message says what is wrong; in OpenAI's dialect `param` which field, and `code` how.

Of TGI's rules there is a case of each stage of the checks. All rules: tests/unit/router/api/tgi/test_parameters.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from http_stack import Stack, served

Json = dict[str, Any]
GENERATE, STREAM = "/generate", "/generate_stream"
CHATS, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER: Json = {"role": "user", "content": "Hi"}
CHAT: Json = {"messages": [USER]}
ASK: Json = {"input": "Hi"}
FOREIGN = ("deserialize", "untagged", "instance of", "Input should", "Value error", "None", "Body", ".str", "variant")
"""Words of Rust's and Python's libraries."""


def tgi(inputs: str = "Hello", **parameters: object) -> Json:
    return {"inputs": inputs, "parameters": parameters}


def grammar(value: object) -> Json:
    return tgi(grammar={"type": "json", "value": value})


def part(**fields: object) -> Json:
    return {"messages": [{"role": "user", "content": [fields]}]}


pytestmark = pytest.mark.asyncio(loop_scope="module")


stack = served(grammars=True)


MISSING, TYPE = "missing_required_parameter", "invalid_type"
VALUE, UNSUPPORTED = "invalid_value", "unsupported_parameter"
RULE = "validation"
"""TGI's error type, in place of OpenAI's codes."""
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]}
TEXT_TOOL = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}
NOT_TOOL = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]}
G = {"type": "function", "function": {"name": "g"}}
TABLE: list[tuple[str, Any, str, str | None, str]] = [
    (GENERATE, tgi(best_of=2), "you must use sampling when `best_of` is > 1", None, RULE),
    (GENERATE, tgi(temperature=0.0), "`temperature` must be strictly positive", None, RULE),
    (GENERATE, tgi(""), "`inputs` cannot be empty", None, RULE),
    (GENERATE, tgi("a" + " a" * 2999), "`inputs` tokens + `max_new_tokens` must be <= 2048. Given: 3000 `inputs` tokens and 0 `max_new_tokens`", None, RULE),
    (GENERATE, tgi("a" + " a" * 1024), "`inputs` must have less than 1024 tokens. Given: 1025", None, RULE),
    (GENERATE, grammar(3), "grammar is not supported: the schema of type `json` must be an object or a text", None, RULE),
    (GENERATE, grammar({"type": "object"}), "grammar is not valid: Grammar must have a 'properties' field", None, RULE),
    (GENERATE, grammar({"type": 3, "properties": {}}), "grammar is not valid: ", None, RULE),
    (GENERATE, tgi(repetition_penalty=1e-38), "`repetition_penalty` must be >= 1e-06. Given: 1e-38", None, RULE),
    (STREAM, tgi(best_of=2), "`best_of` != 1 is not supported when streaming tokens", None, RULE),
    (STREAM, tgi(decoder_input_details=True), "`decoder_input_details` == true is not supported when streaming tokens", None, RULE),
    (STREAM, tgi(repetition_penalty=1e-38), "`repetition_penalty` must be >= 1e-06. Given: 1e-38", None, RULE),
    (STREAM, grammar({"properties": {"a": {"$ref": "#"}}}), "cannot compile regex from schema: ", None, RULE),
    (CHATS, {}, "missing field `messages`", "messages", MISSING),
    (CHATS, [], "the body must be an object. Given: an array", None, TYPE),
    (CHATS, 5, "the body must be an object. Given: an integer", None, TYPE),
    (CHATS, {"messages": 5}, "`messages` must be an array. Given: an integer", "messages", TYPE),
    (CHATS, {"messages": []}, "`messages` cannot be empty", "messages", VALUE),
    (CHATS, {"messages": [{}]}, "missing field `messages[0].role`", "messages[0].role", MISSING),
    (CHATS, {"messages": [USER | {"content": 5}]}, "must be a string or an array. Given: an integer", "messages[0].content", TYPE),
    (CHATS, part(type="text", text=5), "must be a string. Given: an integer", "messages[0].content[0].text", TYPE),
    (CHATS, part(text="a"), "missing field", "messages[0].content[0].type", MISSING),
    (CHATS, part(type="text"), "a content part of type `text` has no `text`", "messages", MISSING),
    (CHATS, part(type="image_url", image_url={"url": "x"}), "image modality is not supported", "messages", "unsupported_value"),
    (CHATS, CHAT | {"temperature": -1}, "`temperature` must be >= 0.0", "temperature", VALUE),
    (CHATS, CHAT | {"temperature": "a"}, "`temperature` must be a number. Given: a string", "temperature", TYPE),
    (CHATS, CHAT | {"temperature": 1e40}, "`temperature` must be a number of 32 bits", "temperature", VALUE),
    (CHATS, CHAT | {"top_k": 1.5}, "`top_k` must be an integer. Given: a number", "top_k", TYPE),
    (CHATS, CHAT | {"n": 0}, "`n` must be >= 1. Given: 0", "n", "integer_below_min_value"),
    (CHATS, CHAT | {"function_call": True}, "must be `auto` or `none`. Given: true", "function_call", VALUE),
    (CHATS, CHAT | {"n": 200}, "`n` must be <= 128. Given: 200", "n", "integer_above_max_value"),
    (CHATS, CHAT | {"stop": 5}, "`stop` must be a string or an array", "stop", TYPE),
    (CHATS, CHAT | {"stop": [5]}, "`stop[0]` must be a string", "stop[0]", TYPE),
    (CHATS, CHAT | {"stop": "x" * 2000}, "`stop` must have at most 1024 characters", "stop", "string_above_max_length"),
    (CHATS, CHAT | {"stream": "yes"}, "`stream` must be a boolean. Given: a string", "stream", TYPE),
    (CHATS, CHAT | {"stream_options": {"include_usage": 1}}, "must be a boolean", "stream_options.include_usage", TYPE),
    (CHATS, CHAT | {"tools": [{}]}, "missing field `tools[0].function`", "tools[0].function", MISSING),
    (CHATS, CHAT | {"tools": [{"type": "x", "function": {"name": "f"}}]}, "'x' are not supported", "tools", "unsupported_value"),
    (CHATS, CHAT | {"tools": [{"function": {"name": ""}}]}, "`tools[0].function.name` cannot be empty", "tools[0].function.name", "string_below_min_length"),
    (CHATS, CHAT | {"tool_choice": "required"}, "requires a call, but there are no `tools`", "tool_choice", VALUE),
    (CHATS, CHAT | {"tool_choice": {"type": "function"}}, "missing field", "tool_choice.function", MISSING),
    (CHATS, CHAT | {"tool_choice": "f"}, "Tool with name f not found", "tool_choice", "tool_error"),
    (CHATS, CHAT | {"tool_choice": 5}, "`tool_choice` must be a string or an object", "tool_choice", TYPE),
    (CHATS, CHAT | {"function_call": "must"}, "`function_call` must be `auto` or `none`", "function_call", VALUE),
    (CHATS, CHAT | {"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "name g not found", "function_call", "tool_error"),
    (CHATS, CHAT | {"function_call": {"name": 5}}, "must be a string", "function_call.name", TYPE),
    (CHATS, CHAT | {"prediction": "text"}, "`prediction` must be an object. Given: a string", "prediction", TYPE),
    (CHATS, CHAT | {"prediction": {"content": "a"}}, "missing field `prediction.type`", "prediction.type", MISSING),
    (CHATS, CHAT | {"prediction": {"type": "file", "content": "a"}}, "`prediction.type` must be `content`", "prediction.type", VALUE),
    (CHATS, CHAT | {"prediction": {"type": "content"}}, "missing field `prediction.content`", "prediction.content", MISSING),
    (CHATS, CHAT | {"prediction": {"type": "content", "content": 5}}, "must be a string or an array", "prediction.content", TYPE),
    (CHATS, CHAT | {"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "must be `text`", "prediction.content[0].type", VALUE),
    (CHATS, CHAT | {"response_format": {}}, "missing `type`, expected one of `text`", "response_format", VALUE),
    (CHATS, CHAT | {"response_format": {"type": "yaml"}}, "unknown type 'yaml'", "response_format", VALUE),
    (CHATS, CHAT | {"response_format": {"type": "regex", "regex": "("}}, "unclosed group", "response_format", VALUE),
    (CHATS, CHAT | TOOLS | {"response_format": {"type": "regex", "regex": "("}}, "unclosed group", "response_format", VALUE),
    (CHATS, CHAT | {"response_format": {"type": "text"}, "guided_regex": "("}, "unclosed group", "guided_regex", VALUE),
    (CHATS, CHAT | {"guided_choice": []}, "choices must be a list", "guided_choice", VALUE),
    (CHATS, CHAT | {"guided_decoding_backend": "x", "regex": "("}, "unclosed group", "regex", VALUE),
    (CHATS, CHAT | TEXT_TOOL | {"tool_choice": "required"}, "the parameters of tool f must be an object", "tools", VALUE),
    (CHATS, CHAT | NOT_TOOL | {"tool_choice": "f", "response_format": {"type": "json_object"}}, "keyword `not`", "tools", VALUE),
    (CHATS, CHAT | {"audio": {}}, "`audio` is not supported by this server", "audio", UNSUPPORTED),
    (CHATS, CHAT | {"use_beam_search": True}, "is not supported by this server", "use_beam_search", UNSUPPORTED),
    (CHATS, CHAT | {"detokenize": False}, "`detokenize` is not supported", "detokenize", UNSUPPORTED),
    (COMPLETIONS, {"prompt": "a", "top_p_min": 0.1}, "`top_p_min` is not supported", "top_p_min", UNSUPPORTED),
    (RESPONSES, ASK | {"lora_request": {"lora_name": "a"}}, "is not supported here. Use `model`", "lora_request", UNSUPPORTED),
    (CHATS, CHAT | {"skip_special_tokens": False}, "is not supported by this server", "skip_special_tokens", UNSUPPORTED),
    (CHATS, CHAT | {"echo": True}, "`echo` is not supported by this server", "echo", UNSUPPORTED),
    (CHATS, CHAT | {"bad_words": [""]}, "`bad_words[0]` cannot be empty", "bad_words[0]", "string_below_min_length"),
    (CHATS, CHAT | {"allowed_token_ids": []}, "`allowed_token_ids` cannot be empty", "allowed_token_ids", "empty_array"),
    (CHATS, {"messages": [USER | {"content": "a " * 3000}]}, "maximum context length", "messages", "context_length_exceeded"),
    (CHATS, CHAT | TOOLS | {"ebnf": "root ::= [a-z]"}, "Tool error: Grammar and tools are mutually exclusive, unless the grammar is", "tools", "tool_error"),
    (CHATS, CHAT | TOOLS | {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [G]}}}, "there are no `tools` for it", "tool_choice", VALUE),
    (CHATS, CHAT | {"function_call": {"name": "g"}}, "`function_call` names the function 'g'", "function_call", VALUE),
    (CHATS, CHAT | {"max_completion_tokens": 0}, "`max_completion_tokens` must be strictly", "max_completion_tokens", VALUE),
    (CHATS, CHAT | {"max_completion_tokens": 2, "min_tokens": 3}, "must be <= `max_completion_tokens`. Given: 3 and 2", "min_tokens", VALUE),
    (COMPLETIONS, {"prompt": ["a"] * 129}, "Number of prompts exceeds the maximum allowed batch size of 128", "prompt", "batch_size_exceeded"),
    (COMPLETIONS, {"prompt": [1 << 30]}, "`prompt` has a token id that is not one of", "prompt", VALUE),
    (COMPLETIONS, {"prompt": [[1], [2**32 - 1]]}, "`prompt` has a token id that is not one of", "prompt", VALUE),
    (COMPLETIONS, {"prompt": [1, 2**32]}, "`prompt[1]` must be", "prompt[1]", "integer_above_max_value"),
    (COMPLETIONS, {"prompt": [1, -1]}, "`prompt[1]` must be", "prompt[1]", "integer_below_min_value"),
    (COMPLETIONS, {"prompt": [1, 1.5]}, "must be an integer. Given: a number", "prompt[1]", TYPE),
    (COMPLETIONS, {"prompt": [1, [1]]}, "must be an integer. Given: an array", "prompt[1]", TYPE),
    (COMPLETIONS, {"prompt": [[1], [1, [1]]]}, "must be an integer. Given: an array", "prompt[1][1]", TYPE),
    (COMPLETIONS, {"prompt": [True]}, "`prompt[0]` must be", "prompt[0]", TYPE),
    (COMPLETIONS, {"prompt": [[1], []]}, "`prompt` cannot be empty", "prompt", VALUE),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"99999999999999999999": 1}}, "`logit_bias` has a token id that is not one of", "logit_bias", VALUE),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 1, "9223372036854775808": 1}}, "`logit_bias` has a token id that is not one of", "logit_bias", VALUE),
    (COMPLETIONS, {"prompt": ""}, "`prompt` cannot be empty", "prompt", VALUE),
    (COMPLETIONS, {"prompt": "a", "guided_grammar": "root ::= x"}, "Rule 'x' not found", "guided_grammar", VALUE),
    (CHATS, CHAT | {"n": 2, "best_of": 3}, "`best_of` must be 1 or equal to `n`", "best_of", VALUE),
    (COMPLETIONS, {"prompt": "a", "best_of": 3}, "`best_of` must be 1 or equal to `n`", "best_of", VALUE),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "`logprobs` must be >= 0 and <= 20. Given: 21", "logprobs", VALUE),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "`max_tokens` must be strictly positive", "max_tokens", VALUE),
    (RESPONSES, ASK | {"max_output_tokens": 0}, "`max_output_tokens` must be strictly positive", "max_output_tokens", VALUE),
    (COMPLETIONS, {}, "missing field `prompt`", "prompt", MISSING),
    (COMPLETIONS, {"prompt": [1, "a"]}, "`prompt[1]` must be an integer. Given: a string", "prompt[1]", TYPE),
    (COMPLETIONS, {"prompt": ["a"] * 5000}, "`prompt` must have at most 4096 entries", "prompt", "array_above_max_length"),
    (COMPLETIONS, {"prompt": []}, "Empty array", "prompt", VALUE),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "Suffix is not supported", "suffix", UNSUPPORTED),
    (COMPLETIONS, {"prompt": "a " * 3000}, "maximum context length", "prompt", "context_length_exceeded"),
    (RESPONSES, {}, "missing field `input`", "input", MISSING),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "has no `text`", "input", MISSING),
    (RESPONSES, {"input": [USER | {"content": [{"type": "input_image", "image_url": "x"}]}]}, "image modality is not", "input", "unsupported_value"),
    (RESPONSES, {"input": [{"type": "foo"}]}, "input items of type 'foo' are not supported", "input", "unsupported_value"),
    (RESPONSES, ASK | {"response_format": {"type": "json_object"}}, "is not supported here. Use `text.format`", "response_format", UNSUPPORTED),
    (RESPONSES, ASK | {"max_tokens": 5}, "is not supported here. Use `max_output_tokens`", "max_tokens", UNSUPPORTED),
    (RESPONSES, ASK | {"stop": ["a"]}, "`stop` is not supported here", "stop", UNSUPPORTED),
    (RESPONSES, ASK | {"prediction": {"type": "content", "content": "a"}}, "`prediction` is not supported here", "prediction", UNSUPPORTED),
    (RESPONSES, ASK | {"n": 2}, "`n` is not supported here", "n", UNSUPPORTED),
    (RESPONSES, ASK | {"seed": 2}, "`seed` is not supported here", "seed", UNSUPPORTED),
    (RESPONSES, ASK | {"audio": {"a": 1}}, "`audio` is not supported", "audio", UNSUPPORTED),
    (RESPONSES, ASK | {"include": ["foo"]}, "`include` must have only `message.output_text.logprobs`", "include", VALUE),
    (RESPONSES, ASK | {"background": True}, "Wait for the response, or `stream` it", "background", UNSUPPORTED),
    (RESPONSES, ASK | {"prompt": {"id": "p"}}, "Send their text as `instructions` and `input`", "prompt", UNSUPPORTED),
    (RESPONSES, ASK | {"tool_choice": "required"}, "there are no `tools`", "tool_choice", VALUE),
    (RESPONSES, ASK | {"text": {"format": {}}}, "missing `type`", "text.format", VALUE),
    (RESPONSES, ASK | {"text": {"format": {"type": "regex", "regex": "("}}}, "unclosed group", "text.format", VALUE),
    (RESPONSES, ASK | {"text": {"verbosity": "x"}}, "must be `low`, `medium` or `high`. Given: 'x'", "text.verbosity", VALUE),
    (RESPONSES, ASK | {"metadata": {"a": 5}}, "`metadata.a` must be a string", "metadata.a", TYPE),
    (RESPONSES, {"input": "a " * 3000}, "maximum context length", "input", "context_length_exceeded"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "message", "param", "code"), TABLE, ids=lambda value: str(value)[:60])
async def test_the_error_says_what_is_wrong_where_and_how(
    stack: Stack, path: str, body: Json, message: str, param: str | None, code: str
) -> None:
    for sent in (body, {"stream": True} | body) if isinstance(body, dict) else (body,):
        status, reply, _ = await stack.ask(path, sent)
        if code == RULE:
            assert (status, reply["error_type"], [*reply]) == (422, RULE, ["error", "error_type"])
            text = reply["error"]
            assert text.startswith(f"Input validation error: {message}")
            assert (len(text) > len(f"Input validation error: {message}")) == message.endswith(": ")
        else:
            error = reply["error"]
            assert (status, error["http_status_code"]) == (400, 400)
            assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
            text = error["message"]
        assert message in text
        assert not [word for word in FOREIGN if word in text]
    assert stack.permits.in_use == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, CHAT | {"top_p": 0, "max_tokens": 1}),
        (
            CHATS,
            CHAT
            | {"audio": None, "use_beam_search": False, "skip_special_tokens": True, "echo": False, "max_tokens": 1},
        ),
        (CHATS, CHAT | {"top_p": 1, "temperature": 0, "max_tokens": 1}),
        (RESPONSES, ASK | {"n": 1, "stop": [], "seed": None, "include": ["reasoning.encrypted_content"]}),
        (RESPONSES, ASK | {"stream_options": {"include_obfuscation": False}, "modalities": ["text"]}),
        ("/v1/messages", CHAT | {"max_tokens": 1, "mcp_servers": [], "n": 1, "container": None}),
    ],
)
async def test_a_field_that_asks_for_nothing_is_accepted(stack: Stack, path: str, body: Json) -> None:
    reply = await stack.ask(path, body)
    assert reply.status == 200, reply
