"""Test of a release: the server is ready and generates a token. Arguments: base URL, and a file with the API key."""

import json
import sys
import urllib.request

url, *key_file = sys.argv[1:]
headers = {"Content-Type": "application/json"}
if key_file:
    with open(key_file[0], encoding="utf-8") as file:
        headers["Authorization"] = "Bearer " + file.read().partition(",")[0].strip()


def answer(path: str, body: bytes | None = None) -> bytes:
    """Return the body of a response. Raises HTTPError for any status but 2xx."""
    with urllib.request.urlopen(urllib.request.Request(url + path, body, headers), timeout=60) as response:
        return response.read()


answer("/health")
generated = json.loads(
    answer("/generate", json.dumps({"inputs": "Hello", "parameters": {"max_new_tokens": 1}}).encode())
)
print("ready, and generated:", generated["generated_text"])
