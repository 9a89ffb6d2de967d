"""The wire between router and shard: messages, the values in them and their conversion, a client."""
