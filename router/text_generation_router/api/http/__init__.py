"""Parts of HTTP that the dialects share: callers, keys, dialects of errors, records, routes, types of fields."""
