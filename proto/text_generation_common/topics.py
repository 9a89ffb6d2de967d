"""The topics by which --help and docs/flags.md list the settings."""

from enum import Enum


class Topic(Enum):
    """A title, in the order of the lists. The `topics` of a settings class name its settings."""

    ROUTER = "Router alone"
    SHARD = "Shard alone"
    MODEL = "Model"
    REPLICAS = "Replicas and shards"
    ACCESS = "Access to the shards"
    HTTP = "HTTP"
    REQUESTS = "Limits of a request"
    QUEUE = "Queue and overload"
    BATCHING = "Batching and KV cache"
    TENSORRT_LLM = "TensorRT-LLM"
    AUDITS = "Audits"
    TRACES = "Traces and metrics"
    LOGS = "Logs and debugging"
    ECHO = "Echo engine (tests)"
