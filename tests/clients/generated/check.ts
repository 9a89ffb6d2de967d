// Chat with the client that openapi-generator wrote in TypeScript. Arguments: the server, the question.
import { ChatChunkFromJSON, Configuration, OpenAIApi } from "./client";

async function main(): Promise<void> {
  const [url, question] = process.argv.slice(2);
  const api = new OpenAIApi(new Configuration({ basePath: url }));
  const chatBody = { messages: [{ role: "user", content: question }], temperature: 0, maxTokens: 16 };
  const chat = await api.chatCompletions({ chatBody });
  console.log(chat.choices[0].message.content);
  const reply = await api.chatCompletionsRaw({ chatBody: { ...chatBody, stream: true } });
  const lines = (await reply.raw.text()).split("\n").filter((line) => line.startsWith("data: {"));
  const chunks = lines.map((line) => ChatChunkFromJSON(JSON.parse(line.slice(6))));
  console.log(chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""));
}

main();
