"""Parts that the processes share: settings and command line, logs, tracing, heartbeats, signals, secrets."""
