"""Test of a release: the server is ready and generates a token. Arguments: base URL, and perhaps a file with API keys."""

import json
import sys
import tomllib
import urllib.request
from pathlib import Path

url, *files = sys.argv[1:]
headers = {"Content-Type": "application/json"}
if files:
    keys = [entry["key"] for entry in tomllib.loads(Path(files[0]).read_text("utf-8"))["keys"] if "key" in entry]
    if not keys:
        sys.exit(f"{files[0]} has digests of keys only: the test needs a key")
    headers["Authorization"] = f"Bearer {keys[0]}"


def answer(path: str, body: object = None) -> bytes:
    """Return the body of a response. Raises HTTPError for any status but 2xx."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=60) as response:
        return response.read()


answer("/health")
generated = json.loads(answer("/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 1}}))
print("ready, and generated:", generated["generated_text"])
