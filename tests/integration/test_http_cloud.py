"""Routes of SageMaker, Vertex AI and KServe."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from http_stack import Stack, serve, served, until
from metric_samples import exposition

FEW: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
PREDICT, HEALTH = "/v1/endpoints/1/deployedModels/2:predict", "/v1/endpoints/1/deployedModels/2"


pytestmark = pytest.mark.asyncio(loop_scope="module")


stack = served(settings={"aip_predict_route": PREDICT, "aip_health_route": HEALTH})


class TestSageMaker:
    async def test_inputs_are_answered_like_the_root_route(self, stack: Stack) -> None:
        body = {"inputs": "Hello there", "parameters": FEW}
        assert (await stack.ask("/invocations", body))[:2] == (await stack.ask("/", body))[:2]

    async def test_inputs_stream(self, stack: Stack) -> None:
        body = {"inputs": "Hello there", "parameters": FEW, "stream": True}
        async with stack.client.post("/invocations", json=body) as response:
            assert response.content_type == "text/event-stream"
            assert (await response.text()).count("data: {") == 3

    async def test_a_body_may_be_a_chat_or_a_completion(self, stack: Stack) -> None:
        messages = {"messages": [{"role": "user", "content": "Hello"}]}
        for form, kind in ((messages, "chat.completion"), ({"prompt": "Hello"}, "text_completion")):
            status, reply, _ = await stack.ask("/invocations", {**form, "max_tokens": 3})
            assert (status, reply["object"]) == (200, kind)
        status, reply, _ = await stack.ask("/invocations", {**messages, "max_tokens": 0})
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error")

    async def test_inputs_come_first(self, stack: Stack) -> None:
        body = {"prompt": "a", "messages": [], "inputs": "a", "parameters": FEW}
        status, reply, _ = await stack.ask("/invocations", body)
        assert status == 200
        assert list(reply[0]) == ["generated_text"]

    async def test_a_body_of_no_known_form_is_refused(self, stack: Stack) -> None:
        message = (
            "Failed to deserialize the JSON body into the target type: "
            "the body must have `inputs`, `messages` or `prompt`"
        )
        for body in ({}, [], "inputs", 1, {"input": "a"}):
            assert (await stack.ask("/invocations", body))[:2] == (422, message)
        status, text, _ = await stack.ask("/invocations", {"inputs": 1})
        assert (status, text.endswith(": `inputs` must be a string. Given: an integer")) == (422, True)


class TestVertex:
    @pytest.mark.parametrize("path", ["/vertex", PREDICT])
    async def test_there_is_one_text_per_instance_in_order(self, stack: Stack, path: str) -> None:
        prompts = ["one two three", "four five six", "seven eight nine"]
        alone = [(await stack.generate(prompt, **FEW))["generated_text"] for prompt in prompts]
        instances = [{"inputs": prompt, "parameters": FEW} for prompt in prompts]
        assert (await stack.ask(path, {"instances": instances}))[:2] == (200, {"predictions": alone})

    async def test_an_instance_may_be_a_conversation_and_has_parameters(self, stack: Stack) -> None:
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3.0}  # an integer, in JSON Schema
        full = {"inputs": "Hello there", "parameters": {**FEW, "return_full_text": True}}
        status, reply, _ = await stack.ask("/vertex", {"instances": [chat, full]})
        assert status == 200
        said, text = reply["predictions"]
        assert isinstance(said, str)
        assert text.startswith("Hello there")

    async def test_no_instances_are_refused(self, stack: Stack) -> None:
        assert (await stack.ask("/vertex", {"instances": []}))[:2] == (
            422,
            {"error": "Input validation error: `instances` cannot be empty", "error_type": "Input validation error"},
        )

    async def test_one_failure_fails_all_and_frees_all(self, stack: Stack) -> None:
        instances = [{"inputs": "a", "parameters": {"max_new_tokens": 500}}, {"inputs": ""}]
        status, reply, _ = await stack.ask("/vertex", {"instances": instances})
        assert (status, reply["error"]) == (422, "Input validation error: `inputs` cannot be empty")
        await stack.assert_empty()

    async def test_all_permits_are_held_until_the_last_is_done(self, demo_model: Path) -> None:
        instances = [{"inputs": "a", "parameters": {"max_new_tokens": 1}}] * 3
        instances.append({"inputs": "a", "parameters": {"max_new_tokens": 100}})
        held = set()
        async with serve(demo_model, echo_step_ms=5) as stack, asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(stack.ask("/vertex", {"instances": instances}))
            await until(lambda: stack.permits.in_use > 0)
            await until(lambda: bool(held.add(stack.permits.in_use)) or asked.done() or stack.permits.in_use == 0)
            assert (await asked)[0] == 200
        assert held == {4, 0}

    async def test_the_number_of_instances_is_limited(self, stack: Stack) -> None:
        status, text, _ = await stack.ask("/vertex", {"instances": [{"inputs": "a"}] * 1025})
        assert (status, "at most 1024" in text) == (422, True)

    async def test_the_health_route_of_vertex_ais_environment(self, stack: Stack) -> None:
        assert (await stack.ask(HEALTH)).status == 200


def counted(stack: Stack) -> list[str]:
    """Return the line that counts generations."""
    return [line for line in exposition(stack.metrics.registry).splitlines() if line.startswith("tgi_request_count ")]


class TestKServe:
    MODEL = "/v2/models/some%2Fmodel/versions/1"

    async def test_probes_and_metadata(self, stack: Stack) -> None:
        for path, expected in {
            "/v2": {
                "name": "text-generation-inference",
                "version": "0.0.0",
                "extensions": ["health", "models", "metrics"],
            },
            "/v2/health/live": {"live": True},
            "/v2/health/ready": {"live": True},
            "/v2/models/m/versions/1": {"name": "m", "version": "1", "extensions": ["infer", "ready"]},
            "/v2/models/m/versions/1/ready": {"live": True},
        }.items():
            assert (await stack.ask(path))[:2] == (200, expected)

    async def test_bytes_in_bytes_out_and_strings_in_strings_out(self, stack: Stack) -> None:
        prompts = ["one two", "drei vier fünf"]
        alone = [(await stack.generate(prompt, **FEW))["generated_text"] for prompt in prompts]
        head = {"name": "in", "datatype": "BYTES"}
        inputs = [head | {"shape": [1, 1], "data": list(prompt.encode())} for prompt in prompts]
        inputs.append(head | {"shape": [2], "data": prompts})
        body: dict[str, Any] = {"parameters": FEW, "inputs": inputs}
        outputs = [{"name": name} for name in "abc"]
        status, reply, _ = await stack.ask(f"{self.MODEL}/infer", body | {"id": "7", "outputs": outputs})
        assert (status, reply["id"]) == (200, "7")
        data = [*([*text.encode()] for text in alone), alone]
        shapes = [[1, len(data[0])], [1, len(data[1])], [2]]
        assert reply["outputs"] == [
            head | {"name": name, "shape": shape, "data": part}
            for name, shape, part in zip("abc", shapes, data, strict=True)
        ]
        _, reply, _ = await stack.ask(f"{self.MODEL}/infer", body)
        assert (bool(reply["id"]), {output["name"] for output in reply["outputs"]}) == (True, {"in"})

    async def test_the_number_of_texts_is_limited(self, stack: Stack) -> None:
        one = {"name": "in", "shape": [600], "datatype": "BYTES", "data": ["a"] * 600}
        before = counted(stack)
        status, reply, _ = await stack.ask(f"{self.MODEL}/infer", {"inputs": [one, one]})
        assert (status, reply["error_type"]) == (422, "validation")
        assert reply["error"].endswith("`inputs` must have at most 1024 texts in all. Given: 1200")
        assert counted(stack) == before

    async def test_invalid_inputs_are_refused(self, stack: Stack) -> None:
        one = {"name": "in", "shape": [1], "datatype": "BYTES", "data": [104, 105]}
        for inputs, outputs, error_type in (
            ([one], [], "length mismatch"),
            ([one | {"data": [0xFF]}], [{"name": "a"}], "utf8"),
            ([one | {"data": []}], [{"name": "a"}], "validation"),
        ):
            status, reply, _ = await stack.ask(f"{self.MODEL}/infer", {"id": "1", "inputs": inputs, "outputs": outputs})
            assert (status, reply["error_type"]) == (422, error_type)
        status, *_ = await stack.ask(f"{self.MODEL}/infer", {"id": "1", "inputs": [one | {"data": [256]}]})
        assert status == 422
        await stack.assert_empty()


async def test_every_sequence_takes_a_permit(demo_model: Path) -> None:
    one = {"name": "in", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}
    async with serve(demo_model, max_concurrent_requests=4) as stack:
        for best_of, words in ((2, ""), (3, "Given: 6"), (10**9, "`best_of` must be")):
            parameters = {**FEW, "do_sample": True, "best_of": best_of}
            for path, body in (
                ("/vertex", {"instances": [{"inputs": "a", "parameters": parameters}] * 2}),
                (f"{TestKServe.MODEL}/infer", {"inputs": [one], "parameters": parameters}),
            ):
                status, reply, _ = await stack.ask(path, body)
                assert (status, words in reply.get("error", "")) == (422 if words else 200, True)
        await stack.assert_empty()
