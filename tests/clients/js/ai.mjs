// The AI SDK ("ai") over OpenAI's chat and Responses and Anthropic's Messages.

import assert from "node:assert/strict";

import { all, answer, place, question, require, run, url } from "./check.mjs";

const { generateText, jsonSchema, Output, streamText, tool } = require("ai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");

const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "-" });
const models = {
  chat: createOpenAICompatible({ name: "tgi", baseURL: `${url}/v1`, supportsStructuredOutputs: true })("tgi"),
  responses: openai.responses("tgi"),
  messages: createAnthropic({ baseURL: `${url}/v1`, apiKey: "-" })("tgi"),
};
const cities = ["Paris", "London"];
const weather = tool({ description: "The weather of a city", inputSchema: jsonSchema(place), strict: true });

const checks = {};
for (const [kind, model] of Object.entries(models)) {
  const asked = { model, prompt: question, temperature: 0, maxOutputTokens: 60, maxRetries: 0 };

  checks[`${kind}: text, whole and streamed`] = async () => {
    assert.equal((await generateText(asked)).text, answer);
    const streamed = streamText(asked);
    assert.equal((await all(streamed.textStream)).join(""), answer);
    assert.equal(await streamed.finishReason, "stop");
  };

  checks[`${kind}: a tool`] = async () => {
    const { toolCalls } = await generateText({ ...asked, tools: { weather }, toolChoice: "required" });
    assert.equal(toolCalls[0].toolName, "weather");
    assert.ok(cities.includes(toolCalls[0].input.city));
  };

  checks[`${kind}: an object, also with tools`] = async () => {
    const output = Output.object({ schema: jsonSchema(place) });
    assert.ok(cities.includes((await generateText({ ...asked, output })).output.city));
    const reply = await generateText({ ...asked, output, tools: { weather } });
    const city = reply.toolCalls.length ? reply.toolCalls[0].input.city : reply.output.city;
    assert.ok(cities.includes(city));
  };
}

await run(checks);
