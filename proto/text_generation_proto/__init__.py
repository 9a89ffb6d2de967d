"""What the processes share: the wire contract, how a process starts, logs and stops."""
