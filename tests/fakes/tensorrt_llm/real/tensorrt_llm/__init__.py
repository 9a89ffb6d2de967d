"""The package `tensorrt_llm` of a release's sources, without the C++ library: see the package trtllm_real."""

from importlib.metadata import version

from trtllm_real.finder import install, look_up

__version__ = version("tensorrt_llm")
__path__ = install(__path__)


def __getattr__(name: str) -> object:
    return look_up(__name__, name)
