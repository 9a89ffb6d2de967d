"""The part of the API that all dialects share: options, admission, serving, chats, headers."""
