"""Generate docs/flags.md from the settings of launcher, router and shard, docs/limits.md from limits.txt, and docs/models.md
from the tables of the parity tests.

The flags that the values of the Helm chart may set are generated too, in the chart's values.schema.json.

Usage: python scripts/generate_docs.py
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import sys
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from text_generation_bench.load.settings import FLAGS
from text_generation_common.exit_codes import ExitCode
from text_generation_common.options import Option, options_by_topic
from text_generation_common.settings import Topic
from text_generation_launcher.config import LauncherConfig
from text_generation_router.config import RouterConfig
from text_generation_shard.config import ShardConfig
from text_generation_shard.engines.torch.models.native.families import FAMILIES
from text_generation_shard.engines.torch.models.native.wrappers import WRAPPERS

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / "scripts" / "limits.txt"
CHART = ROOT / "deploy" / "helm" / "text-generation"

NOT_IN_FLAGS = (
    "model_id revision port management_port parts shards peers peer_name shard_hostname shard_tcp_port shard_uds_path health_port "
    "insecure shard_token shard_token_file shard_tls_cert shard_tls_key shard_tls_ca shard_tls_name api_key api_key_file api_keys_file "
    "sharded env print_config nodes node_rank leader_address places"
)
"""Settings that the chart decides, or that have a value of their own in it."""

INTRODUCTION = """\
# Flags

Generated from the settings by `make docs`; do not edit.

A setting is given as a flag, else by an environment variable, else it has its default; an empty variable counts as unset.
`text-generation-launcher` passes the settings of the first tables on to the router and the shards that it starts.
"""

EXIT_CODES = """\
## Exit codes

A process that was killed by a signal has the exit code that the operating system gives it.

| code | name | meaning |
|---|---|---|
"""


def flags_page() -> str:
    """Return the text of docs/flags.md."""
    parts = [INTRODUCTION]
    parts += [_table(topic.value, options.values()) for topic, options in options_by_topic(LauncherConfig).items()]
    for topic, config in ((Topic.ROUTER, RouterConfig), (Topic.SHARD, ShardConfig)):
        found = {name: option for options in options_by_topic(config).values() for name, option in options.items()}
        own = [option for name, option in found.items() if name not in LauncherConfig.model_fields]
        program = config.model_config.get("cli_prog_name")
        lead = f"Additional flags of `{program}`, which the launcher sets for the processes it starts.\n\n"
        parts.append(_table(topic.value, own, lead))
    parts.append(_benchmark_tables())
    rows = [
        f"| {code.value} | `{code.name}` | {text} |\n" for code, text in zip(ExitCode, _exit_code_texts(), strict=True)
    ]
    parts.append(EXIT_CODES + "".join(rows))
    return "\n".join(parts)


def _benchmark_tables() -> str:
    """Return the tables of text-generation-benchmark, one for each topic."""
    tables = []
    for topic, add_flags in FLAGS.items():
        rows = "".join(map(_benchmark_row, _actions(add_flags)))
        tables.append(f"**{topic}**\n\n| flag | meaning |\n|---|---|\n{rows}")
    return "## Benchmark\n\nFlags of `text-generation-benchmark`: [benchmark.md](benchmark.md).\n\n" + "\n".join(tables)


def _actions(add_flags: Callable[[Any], None]) -> list[argparse.Action]:
    parser, actions = argparse.ArgumentParser(), []

    def add(*names: str, **settings: Any) -> None:  # noqa: ANN401 - those of add_argument
        actions.append(parser.add_argument(*names, **settings))

    add_flags(add)
    return actions


def _benchmark_row(action: argparse.Action) -> str:
    meaning = ((action.help or "") % vars(action)).replace("|", "\\|")
    if action.choices and not all(f"{choice}:" in meaning for choice in action.choices):
        meaning += f". One of {', '.join(f'`{choice}`' for choice in action.choices)}"
    return f"| {', '.join(f'`{flag}`' for flag in action.option_strings)} | {meaning} |\n"


def _table(title: str, options: Iterable[Option], lead: str = "") -> str:
    rows = "".join(map(_row, options))
    return f"## {title}\n\n{lead}| flag | environment | default | meaning |\n|---|---|---|---|\n{rows}"


def _row(option: Option) -> str:
    flag = f"`{option.flag}`" + (f", `{option.shortcut}`" if option.shortcut else "")
    meaning = option.meaning
    if option.choices and not all(choice in meaning for choice in option.choices):
        meaning += f" One of {', '.join(f'`{choice}`' for choice in option.choices)}."
    variable, default = (f"`{text}`" if text else "" for text in (option.variable, option.default))
    return f"| {flag} | {variable} | {default} | {meaning} |\n"


def _exit_code_texts() -> list[str]:
    """Return the docstrings of the members of ExitCode."""
    (definition,) = ast.parse(inspect.getsource(ExitCode)).body
    assert isinstance(definition, ast.ClassDef)
    constants = [node.value for node in definition.body[1:] if isinstance(node, ast.Expr)]
    return [" ".join(str(node.value).split()) for node in constants if isinstance(node, ast.Constant)]


LIMITS_INTRODUCTION = """\
# Limits

