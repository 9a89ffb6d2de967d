"""A model divided over two processes on a CPU gives the same results as the whole model."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from eagle_models import EagleModel
from engine_driver import Driver, Stream
from full_grid import full
from lora_folder import projections_of, random_adapter, vocabulary_of
from model_families import FAMILIES, tiny_config, write_model
from model_families import random_model as random_library_model
from native_families import native_configs
from prediction_layers import PredictionLayer
from scripted_drafts import Predicted, draft_by
from tiny_transformers import SHAPE, random_model, save
from transformers import LlamaConfig
from vision_models import VisionModel, decoded, picture

from text_generation_common.lora import AdapterSource
from text_generation_proto.values import Sampling, WarmUpLimits
from text_generation_shard.adapters import read_adapter
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import Engine, EngineError
from text_generation_shard.engines import build_engine, choose_code
from text_generation_shard.engines.torch.engine.engine import TorchEngine
from text_generation_shard.engines.torch.parallel.channel import GroupBroken

SAMPLED = Sampling(greedy=False, temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=7)
HOST_BLOCK = 16 * 3 * 2 * 8 * 4 + 4
"""Bytes of keys and values of 16 tokens in 3 layers, with one head of 8 numbers in each rank, and of the checksum."""
KILLED_IN_A_STEP = """
    import os, signal
    from text_generation_shard.__main__ import main
    from text_generation_shard.engines.torch.runner.cpu_runner import CpuRunner

    CpuRunner.start = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    main()
"""
OUT_OF_MEMORY = """
    import torch
    from text_generation_shard.__main__ import main
    from text_generation_shard.engines.torch.models.huggingface import find_decoder

    def run_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    find_decoder._Finder._run_own = run_out
    main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with an odd vocabulary size, so that the vocabulary is padded."""
    return Path(save(random_model(LlamaConfig(**SHAPE)), tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture
def host_fd() -> Iterator[int]:
    """The file of a host cache of 1 MiB."""
    host = os.memfd_create("host")
    os.ftruncate(host, 1 << 20)
    yield host
    os.close(host)


def settings_of(folder: Path, model_impl: str) -> dict[str, object]:
    adapters = ",".join(f"{path.name}={path}" for path in sorted(folder.glob("adapter-*")))
    settings = {"model_path": str(folder), "device": "cpu", "max_batch_size": 8, "model_impl": model_impl}
    return settings | {"lora_adapters": adapters}


@contextmanager
def two_ranks(
    folder: Path,
    tmp_path: Path,
    *program: str,
    model_impl: str = "native",
    second: dict[str, object] | None = None,
    host_cache_fd: int = 0,
    **more: object,
) -> Iterator[Engine]:
    """Run rank 0's engine here and rank 1 as a shard process, whose program may be replaced, with settings of the `second`."""
    more["host_cache_fd"] = host_cache_fd
    settings = settings_of(folder, model_impl) | {"world_size": 2, "group_address": f"unix://{tmp_path}/group"} | more
    given = settings | (second or {})
    flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    follower = subprocess.Popen(
        [sys.executable, *program, *flags, "--rank", "1", "--address", f"unix://{tmp_path}/one"],
        pass_fds=(host_cache_fd,),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    engine = build_engine(ShardConfig(**settings))  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()
        # The follower exits when its leader has closed.
        assert follower.wait(20) is not None


def answers(engine: Engine) -> list[Stream]:
    driver = Driver(engine, engine.warm_up(WarmUpLimits(max_batch_total_tokens=2048, max_batch_prefill_tokens=256)))
    first, second = engine.info.adapters or ("", "")
    streams = [
        driver.admit(range(3, 30), 9, chunk=10, prompt_logprobs=True, prompt_top_n=2, top_n=2, adapter=first),
        driver.admit(range(40, 95), 12, sampling=SAMPLED, chunk=20, prompt_logprobs=True),
    ]
    kept = driver.keep_state(streams[1], 16) if driver.has_states else None
    for _ in range(3):
        driver.step()
    streams += [driver.admit(range(7, 9), 5, adapter=second), driver.admit(range(100, 140), 7, sampling=SAMPLED)]
    reused = {"shared": streams[1].blocks[:1], "computed_tokens": 16, "checkpoint": kept}
    streams.append(driver.admit(range(40, 70), 6, **reused))
    driver.run()
    return streams


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5_text",
        *map(full, ("gemma4_text, experts", "deepseek_v3", "nemotron_h, experts", "bamba", "falcon_h1")),
        *map(full, ("falcon_h1, normed", "granitemoehybrid", "gemma2", "phi3", "glm4", "gpt_oss", "qwen3_next")),
        *map(full, ("deepseek_v2, lite", "minicpm3")),
    ],
)
def test_a_divided_model_gives_the_same_results(family: str, tmp_path: Path) -> None:
    """Some sequences have LoRA adapters, which models with multipliers refuse."""
    configs = native_configs(SHAPE | {"tie_word_embeddings": False}, head_dim=16, wide_head_dim=24)
    model, folder = random_model(configs[family]), tmp_path / "checkpoint"
    save(model, folder)
    for seed in range(0 if "falcon" in family else 2):
        random_adapter(folder / f"adapter-{seed}", projections_of(model) | vocabulary_of(model)[0], seed)
    check_division(folder, tmp_path, "native")


