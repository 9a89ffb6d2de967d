"""OpenAI's routes: chats, completions, responses."""
