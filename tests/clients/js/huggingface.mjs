// @huggingface/inference.

import assert from "node:assert/strict";

import { all, answer, place, prompt, question, require, run, url } from "./check.mjs";

const { InferenceClient } = require("@huggingface/inference");
const client = new InferenceClient("", { endpointUrl: url });
const asked = { inputs: prompt, parameters: { max_new_tokens: 20, temperature: 0 } };
const chat = { messages: [{ role: "user", content: question }], max_tokens: 20, temperature: 0 };

await run({
  async text() {
    assert.equal((await client.textGeneration(asked)).generated_text, answer);
  },

  async "streamed text"() {
    // At an endpoint this client asks for a completion, and hands on what it gets.
    const chunks = await all(client.textGenerationStream(asked));
    assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), answer);
    assert.equal(chunks.at(-1).choices[0].finish_reason, "stop");
  },

  async chat() {
    const reply = await client.chatCompletion(chat);
    assert.equal(reply.choices[0].message.content, answer);
    assert.equal(reply.choices[0].finish_reason, "stop");
  },

  async "a streamed chat"() {
    const chunks = await all(client.chatCompletionStream(chat));
    assert.equal(chunks.flatMap((chunk) => chunk.choices.map((choice) => choice.delta.content ?? "")).join(""), answer);
  },

  async tools() {
    const tool = { type: "function", function: { name: "get_weather", description: "The weather", parameters: place } };
    const reply = await client.chatCompletion({ ...chat, max_tokens: 40, tools: [tool], tool_choice: "required" });
    const [call] = reply.choices[0].message.tool_calls;
    assert.equal(call.function.name, "get_weather");
    assert.ok(["Paris", "London"].includes(JSON.parse(call.function.arguments).city));
  },

  async errors() {
    const saying = (text) => (error) => {
      assert.equal(error.httpResponse.status, 400);
      assert.ok(error.httpResponse.body.error.message.includes(text));
      return true;
    };
    const refused = { inputs: prompt, parameters: { temperature: -1 } };
    await assert.rejects(client.textGeneration(refused), saying("`temperature` must be >= 0.0"));
    await assert.rejects(client.chatCompletion({ ...chat, messages: [] }), saying("`messages` cannot be empty"));
  },
});
