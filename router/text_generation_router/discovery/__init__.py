"""Sources of members: the addresses of shards or of routers, as they come and go."""
