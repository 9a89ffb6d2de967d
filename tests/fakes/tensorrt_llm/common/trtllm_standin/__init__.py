"""What the two stand-ins for NVIDIA's tensorrt_llm have in common: an engine that repeats its prompts, with the real traps.

`v1_2/` and `v1_3/` beside this folder each hold a package `tensorrt_llm` for PYTHONPATH, with the signatures of that
release; `signatures-1.2.json` and `signatures-1.3.json` say where each of those was read. Nothing here computes a model.
What is imitated is how the library behaves towards its caller. Where a behaviour is odd, the comment beside it names
where it was read, in repository NVIDIA/TensorRT-LLM unless another is named:

    result.py, llm.py, sampling_params.py    1.2.1, as rendered in the documentation branch (gh-pages, 1.2.1/_modules)
    py_executor.py, base_worker.py, proxy.py, executor.py, llmapi/utils.py    of commits near 1.2.1
    "main"                                   the same files in 2026, towards 1.3

What is not imitated is refused with NotImplementedError, never ignored: LoRA, disaggregated serving, beam search with a
width above 1, any capacity policy but GUARANTEED_NO_EVICT, building engines.

The layers, from the caller down: `llm` (checks and submits), `executor` (hands requests over, keeps results),
`results` (folds what arrives), `engine` (the loop, in a thread of its own), `scheduler` (who runs), `sequences` and
`choice` (which token is next). `settings` names the environment variables that set the pace and break things;
`inspection` tells a test in another process what arrived.
"""