@pytest.mark.parametrize(
    "family", ["deepseek_v3", full("qwen3_next"), full("glm4_moe"), full("qwen2"), full("EAGLE-3")]
)
def test_a_divided_model_predicts_the_same_tokens(family: str, tmp_path: Path) -> None:
    """Texts are those of one rank without drafts."""
    sizes = SHAPE | {"initializer_range": 0.05}
    layer: PredictionLayer | EagleModel
    if family == "EAGLE-3":
        layer = EagleModel(LlamaConfig(**sizes))
    else:
        layer = PredictionLayer(native_configs(sizes, head_dim=16, wide_head_dim=24)[family])
    folder, more = layer.write(tmp_path), {"speculate": "3", "dtype": "float32"}
    more |= {"speculator": str(folder / "draft")} if family == "EAGLE-3" else {}
    whole = build_engine(ShardConfig(**settings_of(folder, "native") | more))  # type: ignore[arg-type]
    draft_by(whole, None)
    plain = answers(whole)
    whole.close()
    drafter = Predicted(3, [[*stream.prompt, *stream.tokens] for stream in plain])
    with two_ranks(folder, tmp_path, "-m", "text_generation_shard", **more) as engine:  # type: ignore[arg-type]
        draft_by(engine, drafter)
        parts = answers(engine)
    check_equal(parts, plain)
    assert len(drafter.found) > 8
    for tokens, found in drafter.found:
        assert list(found) == layer.drafts(tokens, len(found))[0]


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "qwen3_5"])
def test_pictures_are_given_to_all_ranks(family: str, tmp_path: Path) -> None:
    """Rank 0 encodes them. The positions of several axes, additions after layers and attention in images are of all ranks.

    Tokens are predicted by all ranks, too.
    """
    vision = VisionModel(family, tmp_path / "checkpoint")
    prompt = vision.prompt([picture(70, 45), picture(31, 90)])
    (tmp_path / "text").mkdir()
    draft = EagleModel(LlamaConfig(**SHAPE)).write(tmp_path / "text") / "draft"
    more = {"speculate": "3", "speculator": str(draft)}
    with two_ranks(tmp_path / "checkpoint", tmp_path, "-m", "text_generation_shard", **more) as engine:  # type: ignore[arg-type]
        assert isinstance(engine, TorchEngine)
        limits = WarmUpLimits(max_batch_total_tokens=2048, max_batch_prefill_tokens=64)
        driver = Driver(engine, engine.warm_up(limits))
        draft_by(engine, drafter := Predicted(3))
        assert engine._images is not None
        encoder = engine._images.encoder
        encode, encoder.encode = encoder.encode, lambda inputs, tokens: inputs["nothing"]  # type: ignore[method-assign]
        failed = driver.admit(prompt.ids, 4, **decoded(engine, prompt))
        driver.run()
        assert failed.failure is not None
        encoder.encode = encode  # type: ignore[method-assign]
        stream = driver.admit(prompt.ids, 4, chunk=5, prompt_logprobs=True, **decoded(engine, prompt))
        driver.admit(range(3, 30), 9, chunk=10)
        driver.run()
    scores, tokens = vision.reference(prompt, 4)
    assert stream.tokens == tokens
    assert stream.prompt_logprobs[0][1:] == pytest.approx(scores.tolist(), rel=1e-5, abs=1e-4)
    assert drafter.found


