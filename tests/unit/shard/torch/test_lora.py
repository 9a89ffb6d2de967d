"""LoRA adapters in the torch engine give the results of models whose weights they were added to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine_driver import Driver, Stream
from full_grid import full
from lora_folder import merged, projections_of, random_adapter, untie, vocabulary_of
from native_families import native_configs
from reference_kernels import MaskedRows, ReferenceKernels, reference_engine
from tiny_transformers import SHAPE as TINY_SHAPE
from tiny_transformers import random_model, save

from text_generation_common.lora import AdapterSource
from text_generation_proto.values import WarmUpLimits
from text_generation_shard.adapters import module_folder, read_adapter
from text_generation_shard.check import check as describe
from text_generation_shard.config import ShardCheckConfig, ShardConfig
from text_generation_shard.engine import Engine, EngineError
from text_generation_shard.engines import build_engine
from text_generation_shard.engines.torch.build.compile_ahead import have_room, one_of_each_kind
from text_generation_shard.engines.torch.build.prepare import Target, prepare
from text_generation_shard.engines.torch.layers.adapted_linear import AdaptedLinear, LoopedRows, StepAdapters
from text_generation_shard.engines.torch.layers.device_ops import DeviceOps
from text_generation_shard.engines.torch.layers.linear import ParallelLinear, Projection
from text_generation_shard.engines.torch.layers.norm import RMSNorm
from text_generation_shard.engines.torch.layers.ops import ResidualStream
from text_generation_shard.engines.torch.layers.precision import Precision
from text_generation_shard.engines.torch.layers.quantized.fp8 import Fp8Linear
from text_generation_shard.engines.torch.models.native.config import read_model_config
from text_generation_shard.engines.torch.parallel.group import ParallelGroup
from text_generation_shard.engines.torch.parallel.tensor_parallel import ShardRange, TensorParallelRank
from text_generation_shard.engines.torch.weights.quantization.formats.float8 import Fp8Format

NEW_TOKENS = 6
SHAPE = TINY_SHAPE | {"max_position_embeddings": 256, "tie_word_embeddings": False}
CONFIGS = {
    name: config
    for name, config in native_configs(SHAPE, head_dim=16, wide_head_dim=24).items()
    if not name.startswith("falcon_h1")  # refused: its projections have factors
}
QUICK = ("phi3", "qwen3_next", "gemma3, text part")
"""Fused projections; reordered ones, a state and a shared expert; norms after layers, scaled embeddings, and other names."""
SETTINGS: list[dict[str, object]] = [
    {},
    {"use_rslora": True},
    {"alpha_pattern": {"o_proj": 3.0, "qkv_proj": 1.0, "lm_head": 9.0}},
    {"rank": 17},
    {"rank": 1},
    {},
    {},
    {},
]
"""The settings of each adapter."""
VOCABULARY = {1: slice(2), 2: slice(1, 2), 3: slice(2), 5: slice(1)}
"""The adapters that change the embedding, the first, or the LM head, the second. PEFT writes the weights of the first one."""
NAMES = ["", *(f"a{number}" for number in range(len(SETTINGS)))]
PROMPTS = [tuple((31 * i + 7 * length) % 331 for i in range(length)) for length in (33, 1, 16, 31, 50, 90, 5, 17, 40)]


@dataclass
class Expected:
    tokens: list[int]
    logprobs: torch.Tensor
    """Log-probabilities of the prompt, without its first token."""


@dataclass
class Served:
    config: ShardConfig
    engine: Engine
    expected: list[Expected]
    """For each of NAMES, its prompt with its merged model."""

    def driver(self) -> Driver:
        return Driver(self.engine, self.engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096)))


@pytest.fixture(scope="module", params=[name if name in QUICK else full(name) for name in CONFIGS])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder, model = tmp_path_factory.mktemp("checkpoint"), random_model(CONFIGS[request.param])
    saved, changes, (vocabulary, bases) = save(model, folder), [], vocabulary_of(model)
    for seed, (name, settings) in enumerate(zip(NAMES[1:], SETTINGS, strict=True)):
        shapes = projections_of(model) | dict([*vocabulary.items()][VOCABULARY.get(seed, slice(0))])
        own = bases if seed == 1 else {}
        changes.append(random_adapter(folder / name, shapes, seed, bases=own, **settings))  # type: ignore[arg-type]
    untie(model)
    expected = []
    with torch.inference_mode(False), torch.no_grad():
        for prompt, change in zip(PROMPTS, [{}, *changes], strict=True):
            with merged(model, change):
                ids = torch.tensor([prompt])
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=NEW_TOKENS,
                    pad_token_id=0,
                )
                logprobs = model(ids).logits[0].float().log_softmax(-1)
            targets = torch.tensor(prompt[1:], dtype=torch.int64).unsqueeze(1)
            expected.append(Expected(out[0, len(prompt) :].tolist(), logprobs[:-1].gather(1, targets).squeeze(1)))
    adapters = ",".join(f"{name}={folder / name}" for name in NAMES[1:])
    config = ShardConfig(model_path=saved, device="cpu", max_batch_size=12, lora_adapters=adapters)
    return Served(config, build_engine(config), expected)


def check(streams: Sequence[Stream], expected: Sequence[Expected]) -> None:
    for stream, own in zip(streams, expected, strict=True):
        assert stream.tokens == own.tokens
        if len(own.logprobs):
            logprobs = torch.tensor(stream.prompt_logprobs[0][1:])
            assert (logprobs - own.logprobs).norm() <= 1e-5 * own.logprobs.norm()


def test_each_adapter_alone_and_all_in_one_batch(served: Served) -> None:
    assert served.engine.info.adapters == tuple(NAMES[1:])
    assert len({tuple(each.tokens) for each in served.expected}) > len(NAMES) // 2
    driver = served.driver()
    for name, prompt, own in list(zip(NAMES, PROMPTS, served.expected, strict=True))[:4]:
        lone = driver.admit(prompt, NEW_TOKENS, adapter=name, prompt_logprobs=True)
        driver.run()
        check([lone], [own])
    pairs = zip(NAMES, PROMPTS, strict=True)
    streams = [driver.admit(prompt, NEW_TOKENS, adapter=name, prompt_logprobs=True) for name, prompt in pairs]
    driver.run()
    check(streams, served.expected)


def test_chunked_staggered_and_preempted(served: Served) -> None:
    driver, streams = served.driver(), []
    for name, prompt in zip(NAMES, PROMPTS, strict=True):
        streams.append(driver.admit(prompt, NEW_TOKENS, chunk=11, adapter=name))
        driver.step()
        driver.step()
    tokens = []
    for name, stream in zip(NAMES, streams, strict=True):
        resumed = None if stream.is_over else driver.preempt(stream, adapter=name)
        driver.step()
        tokens.append((stream, resumed))
    driver.run()
    found = [stream.tokens + (resumed.tokens if resumed else []) for stream, resumed in tokens]
    assert found == [each.tokens for each in served.expected]


def test_the_operations_of_a_gpu(served: Served) -> None:
    engine = reference_engine(served.config)
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096)))
    # Slots are used again by sequences with other adapters.
    for names in (NAMES, NAMES[:1]):
        streams = [
            driver.admit(prompt, NEW_TOKENS, chunk=25, adapter=name)
            for name, prompt in zip(names, PROMPTS, strict=False)
        ]
        driver.run()
        assert [stream.tokens for stream in streams] == [each.tokens for each in served.expected[: len(names)]]


def load(engine: Engine, config: ShardConfig, name: str) -> Iterator[None]:
    """Return the loading of an adapter that lies beside the model."""
    source = AdapterSource(name, str(module_folder(config, name)))
    return engine.set_adapter(name, read_adapter(source, config))


@pytest.mark.parametrize("served", [name if name == "qwen3_next" else full(name) for name in CONFIGS], indirect=True)
def test_adapters_that_come_while_others_run_take_turns_on_the_device(served: Served) -> None:
    """Twelve adapters would fit host memory, and two the device. One of the start makes room for the embedding and the LM head."""
    settings = {"lora_modules_dir": served.config.model_path, "max_loras": 2, "max_cpu_loras": 12}
    settings["lora_adapters"] = f"a1={module_folder(served.config.model_copy(update=settings), 'a1')}"
    config = served.config.model_copy(update=settings | {"max_lora_rank": 17})
    for engine in (build_engine(config), reference_engine(config)):
        driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=4096)))
        streams: list[Stream] = []
        for first in range(0, len(NAMES), 2):
            for name in filter(lambda name: name not in ("", "a1"), NAMES[first : first + 2]):
                loading = load(engine, config, name)
                assert name not in engine.info.adapters
                for _ in loading:
                    driver.step()
            driver.run()  # those before, whose places the new ones get
            streams += [
                driver.admit(PROMPTS[number], NEW_TOKENS, chunk=25, adapter=NAMES[number], prompt_logprobs=True)
                for number in range(first, min(first + 2, len(NAMES)))
            ]
            driver.step()
            if first == 4:
                third = driver.admit(PROMPTS[0], 1, adapter="a0")
                driver.run()
                assert third.failure is not None
                assert third.failure.message == "more LoRA adapters at a time than the 2 of --max-loras"
        driver.run()
        check(streams, served.expected)
        # The one used least recently, which has no place any more, and one that is unloaded while it runs.
        again = [driver.admit(PROMPTS[number], NEW_TOKENS, adapter=NAMES[number]) for number in (1, 8)]
        driver.step()
        leaving = engine.set_adapter(NAMES[8], None)
        next(leaving)
        assert NAMES[8] not in engine.info.adapters
        driver.run()
        assert [stream.tokens for stream in again] == [served.expected[number].tokens for number in (1, 8)]
        assert list(leaving) == []
        engine.close()


LAYER = "model.layers.0."
SHAPES = {f"{LAYER}self_attn.q_proj": (48, 48), f"{LAYER}mlp.down_proj": (48, 80)}


@pytest.mark.parametrize(
    ("shapes", "settings", "refusal"),
    [
        ({"lm_head": (339, 48)}, {}, "changes a lm_head of 339 × 48 values, and that of this model has 331 × 48"),
        (
            {f"{LAYER}mlp.experts.1.up_proj": (80, 48)},
            {},
            r"changes model.layers.0.mlp.experts.1.up_proj, and adapters of this model may change down_proj, embed_tokens, ",
        ),
        ({f"{LAYER}self_attn.q_proj": (64, 48)}, {}, "q_proj of 64 × 48 values, and that of this model has 48 × 48"),
        (SHAPES, {"rank": 257}, "has rank 257, and the torch engine serves ranks up to 256"),
        (SHAPES, {"model_impl": "transformers"}, "only the native decoder serves LoRA adapters; --model-impl transf"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(
    shapes: dict[str, tuple[int, int]], settings: dict[str, object], refusal: str, tmp_path: Path
) -> None:
    folder = save(random_model(CONFIGS["llama"]), tmp_path / "model")
    random_adapter(tmp_path / "sql", SHAPES | shapes, 0, rank=settings.pop("rank", 4))  # type: ignore[arg-type]
    config = ShardCheckConfig(model_path=folder, device="cpu", lora_adapters=f"sql={tmp_path / 'sql'}", **settings)  # type: ignore[arg-type]
    for refused in (build_engine, describe):
        with pytest.raises(EngineError, match=refusal):
            refused(config)


def test_an_adapter_that_cannot_be_loaded_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = save(random_model(CONFIGS["llama"]), tmp_path / "model")
    for name, shapes, rank in (("fits", SHAPES, 8), ("large", SHAPES, 17), ("other", {"lm_head": (331, 48)}, 8)):
        random_adapter(tmp_path / name, shapes, 0, rank=rank)
    config = ShardConfig(model_path=folder, device="cpu", lora_modules_dir=str(tmp_path))
    engine = build_engine(config)
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=1024)))
    before = driver.alone(PROMPTS[0])
    for name, problem in (
        ("large", "has rank 17, and --max-lora-rank is 16"),
        ("other", "changes lm_head, for which there is room only if an"),
    ):
        with pytest.raises(EngineError, match=problem):
            list(load(engine, config, name))
        assert name not in engine.info.adapters
        (tmp_path / name / "adapter_model.safetensors").write_bytes(
            (tmp_path / "fits/adapter_model.safetensors").read_bytes()
        )
        (tmp_path / name / "adapter_config.json").write_bytes((tmp_path / "fits/adapter_config.json").read_bytes())
        list(load(engine, config, name))
    damaged = load(engine, config, "fits")
    (tmp_path / "fits/adapter_model.safetensors").write_bytes(b"0")
    with pytest.raises(EngineError, match="is not a safetensors file"):
        list(damaged)
    assert (engine.info.adapters, driver.alone(PROMPTS[0])) == (("large", "other"), before)
    engine.close()


def test_a_weight_beside_its_change_must_be_that_of_the_model(tmp_path: Path) -> None:
    """PEFT writes it. The LM head of this model is its embedding."""
    model = random_model(CONFIGS["llama, tied"])
    folder, (shapes, weights) = save(model, tmp_path / "model"), vocabulary_of(model)
    trained = {"lm_head": weights["lm_head"].index_fill(0, torch.tensor(5), 1.0)}
    larger = {name: torch.cat([weight, weight[:1]]) for name, weight in weights.items()}
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    for name, bases in (("same", weights), ("rounded", rounded), ("trained", weights | trained), ("larger", larger)):
        random_adapter(tmp_path / name, shapes, 0, bases=bases)
    query = f"{LAYER}self_attn.q_proj"
    random_adapter(tmp_path / "layer", SHAPES, 0, bases={query: model.get_submodule(query).weight.detach()})
    for names, problem in (("same rounded", ""), ("trained", "lm_head"), ("larger", ""), ("layer", "q_proj")):
        adapters = ",".join(f"{name}={tmp_path / name}" for name in names.split())
        config = ShardConfig(model_path=folder, device="cpu", lora_adapters=adapters)
        if names == "same rounded":
            build_engine(config).close()
            continue
        with pytest.raises(
            EngineError, match=rf"{problem}\.base_layer\.weight is not the embedding or LM head of the m"
        ):
            build_engine(config)


def test_the_check_counts_the_memory_of_adapters(tmp_path: Path) -> None:
    folder = save(random_model(CONFIGS["llama"]), tmp_path / "model")
    random_adapter(tmp_path / "sql", SHAPES, 0)
    settings = {"model_path": folder, "device": "cpu"}
    with_adapters = describe(ShardCheckConfig(**settings, lora_adapters=f"a={tmp_path / 'sql'},b={tmp_path / 'sql'}"))  # type: ignore[arg-type]
    weights = with_adapters["memory"]["weights"] - describe(ShardCheckConfig(**settings))["memory"]["weights"]  # type: ignore[arg-type]
    # Rank 16: queries, keys and values of 48, 16 and 16 outputs, and the last projection of the MLP.
    assert weights == 2 * 4 * 16 * (3 * 48 + 80 + 80 + 48)
    random_adapter(tmp_path / "head", SHAPES | {"lm_head": (331, 48)}, 0)
    of_head = describe(ShardCheckConfig(**settings, lora_adapters=f"a={tmp_path / 'head'},b={tmp_path / 'sql'}"))  # type: ignore[arg-type]
    assert of_head["memory"]["weights"] - with_adapters["memory"]["weights"] == 2 * 4 * 16 * (331 + 48)


def test_kernels_are_compiled_ahead_with_a_model_that_the_adapters_do_not_fit(tmp_path: Path) -> None:
    """The adapters change a second layer, which the small model does not have."""
    folder = save(random_model(CONFIGS["llama"]), tmp_path / "model")
    second = {name.replace(LAYER, LAYER.replace("0", "1")): shape for name, shape in SHAPES.items()}
    random_adapter(tmp_path / "sql", second, 0)
    config = ShardConfig(model_path=folder, device="cpu", lora_adapters=f"a={tmp_path / 'sql'}")
    prepared = prepare(config, read_model_config(Path(folder)), Target.of(config))
    assert len(one_of_each_kind(prepared.model).layers) < len(prepared.model.layers)
    assert have_room(config, prepared)


def test_changes_are_added_to_quantized_products() -> None:
    device, draw = torch.device("cpu"), torch.Generator().manual_seed(3)
    whole = ShardRange.whole(32)
    # Two ranks' rows of one fused projection of the checkpoint: this is the second.
    parts = [Projection("qkv", ShardRange(first + 16, 16, 96), whole, f".{first}") for first in (0, 32, 64)]
    base = Fp8Linear(parts, Fp8Format(scale_per_row=True, static_inputs=False), device, torch.float32, bias=False)
    base.weight.copy_(torch.randn(48, 32, generator=draw))
    base.weight_scale.fill_(0.1)
    step = StepAdapters(2)
    linear = AdaptedLinear(base, parts, 5, step, device, torch.float32)
    a, b, x = (torch.randn(*shape, generator=draw) for shape in ((5, 32), (96, 5), (3, 32)))
    linear.place(1, *linear.packed({"qkv": (a, b)}))
    step.begin(torch.tensor([0, 2, 1], dtype=torch.int32), LoopedRows)
    change = linear(x) - base(x)
    rows = torch.cat([b[first + 16 : first + 32] for first in (0, 32, 64)])
    assert not change[[0, 2]].any()
    assert torch.allclose(change[1], x[1] @ a.t() @ rows.t(), atol=1e-4)
    assert linear.matvec_weight is None
    step.begin(None, LoopedRows)
    assert torch.equal(linear(x), base(x))
    assert linear.matvec_weight is not None


@pytest.mark.parametrize(
    ("ranks", "scale", "normed"), [(1, 1.0, False), (2, 1.0, False), (1, 0.5, False), (1, 1.0, True)]
)
def test_an_output_is_summed_normed_and_scaled_with_its_change(ranks: int, scale: float, normed: bool) -> None:
    device, draw, precision = torch.device("cpu"), torch.Generator().manual_seed(3), Precision.uniform(torch.float32)
    shapes = (24, 32), (5, 32), (24, 5), (3, 32), (3, 24)
    weight, a, b, x, residual = (torch.randn(*shape, generator=draw) for shape in shapes)
    norm = RMSNorm(24, 1e-5, device, torch.float32) if normed else None
    expected = x @ weight.t()
    expected[1:] += x[1:] @ a.t() @ b.t()
    if norm is not None:
        norm.weight.copy_(torch.linspace(0.5, 2, 24))
        expected = norm(expected)
    streams = []
    for rank in range(ranks):
        inputs = ShardRange(rank * (32 // ranks), 32 // ranks, 32)
        own = slice(inputs.start, inputs.start + inputs.length)
        projections, step = [Projection("down", ShardRange.whole(24), inputs)], StepAdapters(1)
        base = ParallelLinear(projections, device, precision, bias=False)
        base.weight.copy_(weight[:, own])
        linear = AdaptedLinear(base, projections, 5, step, device, torch.float32)
        linear.place(0, *linear.packed({"down": (a, b)}))
        step.begin(torch.tensor([0, 1, 1], dtype=torch.int32), MaskedRows)
        streams.append(ResidualStream(residual.clone(), torch.empty(3, 24), scale=scale))
        ops = DeviceOps(ReferenceKernels(1.0), ParallelGroup(TensorParallelRank(rank, ranks)), torch.float32)  # type: ignore[arg-type]
        ops.add_linear(streams[-1], x[:, own], linear, norm)
    total = sum(each.update for each in streams if each.update is not None)  # the groups have no collectives
    for stream in streams:
        assert isinstance(total, torch.Tensor)
        stream.update = total.clone()
        ops.norm(stream, None)
        assert torch.allclose(stream.residual, residual + scale * expected, atol=1e-4)
