"""HTTP itself, in no dialect: bodies, keys, request ids, server-sent events, how a failure is told, what is logged."""
