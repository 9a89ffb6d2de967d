"""A stand-in for NVIDIA's tensorrt_llm: an engine that repeats its prompts, with the traps of the real library.

One package imitates all releases. `releases/` beside it holds the metadata of each, and the metadata on sys.path choose the release.
`signatures-1.2.json` and `signatures-1.3.json` record names and signatures with their sources and commits; the classes of the
package are built from them (`recorded`, `package`). `release` is the table of the differences in behaviour. No model is computed.

Comments name the source of each trap. Files are those of the repository NVIDIA/TensorRT-LLM unless another one is named:

    result.py, llm.py, sampling_params.py    1.2.1, as rendered in the documentation branch (gh-pages, 1.2.1/_modules)
    py_executor.py, base_worker.py, proxy.py, executor.py, llmapi/utils.py    commits near 1.2.1
    "main"                                   the same files in 2026, before 1.3

Only what the tests of the shard need is imitated: streaming, log-probabilities, stop tokens, guides of JSON and regular expressions.
Sampling parameters that would change the tokens are recorded and otherwise ignored; no other capacity policy than
GUARANTEED_NO_EVICT can be chosen; no engines are built.

Layers, from the caller down: `llm` (checks and submits), `executor` (holds requests), `results` (items as the caller reads them),
`engine` (the loop, in its own thread), `sequences` (the next token). `settings` lists the environment variables that set the pace
and cause failures; `inspection` reports to a test in another process what arrived.
"""
