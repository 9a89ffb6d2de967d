// openai for JavaScript.

import assert from "node:assert/strict";

import { all, answer, model, place, prompt, promptTokens, question, require, run, url } from "./check.mjs";

const OpenAI = require("openai").default;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "-", maxRetries: 0 });
const greedy = { model: "tgi", messages: [{ role: "user", content: question }], temperature: 0, max_tokens: 20 };
const weather = { type: "function", function: { name: "get_weather", parameters: place, strict: true } };
const city = { type: "json_schema", json_schema: { name: "city", schema: place, strict: true } };

await run({
  async chat() {
    const reply = await client.chat.completions.create(greedy);
    assert.equal(reply.choices[0].message.content, answer);
    assert.equal(reply.choices[0].finish_reason, "stop");
    const { prompt_tokens_details, ...usage } = reply.usage;
    assert.ok(prompt_tokens_details.cached_tokens < promptTokens);
    assert.deepEqual(usage, {
      prompt_tokens: promptTokens,
      completion_tokens: 8,
      completion_tokens_details: { reasoning_tokens: 0 },
      total_tokens: promptTokens + 8,
    });
    assert.ok(reply._request_id);
  },

  async "a streamed chat"() {
    const chunks = await all(
      await client.chat.completions.create({ ...greedy, stream: true, stream_options: { include_usage: true } }),
    );
    assert.equal(chunks.flatMap((chunk) => chunk.choices.map((choice) => choice.delta.content ?? "")).join(""), answer);
    assert.equal(chunks.at(-2).choices[0].finish_reason, "stop");
    assert.deepEqual(chunks.at(-1).choices, []);
    assert.equal(chunks.at(-1).usage.completion_tokens, 8);
  },

  async "the stream helper"() {
    const stream = client.chat.completions.stream(greedy);
    let text = "";
    stream.on("content", (delta) => (text += delta));
    assert.equal(await stream.finalContent(), answer);
    assert.equal(text, answer);
  },

  async "several answers with log-probabilities"() {
    const reply = await client.chat.completions.create({ ...greedy, n: 2, logprobs: true, top_logprobs: 2 });
    assert.equal(reply.choices.length, 2);
    for (const choice of reply.choices) {
      const tokens = choice.logprobs.content;
      assert.equal(tokens.map((token) => token.token).join(""), answer);
      assert.ok(tokens.every((token) => token.logprob <= 0 && token.top_logprobs[0].token === token.token));
    }
  },

  async tools() {
    const reply = await client.chat.completions.create({ ...greedy, tools: [weather], tool_choice: "required" });
    assert.equal(reply.choices[0].finish_reason, "tool_calls");
    const [call] = reply.choices[0].message.tool_calls;
    assert.equal(call.function.name, "get_weather");
    assert.ok(["Paris", "London"].includes(JSON.parse(call.function.arguments).city));
  },

  async "streamed tools"() {
    const stream = client.chat.completions.stream({ ...greedy, tools: [weather], tool_choice: "required" });
    const completion = await stream.finalChatCompletion();
    assert.equal(completion.choices[0].finish_reason, "tool_calls");
    const [call] = completion.choices[0].message.tool_calls;
    assert.ok(call.id);
    assert.equal(call.function.name, "get_weather");
    assert.ok(["Paris", "London"].includes(call.function.parsed_arguments.city));
  },

  async "parse with a JSON schema"() {
    const reply = await client.chat.completions.parse({ ...greedy, response_format: city });
    assert.deepEqual(Object.keys(reply.choices[0].message.parsed), ["city"]);
    assert.ok(["Paris", "London"].includes(reply.choices[0].message.parsed.city));
  },

  async "completions with echo"() {
    const reply = await client.completions.create({
      model: "tgi",
      prompt,
      echo: true,
      logprobs: 1,
      max_tokens: 20,
      temperature: 0,
    });
    const [choice] = reply.choices;
    assert.equal(choice.text, prompt + answer);
    assert.equal(choice.logprobs.tokens.join(""), `${prompt + answer}<|im_end|>`);
    assert.equal(choice.logprobs.token_logprobs[0], null);
    const chunks = await all(
      await client.completions.create({ model: "tgi", prompt, max_tokens: 20, temperature: 0, stream: true }),
    );
    assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), answer);
  },

  async models() {
    assert.deepEqual((await all(client.models.list())).map((one) => one.id), [model.split("/").at(-1), model]);
    assert.equal((await client.models.retrieve(model)).id, model);
    await assert.rejects(client.models.retrieve("gpt-5"), OpenAI.NotFoundError);
  },

  async errors() {
    await assert.rejects(client.chat.completions.create({ ...greedy, temperature: -1 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.type, "invalid_request_error");
      assert.match(error.message, /`temperature` must be >= 0.0/);
      return true;
    });
    // More answers than there are places: to try again would be no use.
    await assert.rejects(client.chat.completions.create({ ...greedy, n: 9 }), OpenAI.BadRequestError);
  },

  async responses() {
    const asked = { model: "tgi", input: question, temperature: 0, max_output_tokens: 20 };
    const reply = await client.responses.create(asked);
    assert.equal(reply.status, "completed");
    assert.equal(reply.output_text, answer);
    assert.deepEqual([reply.usage.input_tokens, reply.usage.output_tokens], [promptTokens, 8]);
  },

  async "streamed responses"() {
    const asked = { model: "tgi", input: question, temperature: 0, max_output_tokens: 20 };
    const events = await all(await client.responses.create({ ...asked, stream: true }));
    assert.equal(events[0].type, "response.created");
    assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
    const deltas = events.filter((event) => event.type === "response.output_text.delta");
    assert.equal(deltas.map((event) => event.delta).join(""), answer);
    assert.equal(events.at(-1).type, "response.completed");
    assert.equal((await client.responses.stream(asked).finalResponse()).output_text, answer);
  },

  async "responses in a form and with tools"() {
    const asked = { model: "tgi", input: question, temperature: 0, max_output_tokens: 40 };
    const format = { type: "json_schema", name: "city", schema: place, strict: true };
    const parsed = await client.responses.parse({ ...asked, text: { format } });
    assert.ok(["Paris", "London"].includes(parsed.output_parsed.city));
    const tool = { type: "function", name: "get_weather", parameters: place, strict: true };
    const reply = await client.responses.create({ ...asked, tools: [tool], tool_choice: "required" });
    const [call] = reply.output.filter((item) => item.type === "function_call");
    assert.equal(call.name, "get_weather");
    assert.ok(["Paris", "London"].includes(JSON.parse(call.arguments).city));
  },
});