def test_an_adapter_is_loaded_on_all_ranks_or_on_none_and_the_smallest_host_cache_counts(
    tmp_path: Path, host_fd: int
) -> None:
    model = random_model(LlamaConfig(**SHAPE | {"tie_word_embeddings": False}))
    folder = Path(save(model, tmp_path / "checkpoint"))
    for seed, name in enumerate(("adapter-0", "adapter-1", "large")):
        random_adapter(folder / name, projections_of(model), seed, rank=8 if name == "large" else 4)
    whole = build_engine(ShardConfig(**settings_of(folder, "native")))  # type: ignore[arg-type]
    expected = answers(whole)
    whole.close()
    more = {"lora_adapters": "", "lora_modules_dir": str(folder), "max_lora_rank": 8}
    more |= {"host_cache_fd": host_fd, "host_cache_bytes": 1 << 20}

    def load(engine: Engine, name: str) -> None:
        source = AdapterSource(name, str(folder / name))
        for _ in engine.set_adapter(name, read_adapter(source, ShardConfig(model_path=str(folder)))):
            pass

    second = {"max_lora_rank": 4, "host_cache_bytes": 1 << 18}
    with two_ranks(folder, tmp_path, "-m", "text_generation_shard", second=second, **more) as engine:
        (group,) = engine.warm_up(WarmUpLimits(max_batch_total_tokens=2048, max_batch_prefill_tokens=256))
        assert group.host_blocks == (1 << 18) // HOST_BLOCK
        driver = Driver(engine, (group,))
        load(engine, "adapter-0")
        driver.admit(range(3, 9), 3, adapter="adapter-0")
        driver.run()
        with pytest.raises(EngineError, match="rank 1 cannot load the LoRA adapter large: its log says why"):
            load(engine, "large")
        load(engine, "adapter-1")
        found = answers(engine)
        assert [stream.tokens for stream in found] == [stream.tokens for stream in expected]
        for _ in engine.set_adapter("adapter-0", None):
            raise AssertionError("no sequence uses it")
        load(engine, "adapter-0")
        assert engine.info.adapters == ("adapter-1", "adapter-0")


