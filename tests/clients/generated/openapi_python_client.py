"""Chat with the client that openapi-python-client wrote. Arguments: its folder, the server, the question."""

import json
import sys

folder, url, question = sys.argv[1:]
sys.path.insert(0, folder)
from text_generation_inference_client import Client  # noqa: E402 - it was generated
from text_generation_inference_client.api.open_ai import chat_completions  # noqa: E402
from text_generation_inference_client.api.tgi import generate_stream  # noqa: E402
from text_generation_inference_client.models import (  # noqa: E402
    ChatAnswer,
    ChatBody,
    GenerateBody,
    GenerateParameters,
    Message,
    StreamEvent,
)

with Client(base_url=url) as client:
    body = ChatBody(messages=[Message(role="user", content=question)], temperature=0, max_tokens=16)
    answer = chat_completions.sync(client=client, body=body)
    assert isinstance(answer, ChatAnswer)
    print(answer.choices[0].message.content)
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    stream = generate_stream.sync(
        client=client, body=GenerateBody(inputs=prompt, parameters=GenerateParameters(max_new_tokens=16))
    )
    assert isinstance(stream, str)
    events = [StreamEvent.from_dict(json.loads(line[5:])) for line in stream.splitlines() if line]
    print("".join(event.token.text for event in events if not event.token.special))