Generated from `scripts/limits.txt` and the code by `make docs`; do not edit.

Every limit on what a client, a process or a file may take, with the answer beyond it and the test that holds it. A limit with
a flag is a setting; the others are constants. Where the answer is 422, OpenAI's and Anthropic's routes answer 400.
"""


def limits_page() -> str:
    """Return the text of docs/limits.md. Raises ValueError for a limit whose flag, constant or test does not exist."""
    parts = [LIMITS_INTRODUCTION]
    for line in LIMITS.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            parts.append(f"\n{line}\n\n| limit | default | flag | answer beyond it | test |\n|---|---|---|---|---|\n")
        elif line and not line.startswith("#"):
            parts.append(_limit_row(*(cell.strip() for cell in line.split("|"))))
    return "".join(parts)


def _limit_row(limit: str, source: str, unit: str, answer: str, test: str) -> str:
    flag = ""
    if source.startswith("--"):
        flag = f"`{source}`"
        field = LauncherConfig.model_fields[source.removeprefix("--").replace("-", "_")]
        value = _text(field.get_default(call_default_factory=True, validated_data={}))
    else:
        value = _text(_constant(source))
    file, _, name = test.partition("::")
    if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8"):
        raise ValueError(f"no test {test}")
    default = f"{value} {unit}".strip() if value else "–"
    return f"| {limit} | {default} | {flag} | {answer} | `{test}` |\n"


def _constant(source: str) -> object:
    """Return the value of `module:NAME` or `module:Class.attribute`."""
    module, _, path = source.partition(":")
    if not module.startswith("text_generation_"):
        module = f"text_generation_router.{module}"
    value: object = importlib.import_module(module)
    for name in path.split("."):
        fields = getattr(value, "__dataclass_fields__", {})
        value = fields[name].default if name in fields else getattr(value, name)
    return value


def _text(value: object) -> str:
    """Return a number with its groups of digits; nothing for a limit that is off or derived from the model."""
    if not value:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}" if isinstance(value, float) else str(value)


MODELS_INTRODUCTION = """\
# Models

Generated from the tables of the parity tests by `make docs`; do not edit.

