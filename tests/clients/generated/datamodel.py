"""Chat with the models that datamodel-code-generator wrote. Arguments: their module's folder, the server, the question."""

import sys

import httpx

folder, url, question = sys.argv[1:]
sys.path.insert(0, folder)
import models  # noqa: E402 - it was generated

body = models.ChatBody(messages=[models.Message(role="user", content=question)], temperature=0, max_tokens=16)


def post(body: models.ChatBody) -> str:
    headers = {"content-type": "application/json"}
    return httpx.post(f"{url}/v1/chat/completions", content=body.model_dump_json(), headers=headers, timeout=60).text


print(models.ChatAnswer.model_validate_json(post(body)).choices[0].message.content)
lines = post(body.model_copy(update={"stream": True})).splitlines()
chunks = [models.ChatChunk.model_validate_json(line[6:]) for line in lines if line.startswith("data: {")]
print("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
