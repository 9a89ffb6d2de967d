"""The events of a Responses stream, and the whole reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from answer_events import RESPONSES, TWO_CALLS, check_types, ending, read_events, write_answer
from openai.types.responses import Response

from text_generation_router.api.core.chat import Finish
from text_generation_router.api.core.ids import Named
from text_generation_router.api.openai.responses_events import ResponseWriter
from text_generation_router.api.openai.responses_schemas import ResponsesBody
from text_generation_router.chat.events import Event, Kind
from text_generation_router.errors import GenerationFailed, Overloaded, ServingError
from text_generation_router.generation import TokenOutput

NAMED = Named("resp_1", 1_700_000_000, "some-model", "native")
EVERYTHING: list[Event] = [
    Event(Kind.REASONING, "hm"),
    Event(Kind.REASONING, " yes"),
    Event(Kind.TEXT, "I'll "),
    Event(Kind.TEXT, 'look "it" up\n'),
    *TWO_CALLS,
]


def reply_writer(**body: object) -> ResponseWriter:
    return ResponseWriter(ResponsesBody.model_validate({"input": "Hi", **body}), NAMED, 7, lambda: 3)


def written(events: list[Event], finish: Finish) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of a stream, checked, and the whole reply."""
    read, whole = write_answer(reply_writer(), events, ending(finish), RESPONSES, Response)
    assert [event["sequence_number"] for event in read] == list(range(len(read)))
    assert read[-1]["response"] == whole
    return read, whole


def scored(*tokens: tuple[str, list[Event]]) -> tuple[ResponseWriter, bytes]:
    """Return a writer and what it wrote for some tokens and their events."""

    def logprobs(outputs: Sequence[TokenOutput]) -> list[Any]:
        score = {"logprob": orjson.Fragment(b"-0.5"), "bytes": [], "top_logprobs": []}
        return [{"token": output.text, **score} for output in outputs]

    writer = ResponseWriter(ResponsesBody.model_validate({"input": "Hi", "top_logprobs": 1}), NAMED, 7, int, logprobs)
    stream = b""
    for text, events in tokens:
        writer.score(TokenOutput(1, 1, text, text, b"-0.5", False, (), None))
        stream += writer.events(events)
    return writer, stream


def test_log_probabilities_are_those_of_the_text_alone() -> None:
    """A parser may hold text back, and the tokens of calls and of markers are not part of the text."""
    writer, stream = scored(
        ("hm", [Event(Kind.REASONING, "hm")]),
        ("</think>", []),
        ("a<", [Event(Kind.TEXT, "a")]),
        ("b", []),
        ("c", [Event(Kind.TEXT, "<bc")]),
        ("<call>", []),
        ("f", [Event(Kind.CALL, "f"), Event(Kind.ARGUMENTS, "{}")]),
    )
    read = read_events(stream + writer.end(ending(Finish.TOOL_CALLS)))
    check_types(read, RESPONSES)
    deltas = [event["logprobs"] for event in read if event["type"] == "response.output_text.delta"]
    assert [[score["token"] for score in scores] for scores in deltas] == [["a<"], ["b", "c"]]
    [done] = [event for event in read if event["type"] == "response.output_text.done"]
    message = read[-1]["response"]["output"][1]
    assert done["logprobs"] == message["content"][0]["logprobs"] == deltas[0] + deltas[1]


def test_markers_before_the_first_text_have_no_log_probabilities() -> None:
    # The third and the fourth token are one character.
    _, stream = scored(("final", []), ("<|message|>", []), ("", []), ("é", [Event(Kind.TEXT, "é")]))
    [delta] = [event for event in read_events(stream) if event["type"] == "response.output_text.delta"]
    assert [score["token"] for score in delta["logprobs"]] == ["", "é"]


def test_reasoning_texts_and_calls_are_separate_items_in_openais_order() -> None:
    read, whole = written(EVERYTHING, Finish.TOOL_CALLS)
    assert [event["type"].removeprefix("response.") for event in read] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert (read[0]["response"]["status"], read[0]["response"]["output"]) == ("in_progress", [])
    reasoning, message, first, second = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm yes"}]
    assert message["content"][0]["text"] == read[13]["text"] == 'I\'ll look "it" up\n'
    assert message["id"].startswith("msg_")
    assert (first["name"], first["arguments"]) == ("look", '{"a":"ü"}')
    assert (second["name"], second["arguments"]) == ("stop", "{}")
    assert first["call_id"] != second["call_id"]
    done = [event["item"] for event in read if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    assert {item["status"] for item in done} == {whole["status"]} == {"completed"}
    for event in read:
        if "item_id" in event:
            assert whole["output"][event["output_index"]]["id"] == event["item_id"]
    usage = whole["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (7, 5, 12)
    assert usage["input_tokens_details"]["cached_tokens"] == 3


def test_an_answer_cut_by_its_length_is_incomplete_in_its_last_item() -> None:
    read, whole = written([Event(Kind.TEXT, "Hel"), Event(Kind.CALL, "f"), Event(Kind.ARGUMENTS, '{"a')], Finish.LENGTH)
    assert read[-1]["type"] == "response.incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]
    assert whole["output"][1]["arguments"] == '{"a'
    assert whole["completed_at"] is None


def test_an_empty_answer_is_an_empty_message() -> None:
    read, whole = written([], Finish.STOP)
    assert read[0]["type"] == "response.created"
    assert whole["output"][0]["content"][0]["text"] == ""


def failed(error: ServingError, before: list[Event]) -> list[dict[str, Any]]:
    writer = reply_writer()
    read = read_events(writer.events(before) + writer.failed(error))
    check_types(read, RESPONSES)
    assert [event["sequence_number"] for event in read] == list(range(len(read)))
    return read


def test_a_failure_keeps_the_output_before_it() -> None:
    read = failed(GenerationFailed("no memory"), [Event(Kind.TEXT, "Hel")])
    response = read[-1]["response"]
    assert read[-1]["type"] == "response.failed"
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "Request failed during generation: no memory"}
    [item] = response["output"]
    assert item["status"] == "incomplete"
    assert item["content"][0]["text"] == "Hel"


def test_a_failure_before_any_output_is_a_response() -> None:
    read = failed(Overloaded(), [])
    assert [event["type"] for event in read] == ["response.created", "response.in_progress", "response.failed"]
    assert read[-1]["response"]["error"]["code"] == "rate_limit_exceeded"


def test_the_request_is_repeated() -> None:
    tool = {"type": "function", "name": "f", "description": None, "parameters": {"type": "object"}, "strict": True}
    asked = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "temperature": 0.7,
        "top_p": 0.9,
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}},
        "truncation": "auto",
        "user": "me",
    }
    writer = reply_writer(**asked, store=True, reasoning={"effort": "low"})
    _, whole = write_answer(writer, [], ending(Finish.STOP), RESPONSES, Response)
    assert {name: whole[name] for name in asked} == asked
    assert whole["reasoning"]["effort"] == "low"
    assert whole["store"] is False
    assert (whole["id"], whole["model"]) == ("resp_1", "some-model")


def test_absent_fields_have_openais_defaults() -> None:
    whole = orjson.loads(orjson.dumps(reply_writer().whole()))
    assert (whole["temperature"], whole["top_p"], whole["tool_choice"]) == (1.0, 1.0, "auto")
    assert whole["text"] == {"format": {"type": "text"}}
    assert whole["parallel_tool_calls"] is True
    assert whole["metadata"] == {}