A model is a Hugging Face folder with config.json and safetensors; `text-generation-launcher convert` makes one of a GGUF file
([start.md](start.md#convert-a-gguf-file)). The torch engine computes the first table's families itself,
on CPU and NVIDIA GPUs. It runs other decoders by Hugging Face's modeling code, with its own scheduler, paged KV cache and
sampling, also a model of the first table with a value that the engine does not know, such as another rotation or activation;
`--model-impl transformers` runs any model that way, `native` none. A model that neither can serve is refused at the
start in one line. [quantization.md](quantization.md) lists the formats of quantized weights,
[tensorrt-llm.md](tensorrt-llm.md) the models of the other engine.
"""

NATIVE_INTRODUCTION = """\
## Native

Checked by `tests/unit/shard/torch/test_families.py`: a random checkpoint of each case, in float32 on a CPU, gives the greedy
tokens and prompt logprobs of transformers; prompts alone, together, in chunks, preempted, and by the operations of a GPU. The
defaults of each config class are compared with those of transformers (`test_model_config.py`).

| `model_type` | models | architecture | cases beside the plain one |
|---|---|---|---|
"""

WRAPPERS_INTRODUCTION = """\

With `longrope` the native code uses the long factors at every length, as vLLM does, if the context of the config is longer than
the original one; transformers uses the short ones for shorter texts. `--model-impl transformers` serves the original length only.

Multi-head latent attention (DeepSeek and its relatives) keeps the compressed row of a token, not the keys and values of its heads:
[gpu.md](gpu.md#memory-of-the-kv-cache). `kimi_k2` is `deepseek_v3`. Layers for the prediction of several
tokens are loaded for [drafts](speculation.md#predicted-tokens).
Other families with latent attention (A.X K1, Kimi Linear) run by transformers, with expanded keys and values.

Layers with a state (gated delta nets, Mamba 2, short convolutions) keep one for each sequence: the last inputs of the convolution, in
the dtype of the activations, and the sums of a recurrence, in that of `--mamba-ssm-cache-dtype`. These states are a group of the cache:
prefixes are reused from [checkpoints](scheduling.md#checkpoints-of-states), and memory is divided between states and KV blocks
([gpu.md](gpu.md#memory-of-the-kv-cache)), also where transformers runs such a model. `--num-shard` divides delta nets and Mamba 2 by
groups of heads; transformers runs OLMo Hybrid, models with short convolutions, and those whose groups of heads the ranks cannot share
evenly (Falcon-H1 without norms alone shares one group among ranks).

## Images

These models of text and images are served with the native text part that their config names. Most take images: the vision tower,
the projector and the image processor are those of transformers, on the engine's device. Needed are the packages
transformers and Pillow, the extra `transformers`, and the folder's preprocessor_config.json or processor_config.json.
Otherwise the text part alone is served, and the log says why (`the model takes no images`); so it is with `--max-batch-image-tokens 0`,
which saves the memory of the tower. As in transformers, the processor computes with torchvision if that is installed, in half of the
time, else with Pillow and NumPy. With `--num-shard`, rank 0 alone has the tower, and broadcasts the encoded images. Text parts that transformers
runs take images where these are embeddings and nothing more: `llava`, `llava_next`, `llava_onevision`, `mistral3`, `smolvlm`,
`idefics3`, `internvl`, and `llama4`, which has no other.

PNG, JPEG, WebP and GIF (first frame) are decoded in confined processes beside the shard, picture by picture in turns of the prompts. They
are encoded beside the steps, on a stream of the device of their own: those that wait together, up to the pixels of one of 2,048 × 2,048, so
one by one if the model gives all images that size. A chunk that reaches an image waits for it; sequences that decode wait too if there
is no other chunk, and the image has at most `--max-batch-image-tokens` tokens. As many tokens of images are encoded ahead of the chunks
that need them. Encoded images are kept by digest, up to 1 GiB on a GPU and 256 MiB on a CPU: a second turn with the same picture encodes nothing.
Prefixes are reused as those of texts. `text-generation-launcher check` counts the tower and the kept images in `memory.images`.

On one H200, 32 streams of one picture of 1,000 × 1,000 pixels and 128 new tokens each, twice, on a model of the shape of Qwen3-VL-8B, get
1,928 and 1,932 tokens/s, and 4,088 and 4,131 in a second turn with the same pictures; vLLM 0.26, in turns, 1,777 and 1,584, and 3,912 and
3,799 (`python -m text_generation_bench.images --url … --rounds 2`; random weights, new pictures in each run). The first token comes
after 360 to 510 ms in the median, vLLM's after 1,030 to 1,190; the last of 32 after 1.4 s, vLLM's after 1.5 to 1.8 s.

In Gemma 3, and in layers with a window of Gemma 4, the tokens of an image attend to one another in both directions. Such an image is
computed in one step: chunks that end in it wait for its end, and `--max-batch-prefill-tokens` must be at least its tokens (256 in
Gemma 3, up to `max_soft_tokens` in Gemma 4), or the request is refused. On a GPU these steps attend by the engine's own kernel. The small
models of Gemma 4 with inputs of each layer (E2B, E4B) run by transformers, without images.

As the processors of transformers do, the engine takes no crops in Gemma 3 whatever its `do_pan_and_scan`, divides every image of InternVL
into tiles, and sizes images of Mistral 3 by the squares of patches that become one token. Without torchvision, the processor of Llama 4 is
our own, because that of transformers needs it: the same tiles, and pixels that differ by at most two of 256 levels, as those of Pillow do.

Checked by `tests/unit/shard/torch/test_images.py`: a random checkpoint of each family that takes images gives the logprobs of
transformers (relative error at most 1e-5, float32, CPU) with up to three pictures of odd sizes; chunk by chunk, preempted, in a second
turn, and by the operations of a GPU.

| `model_type` | models | architecture | default of the text part | images of a prompt |
|---|---|---|---|---|
"""

TRANSFORMERS_INTRODUCTION = """\

## By transformers

Needs the packages transformers, 5.23 or newer, and accelerate; the extra `transformers` and the images have both. A check at the start compares the engine's attention with that of transformers and refuses a
model that it would compute wrongly. Served is any decoder that passes; checked by `tests/unit/shard/torch/test_transformers.py`
are these: a random checkpoint gives the logprobs of transformers' eager attention (relative error at most 1e-5, float32, CPU) and
its greedy tokens; alone, together, in chunks, preempted, with a reused prefix.

On a GPU, the start compares each layer with that of the native decoder, in float32 on random input. If all layers compute the
same (a norm, attention and an addition, then a norm, an MLP and an addition; outputs may be normed; an MLP or experts of another
kind stay those of transformers), the model runs in the native decoder with the weights of the library, as fast as a native one.
Else the log says why (`the layers run in transformers`), and the library's layers run with the engine's attention and cache.

* `--num-shard` divides a model by the tensor-parallel plan of its config; one without a plan, or whose heads or sizes cannot be
  divided, is refused in one line. Checked on two and four CPU processes (`test_tensor_parallel_engine.py`).
* Layers with a state bound the number of sequences as in the native decoder. Decode steps have no CUDA graph with them, and
  prompts are computed one after the other.
* On a GPU, sequences end with the first chunk of attention by chunks (Llama 4: 8,192 tokens).
* Of a model of several modalities the text part is served, of [some](#images) with images. Where transformers has no class for it alone
  (MiniMax-M3), the class of the whole model is used without its other parts: tensors are converted and logits scaled and capped as
  there. Where it has one, logits are scaled and capped as in that class, by the config of the text part: the whole
  models of transformers omit this for Gemma 3, Aya Vision, Command A Vision and Granite Speech.
* `kimi_k2` and `mimo`, which transformers does not know, are read as `deepseek_v3` and `qwen2`. A class for text that no mapping of
  transformers names, such as Mistral4ForCausalLM, is found by its config.

| `model_type` | models | differences from Llama |
|---|---|---|
"""

REAL_MODELS = """\

## Real models

| model | from | check |
|---|---|---|
| SmolLM2-135M-Instruct | `make run` | greedy tokens of 24 prompts are those of transformers, in float32 (`tests/model/test_greedy_parity.py`) |
| Gemma 3 270M | `make run MODEL=gemma3-270m` | the same over HTTP (`tests/model/test_gemma.py`). Gemma is provided under and subject to the [Gemma Terms of Use](https://ai.google.dev/gemma/terms) |

No other weights were run here: the checks above are of structure, with random weights.
"""


def models_page() -> str:
    """Return the text of docs/models.md."""
    sys.path.append(str(ROOT / "tests" / "support"))
    # Here, because they import transformers.
    foreign, native, tiny = map(importlib.import_module, ("model_families", "native_families", "tiny_transformers"))
    cases: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for case in native.native_configs(tiny.SHAPE, head_dim=16, wide_head_dim=24):
        name, _, variant = case.partition(", ")
        if variant and name in cases:
            cases[name].append(variant)
    parts = [MODELS_INTRODUCTION, "\n", NATIVE_INTRODUCTION]
    parts += [
        f"| `{name}` | {native.MODELS[name]} | {family.architecture} | {'; '.join(cases[name])} |\n"
        for name, family in FAMILIES.items()
    ]
    parts.append(WRAPPERS_INTRODUCTION)
    parts += [
        f"| `{name}` | {native.VISION_MODELS[name]} | {each.architecture} | `{each.text_type}` | {each.max_images or 'none'} |\n"
        for name, each in WRAPPERS.items()
    ]
    parts.append(TRANSFORMERS_INTRODUCTION)
    parts += [f"| `{name}` | {family.models} | {family.features} |\n" for name, family in foreign.FAMILIES.items()]
    return "".join([*parts, REAL_MODELS])


def chart_schema() -> str:
    """Return values.schema.json of the chart with the flags of the launcher."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    settings = LauncherConfig.model_json_schema()["properties"]
    flags = {
        name.replace("_", "-"): _flag(settings[name]) for name in sorted(settings) if name not in NOT_IN_FLAGS.split()
    }
    schema["$defs"]["flags"] = {"type": "object", "additionalProperties": False, "properties": flags}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _flag(setting: dict[str, typing.Any]) -> dict[str, object]:
    """Return the schema of a flag. Lists may be given as lists or with commas; null is the server's default."""
    choices = [choice for choice in setting.get("anyOf", [setting]) if choice.get("type") != "null"]
    value = {key: part for key, part in choices[0].items() if key not in ("default", "title", "description")}
    match value.get("type"):
        case "array":
            value = {"type": ["string", "array", "null"], "items": {"type": "string"}}
        case "object":
            value = {"type": ["string", "null"]}
        case kind:
            value |= {"type": [kind, "null"]} | ({"enum": [*value["enum"], None]} if "enum" in value else {})
    return value | {"description": " ".join(setting["description"].split())}


def main() -> None:
    """Write the pages and the schema."""
    for name, page in (("flags.md", flags_page()), ("limits.md", limits_page()), ("models.md", models_page())):
        (ROOT / "docs" / name).write_text(page, encoding="utf-8")
    (CHART / "values.schema.json").write_text(chart_schema(), encoding="utf-8")


if __name__ == "__main__":
    main()