@pytest.mark.full
@pytest.mark.parametrize(
    "family", ["olmo2", "llama", "gemma3_text", "qwen3_moe", "deepseek_v3", "llama4_text", "phi", "phi3", "olmoe"]
)
def test_a_divided_model_of_transformers_gives_the_same_results(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The vocabulary is odd, so that the LM head is padded."""
    sizes = {"vocab_size": 151, "num_hidden_layers": 2, "no_rope_layers": [1, 0], "attention_chunk_size": 256}
    changes = {**FAMILIES[family].changes, **sizes}
    folder = write_model(random_library_model(tiny_config(family, changes)), tmp_path / "checkpoint")
    check_division(Path(folder), tmp_path, "transformers")
    in_native_decoder = "the layers run in transformers" not in capsys.readouterr().out
    assert in_native_decoder == (family in ("llama", "gemma3_text"))


@pytest.mark.parametrize(
    ("family", "changes", "ranks", "problem"),
    [
        ("gpt2", {}, 2, "its config in transformers has no plan"),
        (
            "llama",
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
            4,
            "6 attention heads cannot be divided",
        ),
        (
            "llama",
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
            2,
            "3 heads of layers.0.self_attn.k_proj",
        ),
        ("llama", {"intermediate_size": 97}, 2, "97 outputs of layers.0.mlp.gate_proj cannot be divided"),
    ],
)
def test_a_model_of_transformers_that_cannot_be_divided_is_refused(
    family: str, changes: dict[str, object], ranks: int, problem: str, tmp_path: Path
) -> None:
    """Before a checkpoint is read, and before another rank is waited for."""
    tiny_config(family, {**FAMILIES[family].changes, **changes}).save_pretrained(tmp_path)
    settings = settings_of(tmp_path, "transformers") | {"world_size": ranks, "group_address": f"unix://{tmp_path}/none"}
    with pytest.raises(EngineError, match=rf"is not divided by --num-shard: {problem}"):
        build_engine(ShardConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "ranks", "native"),
    [
        ("qwen3_next", 2, True),
        ("qwen3_next", 4, False),
        ("qwen3_5_text", 3, False),
        ("falcon_h1", 2, True),
        ("falcon_h1", 3, False),
        ("bamba", 4, False),
        ("olmo_hybrid", 2, False),
        ("lfm2", 2, False),
    ],
)
def test_states_that_ranks_cannot_divide_are_left_to_transformers(
    family: str, ranks: int, native: bool, tmp_path: Path
) -> None:
    native_configs(SHAPE, head_dim=16, wide_head_dim=24)[family].save_pretrained(tmp_path)
    settings = settings_of(tmp_path, "auto") | {"world_size": ranks, "group_address": f"unix://{tmp_path}/none"}
    choice = choose_code(ShardConfig(**settings))  # type: ignore[arg-type]
    assert (choice.model is not None) == native, choice.reason


def check_division(folder: Path, tmp_path: Path, model_impl: str) -> None:
    whole = answers(build_engine(ShardConfig(**settings_of(folder, model_impl))))  # type: ignore[arg-type]
    with two_ranks(folder, tmp_path, "-m", "text_generation_shard", model_impl=model_impl) as engine:
        parts = answers(engine)
    check_equal(parts, whole)


def check_equal(parts: list[Stream], whole: list[Stream]) -> None:
    for expected, got in zip(whole, parts, strict=True):
        assert (got.tokens, got.finish, got.failure) == (expected.tokens, expected.finish, None)
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert [top.token_ids for top in got.top_tokens] == [top.token_ids for top in expected.top_tokens]
        for scores, exact in zip(got.prompt_logprobs, expected.prompt_logprobs, strict=True):
            assert scores[1:] == pytest.approx(exact[1:], rel=1e-5, abs=1e-4)


def test_a_rank_lost_in_a_step_is_named_and_the_others_close(folder: Path, tmp_path: Path, host_fd: int) -> None:
    program = textwrap.dedent(KILLED_IN_A_STEP)
    with two_ranks(folder, tmp_path, "-c", program, host_cache_fd=host_fd, host_cache_bytes=1 << 20) as engine:
        with pytest.raises(GroupBroken, match=r"^rank 1 is gone$"):
            engine.warm_up(WarmUpLimits(max_batch_total_tokens=2048, max_batch_prefill_tokens=256))
        engine.reset()  # as at the end of a session


@pytest.mark.full
def test_a_rank_without_a_host_cache_leaves_the_others_without(folder: Path, tmp_path: Path, host_fd: int) -> None:
    settings = {"host_cache_fd": host_fd, "host_cache_bytes": 1 << 20, "second": {"host_cache_bytes": 0}}
    with two_ranks(folder, tmp_path, "-m", "text_generation_shard", **settings) as engine:  # type: ignore[arg-type]
        (group,) = engine.warm_up(WarmUpLimits(max_batch_total_tokens=2048, max_batch_prefill_tokens=256))
        assert group.host_blocks == 0


@pytest.mark.full
def test_a_rank_that_runs_out_of_memory_ends_the_start_of_all(folder: Path, tmp_path: Path) -> None:
    settings = settings_of(folder, "transformers") | {"world_size": 2, "group_address": f"unix://{tmp_path}/group"}
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    programs = [("-m", "text_generation_shard"), ("-c", textwrap.dedent(OUT_OF_MEMORY))]
    ranks = [
        subprocess.Popen(
            [sys.executable, *program, *flags, "--rank", str(rank), "--address", f"unix://{tmp_path}/{rank}"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, program in enumerate(programs)
    ]
    logs = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "the model does not fit in the memory: CUDA out of memory. Tried to allocate 2.00 GiB" in logs[1]
    assert "Traceback" not in "".join(logs)
