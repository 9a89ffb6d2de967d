"""The stand-in for NVIDIA's tensorrt_llm, in the release whose metadata are on sys.path: see the package trtllm_standin."""

from importlib.metadata import version

from trtllm_standin.package import install

install(".".join(version("tensorrt_llm").split(".")[:2]))
