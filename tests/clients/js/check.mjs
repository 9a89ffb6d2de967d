// What the scripts here share: the packages, wherever they are installed; the server; the one question.

import { createRequire } from "node:module";

const { NODE_HOME, SERVER_URL, MODEL_ID, PROMPT_TOKENS } = process.env;

// Packages are looked for in NODE_HOME, not beside this file.
export const require = createRequire(`${NODE_HOME}/`);
export const url = SERVER_URL;
export const model = MODEL_ID;
export const promptTokens = Number(PROMPT_TOKENS);

export const question = "What is the capital of France? Answer in one English sentence.";
export const prompt =
  "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n" +
  `<|im_start|>user\n${question}<|im_end|>\n<|im_start|>assistant\n`;
export const answer = "The capital of France is Paris.";

export const place = {
  type: "object",
  properties: { city: { enum: ["Paris", "London"] } },
  required: ["city"],
  additionalProperties: false,
};

/** All that a stream brings. */
export async function all(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

/** Runs checks one after the other, says which failed, and ends the process with 1 if any did. */
export async function run(checks) {
  let failed = 0;
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
    } catch (error) {
      failed += 1;
      console.error(`${name}: ${error.stack ?? error}`);
    }
  }
  console.log(`${Object.keys(checks).length - failed} passed, ${failed} failed`);
  process.exit(failed ? 1 : 0);
}
