"""A model against the device that is to run it: what is checked and known before memory for weights is allocated."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Self, TypeAlias, TypeVar

import torch

from text_generation_common.log import log
from text_generation_common.lora import parse_adapters
from text_generation_common.memory import total_memory
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError, EngineInfo, Scheduling
from text_generation_shard.engines.torch.batch.kv_cache import BLOCK_SIZE
from text_generation_shard.engines.torch.layers.linear import has_products
from text_generation_shard.engines.torch.layers.precision import Precision
from text_generation_shard.engines.torch.layers.quantized.choice import projection_itemsize
from text_generation_shard.engines.torch.models.native.eagle_config import read_eagle
from text_generation_shard.engines.torch.models.native.model_config import ModelConfig, PredictionConfig, dequantized
from text_generation_shard.engines.torch.models.native.parameters import PredictionWeights
from text_generation_shard.engines.torch.models.native.prediction_names import COUNTS
from text_generation_shard.engines.torch.parallel.tensor_parallel import TensorParallelRank
from text_generation_shard.engines.torch.weights.checkpoint import Checkpoint
from text_generation_shard.engines.torch.weights.load import plan_loading
from text_generation_shard.grammar import Grammars, load_grammars
from text_generation_shard.json_object import JsonObject

if TYPE_CHECKING:  # it imports transformers
    from text_generation_shard.engines.torch.models.huggingface.config import TransformersConfig

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files with the settings of the processor of images."""
MAX_SLOTS = 256
MAX_TOP_N_TOKENS = 20
DEVICES = ("cpu", "cuda")
CPU_PREFILL_TOKENS = 1536
"""On CPU, larger chunks do not speed up prefill. Prompts that arrive together also decode together if one step computes them."""
CPU_CHUNK_TOKENS = 64
"""Half as many cost a third more time each beside 48 decoding sequences, twice as many as much."""
CUDA_PREFILL_TOKENS = (1024, 8192)
"""Minimum and maximum. Products of fewer rows are slower; activations of more rows take memory from the KV cache."""
CUDA_CHUNK_PRODUCTS = 16e12
"""Multiplications per chunk, about 50 ms on a Hopper GPU: long enough to amortize a launch, short enough not to delay decoding.
Measured on an H200, an 8B model is served faster with 2,048 tokens than with 4,096 or 1,024."""

META = torch.device("meta")
"""Holds shapes and no values."""


AUTO_DRAFTS = {"cpu": 8, "cuda": 4}
"""Tokens of the longest draft, unless a flag says otherwise: docs/speculation.md has what they bring on a GPU."""

MAX_WEIGHTS_PER_BYTE = 1.0
"""Most weights for a byte of a checkpoint without quantization: twice as many as in float16."""
MAX_QUANTIZED_WEIGHTS_PER_BYTE = 8.0
"""The same with quantization: twice as many as with 2 bits for a weight."""


ModelDescription: TypeAlias = "ModelConfig | TransformersConfig"
Description = TypeVar("Description", bound=ModelDescription)


@dataclass(frozen=True, slots=True)
class Target:
    """The device that is to run a model, and the bytes of its memory."""

    device: torch.device
    memory: int

    @classmethod
    def of(cls, config: ShardConfig) -> Self:
        """Return the device that the settings name. Raises EngineError if it is not there."""
        device = choose_device(config.device)
        if device.type == "cpu":
            return cls(device, total_memory())
        return cls(device, torch.cuda.get_device_properties(device).total_memory)


@dataclass(frozen=True, slots=True)
class Prepared(Generic[Description]):
    """A model that can be served, as far as its config and the headers of its files show."""

    model: Description
    target: Target
    info: EngineInfo
    grammars: Grammars | None

    @property
    def dtype(self) -> torch.dtype:
        """The data type of weights and activations."""
        dtype: torch.dtype = getattr(torch, self.info.dtype)
        return dtype


def prepare(config: ShardConfig, model_config: ModelConfig, target: Target) -> Prepared[ModelConfig]:
    """Check a model for the native decoder. Raises EngineError."""
    if model_config.latent is not None and config.kv_cache_dtype != "auto":
        raise EngineError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: the latent rows of {model_config.model_type} models are not stored in FP8"
        )
    dtype = getattr(torch, dtype_name(config, model_config, target.device))
    check_memory(model_config, dtype.itemsize, target, config.world_size)
    model_config = with_drafts(config, model_config, target.device)
    kept_tokens = max(model_config.kept_tokens, config.max_batch_total_tokens)
    model_config = replace(model_config, kept_tokens=kept_tokens)
    return describe(config, model_config, target)


