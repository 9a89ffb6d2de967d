"""Chat with the client that openapi-generator wrote in Python. Arguments: its folder, the server, the question."""

import json
import sys

folder, url, question = sys.argv[1:]
sys.path.insert(0, folder)
import openapi_client as client  # noqa: E402 - it was generated

api = client.OpenAIApi(client.ApiClient(client.Configuration(host=url)))
asked = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 16}
print(api.chat_completions(client.ChatBody.from_dict(asked)).choices[0].message.content)
reply = api.chat_completions_without_preload_content(client.ChatBody.from_dict(asked | {"stream": True}))
lines = [line for line in reply.read().decode().splitlines() if line.startswith("data: {")]
chunks = [client.ChatChunk.from_dict(json.loads(line.removeprefix("data: "))) for line in lines]
print("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
