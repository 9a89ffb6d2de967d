"""NVIDIA's own Python code between caller and engine, over the stand-in's engine in place of its PyTorch engine.

The code is the folder `tensorrt_llm` of a release's sources, in the folder that TRTLLM_REAL_SOURCE names. It is read, never copied
here. From it come LLM and its arguments, SamplingParams, the proxy, the queues between processes, the worker, and the results with
their assertions. Not from it: schedulers, KV cache, samplers and everything in C++ (`seam` lists what is replaced, and why).

Layers: `finder` answers imports, `seam` is the table of replacements, `bindings` has the classes that the library has in C++,
`processes` starts worker processes without MPI, `py_executor` is the engine, `recorded_args` stands for llm_args.py if the sources lack
it. The package `tensorrt_llm` is in the folder `real` beside this one; sys.path needs both, `real` first.
"""