def with_drafts(config: ShardConfig, model_config: ModelConfig, device: torch.device) -> ModelConfig:
    """Return a model with what drafts need, whose states are kept as the settings say."""
    longest = longest_draft(config, device, has_states=model_config.states is not None)
    if config.speculator and not longest:
        log.warning("the draft model is not used: no drafts are made, see --speculate")
    if longest:
        model_config = replace(model_config, prediction=find_prediction(config, model_config, device))
    if (states := model_config.states) is None:
        return model_config
    name = config.mamba_ssm_cache_dtype
    dtype = states.dtype if name == "auto" else getattr(torch, name)
    return replace(model_config, states=replace(states, dtype=dtype, drafts=longest))


def find_prediction(config: ShardConfig, model: ModelConfig, device: torch.device) -> PredictionConfig | None:
    """Return the draft model, else the predicting layer of the checkpoint; logs why that is not loaded. Raises EngineError."""
    if config.speculator:
        own = read_eagle(Path(config.speculator), model, has_files=config.load_format != "dummy")
        check_prediction(config, own, device)
        return own
    if (names := model.family.prediction) is None:
        return None
    names, folder = replace(names, root=names.root.format(layers=model.num_layers)), Path(config.model_path)
    own, raw = PredictionConfig(names=names, model=model, folder=folder), JsonObject.read(folder).decoder()
    counts = [raw.get(name) for name in COUNTS if raw.get(name) is not None]
    if config.load_format == "dummy" or (counts and not any(counts)):
        return own if any(counts) else None
    if not any(name.startswith(names.root + names.projection) for name in Checkpoint(folder, text_only=True).names):
        return None
    reasons: list[str] = []
    for scheme in dict.fromkeys((model.quantization, None)):
        own = replace(own, model=replace(model, quantization=scheme))
        try:
            check_prediction(config, own, device)
            return own
        except EngineError as error:
            reasons.append(str(error))
    log.warning("the layer that predicts tokens is not loaded", reason=reasons[0])
    return None


def check_prediction(config: ShardConfig, own: PredictionConfig, device: torch.device) -> None:
    """Raise EngineError if the tensors of a predicting layer do not fit its config, or the ranks cannot divide it."""
    built = replace(own, model=dequantized(own.model)) if device.type == "cpu" else own
    try:
        tp = TensorParallelRank(config.rank, config.world_size)
        weights = PredictionWeights(built, tp, META, Precision.uniform(torch.bfloat16))
    except EngineError as error:
        raise EngineError(f"{own.folder}: {error}") from None
    if config.load_format != "dummy":
        plan_loading(own.folder, weights.named_parameters(), own.model.quantization)


def longest_draft(config: ShardConfig, device: torch.device, *, has_states: bool) -> int:
    if config.speculate != "auto":
        return int(config.speculate)
    # Drafts of models with states were not measured on a GPU.
    return 0 if has_states and device.type == "cuda" else AUTO_DRAFTS[device.type]


def max_images(config: ShardConfig, model_config: ModelDescription) -> int:
    """Return the images that a prompt may have; logs why a model of images takes none."""
    most = model_config.max_images if config.max_batch_image_tokens else 0
    if config.rank:  # rank 0 alone has the encoder, and decides
        return most
    if not most:
        if config.max_batch_image_tokens and JsonObject.read(Path(config.model_path)).get("vision_config"):
            log.warning("the model takes no images", reason="those of its family are not supported")
        return 0
    missing = [name for name in ("transformers", "PIL") if find_spec(name) is None]
    reason = ""
    if missing:
        reason = f"{' and '.join(missing)} are not installed"
    elif not any(Path(config.model_path, name).is_file() for name in PROCESSOR_FILES):
        reason = f"the folder has no {PROCESSOR_FILES[0]}"
    if reason:
        log.warning("the model takes no images", reason=reason)
    return 0 if reason else most


def describe(config: ShardConfig, model_config: Description, target: Target) -> Prepared[Description]:
    """Compare a model with its checkpoint and return its description. Raises EngineError."""
    check_checkpoint(config, model_config)
    grammars = load_grammars(config.model_path, model_config.eos_token_ids) if config.rank == 0 else None
    return Prepared(model_config, target, engine_info(config, model_config, target.device, grammars), grammars)


