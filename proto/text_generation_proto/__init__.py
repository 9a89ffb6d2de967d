"""Code shared by launcher, router and shard: the wire contract, settings, exit codes, logging, lifeline and sockets."""
