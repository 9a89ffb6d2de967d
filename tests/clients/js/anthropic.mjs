// @anthropic-ai/sdk.

import assert from "node:assert/strict";

import { answer, place, promptTokens, question, require, run, url } from "./check.mjs";

const Anthropic = require("@anthropic-ai/sdk").default;
const client = new Anthropic({ baseURL: url, apiKey: "-", maxRetries: 0 });
const greedy = { model: "tgi", messages: [{ role: "user", content: question }], temperature: 0, max_tokens: 40 };
const weather = { name: "get_weather", description: "The weather of a city", input_schema: place };

await run({
  async message() {
    const message = await client.messages.create(greedy);
    assert.deepEqual(message.content.map((block) => [block.type, block.text]), [["text", answer]]);
    assert.equal(message.stop_reason, "end_turn");
    const { input_tokens, cache_read_input_tokens, output_tokens } = message.usage;
    assert.deepEqual([input_tokens + (cache_read_input_tokens ?? 0), output_tokens], [promptTokens, 8]);
  },

  async "a streamed message"() {
    const stream = client.messages.stream(greedy);
    let text = "";
    stream.on("text", (delta) => (text += delta));
    const message = await stream.finalMessage();
    assert.equal(text, answer);
    assert.equal(message.content[0].text, answer);
    assert.equal(message.usage.output_tokens, 8);
  },

  async tools() {
    const arguments_ = { ...greedy, tools: [weather], tool_choice: { type: "any" } };
    for (const message of [
      await client.messages.create(arguments_),
      await client.messages.stream(arguments_).finalMessage(),
    ]) {
      assert.equal(message.stop_reason, "tool_use");
      const [use] = message.content.filter((block) => block.type === "tool_use");
      assert.equal(use.name, "get_weather");
      assert.ok(["Paris", "London"].includes(use.input.city));
    }
  },

  async "count tokens"() {
    const { model, messages } = greedy;
    assert.equal((await client.messages.countTokens({ model, messages })).input_tokens, promptTokens);
  },

  async errors() {
    await assert.rejects(client.messages.create({ ...greedy, messages: [] }), (error) => {
      assert.ok(error instanceof Anthropic.APIError);
      assert.equal(error.error.error.type, "invalid_request_error");
      return true;
    });
  },
});
