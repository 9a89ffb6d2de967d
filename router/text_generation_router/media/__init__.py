"""Images of requests: fetched, measured, and given tokens in prompts. Nothing here decodes them; the shard does."""
