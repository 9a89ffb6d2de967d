"""HTTP without any dialect's details: bodies, callers, errors, server-sent events, records, routes."""
