"""Examples of request bodies for the OpenAPI document: small, with a bounded answer. Most are README's."""

from typing import Any

_QUESTION = "Tell me the capital of France in one sentence."
_MESSAGES = [{"role": "user", "content": _QUESTION}]
_PROMPT = f"<|im_start|>user\n{_QUESTION}<|im_end|>\n<|im_start|>assistant\n"
_GENERATE = {"inputs": _PROMPT, "parameters": {"max_new_tokens": 32}}
_CHAT = {"model": "tgi", "messages": _MESSAGES, "temperature": 0, "max_tokens": 32}

EXAMPLES: dict[str, dict[str, Any]] = {
    "generate": _GENERATE,
    "compat_generate": _GENERATE,
    "generate_stream": {"inputs": "1, 2, 3, 4,", "parameters": {"max_new_tokens": 3, "details": True}},
    "tokenize": {"inputs": _QUESTION},
    "detokenize": {"ids": [1, 2, 3]},
    "chat_tokenize": {"messages": _MESSAGES},
    "chat_completions": _CHAT,
    "completions": {"model": "tgi", "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 6},
    "load_lora_adapter": {"lora_name": "sql", "lora_path": "sql-v2"},
    "unload_lora_adapter": {"lora_name": "sql"},
    "create_response": {"model": "tgi", "input": _MESSAGES, "temperature": 0, "max_output_tokens": 32},
    "create_message": _CHAT,
    "count_message_tokens": {"model": "tgi", "messages": _MESSAGES},
    "invoke": _GENERATE,
    "predict": {"instances": [_GENERATE]},
    "predict_route": {"instances": [_GENERATE]},
    "kserve_infer": {
        "inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["1, 2, 3, 4,"]}],
        "parameters": {"max_new_tokens": 6},
    },
}
"""By operation id."""