def check_memory(config: ModelDescription, itemsize: int, target: Target, ranks: int) -> None:
    """Raise EngineError if the weights cannot fit in the memory of the devices, before any is allocated."""
    on_cuda = target.device.type == "cuda"
    memory = ranks * target.memory if on_cuda else target.memory
    projections = projection_itemsize(config.quantization, itemsize) if on_cuda else itemsize
    weights = config.projection_weights * projections + config.embedding_weights * itemsize
    if weights > memory:
        raise EngineError(
            f"config.json describes weights of {weights / 2**30:,.1f} GiB, and there are only {memory / 2**30:,.1f} GiB "
            f"of memory on {f'{ranks} × {target.device}' if on_cuda else 'this machine'}"
        )


def check_checkpoint(config: ShardConfig, model_config: ModelDescription) -> None:
    """Raise EngineError if config.json describes a far larger model than the files hold; the loader finds smaller differences."""
    if config.load_format == "dummy":
        return
    weights = model_config.projection_weights + model_config.embedding_weights
    nbytes = Checkpoint(Path(config.model_path)).nbytes
    is_quantized = model_config.quantization is not None
    if weights > nbytes * (MAX_QUANTIZED_WEIGHTS_PER_BYTE if is_quantized else MAX_WEIGHTS_PER_BYTE):
        raise EngineError(
            f"{config.model_path}: config.json describes {weights:,} weights, and the checkpoint has only {nbytes:,} bytes"
        )


def engine_info(
    config: ShardConfig, model_config: ModelDescription, device: torch.device, grammars: Grammars | None
) -> EngineInfo:
    if isinstance(model_config, ModelConfig):
        drafted = longest_draft(config, device, has_states=model_config.states is not None)
    else:  # the library cannot take drafts back from a state
        drafted = 0 if model_config.has_states else longest_draft(config, device, has_states=False)
    if config.synthetic_acceptance and not 1 <= config.synthetic_acceptance <= 1 + drafted:
        tokens = f"1 to {1 + drafted} tokens" if drafted else "1 token, without drafts"
        raise EngineError(f"--synthetic-acceptance {config.synthetic_acceptance:g}: a step yields {tokens}")
    return EngineInfo(
        engine="torch",
        model_id=config.model_id or config.model_path,
        model_type=model_config.model_type,
        dtype=dtype_name(config, model_config, device),
        device=str(device),
        scheduling=Scheduling.STEP,
        vocab_size=model_config.vocab_size,
        max_sequence_length=model_config.max_sequence_length,
        max_slots=config.max_batch_size or MAX_SLOTS,
        block_size=BLOCK_SIZE,
        eos_token_ids=model_config.eos_token_ids,
        suggested_prefill_tokens=_suggested_prefill_tokens(model_config, device, config.world_size),
        suggested_chunk_tokens=CPU_CHUNK_TOKENS if device.type == "cpu" else 0,
        max_top_n_tokens=MAX_TOP_N_TOKENS,
        grammar_kinds=grammars.kinds if grammars is not None else (),
        scores_generated=True,
        kv_cache_dtype="" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        max_tokens_per_step=1 + drafted,
        adapters=tuple(adapter.name for adapter in parse_adapters(config.lora_adapters)),
        max_loras=config.lora_slots,
        max_images=max_images(config, model_config),
    )


def _suggested_prefill_tokens(config: ModelDescription, device: torch.device, ranks: int) -> int:
    if device.type == "cpu":
        return CPU_PREFILL_TOKENS
    least, most = CUDA_PREFILL_TOKENS
    tokens = int(CUDA_CHUNK_PRODUCTS * ranks / config.active_weights)
    return min(max(1 << (tokens.bit_length() - 1), least), most)


def dtype_name(config: ShardConfig, model_config: ModelDescription, device: torch.device) -> str:
    """Return the data type of weights and activations: that of the settings, else of the checkpoint.

    A CPU without products of the latter computes in float32, which is several times as fast for prompts.
    """
    name = config.dtype or model_config.dtype
    return name if config.dtype or device.type != "cpu" or has_products(getattr(torch, name)) else "float32"


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise EngineError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N") from None
    if device.type not in DEVICES:
        raise EngineError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise EngineError(f"device {name!r} is not available")
        device = torch.device("cuda", device.index or 0)
    return device
