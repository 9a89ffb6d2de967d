"""LoRA adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

Everything but the values is checked before the model is loaded. Features that an engine would ignore are refused: trained biases, new
tokens and whole layers, DoRA.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from text_generation_common.log import log
from text_generation_common.lora import AdapterSource, parse_adapters
from text_generation_common.model_files import ModelFileError, find_file
from text_generation_common.one_line import one_line
from text_generation_shard.config import ShardConfig
from text_generation_shard.engine import EngineError
from text_generation_shard.json_object import JsonObject

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 1024
"""Limit of `r`, and of the rank of each matrix."""
DEFAULT_RANK = 16
"""Limit of the rank where no adapter is given at the start."""
MATCH_S = 0.1
"""Seconds of matching an expression with a name. A hostile one would not end."""
FROM_HIDDEN = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj"})
"""Modules whose input is the hidden state."""
REFUSED = {
    "use_dora": "DoRA is not supported",
    "modules_to_save": "trained layers beside the adapter (modules_to_save) are not supported",
    "target_parameters": "adapters of parameters (target_parameters), such as those of experts, are not supported",
    "trainable_token_indices": "trained tokens (trainable_token_indices) are not supported",
    "alora_invocation_tokens": "adapters that start at certain tokens (alora_invocation_tokens) are not supported",
    "layer_replication": "repeated layers (layer_replication) are not supported",
    "use_qalora": "QALoRA is not supported",
    "arrow_config": "Arrow is not supported",
    "lora_bias": "trained biases (lora_bias) are not supported",
}
"""Keys of adapter_config.json that must be absent or empty."""
CHANGES_MODEL = ("pissa", "corda", "olora", "loftq")
"""Starts of `init_lora_weights` for which PEFT changes the weights of the model before it adds the adapter."""

BASE = "base_model.model."
"""Before the names of modules in an adapter's file."""

_WEIGHT = re.compile(r"(?P<module>.+)\.lora_(embedding_(?P<of_embedding>[AB])|(?P<side>[AB])\.weight)")
_LAYER = re.compile(r"\.layers\.(\d{1,6})\.")
_TOWER = re.compile("vision|visual|audio")


@dataclass(frozen=True, slots=True)
class LoraModule:
    """The change of one module: W + scale · B·A; of an embedding, whose inputs are the tokens, Wᵀ + scale · B·A."""

    keys: tuple[str, str]
    """The names of A and B in the file."""
    rank: int
    outputs: int
    inputs: int
    scale: float
    base: str | None
    """The name of the model's own weight in the file, which PEFT writes beside the change of an embedding or an LM head."""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    name: str
    folder: Path
    changes: Mapping[str, LoraModule]
    """By the name of the module in the model."""
    has_scales: bool = False
    """True: its modules have a lora_alpha each (alpha_pattern)."""
    model: Path | None = None
    """The folder with the weights of the model; None if they are random."""

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return max(each.rank for each in self.changes.values())

    @property
    def modules(self) -> frozenset[str]:
        """Last parts of the names of the modules that it changes, such as `q_proj`."""
        return frozenset(name.rpartition(".")[2] for name in self.changes)


def read_adapters(config: ShardConfig) -> tuple[LoraAdapter, ...]:
    """Return the adapters of the settings, checked against the model's config.json. Raises EngineError."""
    sources = parse_adapters(config.lora_adapters)
    if config.lora_modules_dir and not Path(config.lora_modules_dir).is_dir():
        raise EngineError(f"--lora-modules-dir: {config.lora_modules_dir} is not a folder")
    if len(sources) > config.lora_limit:
        raise EngineError(
            f"--lora-adapters names {len(sources)} adapters, more than --max-cpu-loras {config.lora_limit}"
        )
    return tuple(read_adapter(source, config) for source in sources)


def module_folder(config: ShardConfig, path: str) -> Path:
    """Return the folder of an adapter below --lora-modules-dir. Raises EngineError, and FileNotFoundError if there is none."""
    root = Path(config.lora_modules_dir).resolve()
    try:
        folder = (root / path).resolve()
        files = [(folder / name).resolve() for name in (CONFIG, WEIGHTS)]
        exists = folder.is_dir()
    except (OSError, RuntimeError, ValueError):  # too long, links in a circle, a NUL
        raise EngineError("`lora_path` is not a path") from None
    if not all(root in each.parents for each in (folder, *files)):
        raise EngineError("`lora_path` must be a folder below --lora-modules-dir, also where links lead")
    if not exists:
        raise FileNotFoundError(f"there is no folder {path} below --lora-modules-dir")
    return folder


@dataclass(frozen=True, slots=True)
class LoraRoom:
    """The room for adapters in an engine."""

    slots: int
    """Adapters on the device."""
    rank: int
    """Limit of the rank."""
    takes_others: bool
    """Others than those of the start may come, which change any module."""

    @classmethod
    def of(cls, config: ShardConfig, adapters: Sequence[LoraAdapter]) -> "LoraRoom":
        """Return the room that the settings and the adapters of the start ask for."""
        rank = config.max_lora_rank or max((each.rank for each in adapters), default=DEFAULT_RANK)
        return cls(config.lora_slots, rank, bool(config.lora_modules_dir))


def read_adapter(source: AdapterSource, config: ShardConfig) -> LoraAdapter:
    """Return an adapter, checked against the model's config.json. Raises EngineError."""
    folder, model = Path(source.source), JsonObject.read(Path(config.model_path)).decoder()
    try:
        settings = JsonObject.read(folder, CONFIG)
    except (FileNotFoundError, NotADirectoryError):
        raise EngineError(f"the LoRA adapter {source.name}: {folder} has no {CONFIG}") from None
    settings = settings.advising(f"needed by the LoRA adapter {source.name}")
    kind, bias = settings.optional_text("peft_type") or "LORA", settings.optional_text("bias") or "none"
    if kind != "LORA":
        raise settings.error(f"peft_type is {kind}, not LORA")
    if bias != "none":
        raise settings.error(f"bias is {bias}: trained biases are not supported")
    for key, problem in REFUSED.items():
        if settings.get(key):
            raise settings.error(problem)
    if (start := str(settings.get("init_lora_weights")).lower()).startswith(CHANGES_MODEL):
        raise settings.error(
            f"init_lora_weights is {start[:100]!r}: the model's weights are changed too, which is not supported; save the adapter "
            "with PEFT's path_initial_model_for_weight_conversion"
        )
    if not settings.get("target_modules"):
        raise settings.error("target_modules is missing or empty")
    if (rank := settings.count("r")) > MAX_RANK:
        raise settings.error(f"r is {rank}, more than {MAX_RANK}")
    scales = _Scales.of(settings)
    base = settings.get("base_model_name_or_path") and settings.text("base_model_name_or_path")
    if base and config.model_id and base != config.model_id:
        log.warning("the LoRA adapter was trained on another model", adapter=source.name, trained_on=base)
    weights = None if config.load_format == "dummy" else Path(config.model_path)
    return LoraAdapter(source.name, folder.absolute(), _changes(folder, model, scales), bool(scales.alphas), weights)


@dataclass(frozen=True, slots=True)
class _Scales:
    """The factors of the changes: lora_alpha / rank, or lora_alpha / √rank with rslora (Kalajdzievski 2023, arXiv 2312.03732).

    The rank is that of the settings. A module that has the matrices of another one (ensure_weight_tying) may have another.
    """

    alpha: float
    rank: int
    alphas: Sequence[tuple[Callable[[str], bool], float]]
    """The lora_alpha of modules that have their own, which the functions tell by the name. EVA has one for each module."""
    ranks: Sequence[tuple[Callable[[str], bool], int]]
    """The same of the rank."""
    rank_stabilized: bool

    @classmethod
    def of(cls, settings: JsonObject) -> "_Scales":
        def patterns(key: str, setting: str) -> Iterator[tuple[Callable[[str], bool], JsonObject]]:
            for pattern, own in settings.inner(key).values.items() if settings.get(key) else ():
                yield _matcher(key, pattern), settings.merged({setting: own})

        alphas = [(fits, own.number("lora_alpha")) for fits, own in patterns("alpha_pattern", "lora_alpha")]
        ranks = [(fits, own.count("r")) for fits, own in patterns("rank_pattern", "r")]
        stabilized = settings.flag("use_rslora", default=False)
        return cls(settings.number("lora_alpha"), settings.count("r"), alphas, ranks, stabilized)

    def of_module(self, name: str) -> float:
        """Return the factor of a module: as in PEFT, the first pattern that fits has its alpha or rank."""
        alpha = next((alpha for fits, alpha in self.alphas if fits(name)), self.alpha)
        rank = next((rank for fits, rank in self.ranks if fits(name)), self.rank)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def _matcher(key: str, pattern: str) -> Callable[[str], bool]:
    """Return the function that tells if a name, or its end after a dot, matches a regular expression, as in PEFT.

    Both raise EngineError.
    """
    import regex  # an engine brings it, as safetensors

    def fits(name: str) -> bool:
        try:
            return expression.match(name, timeout=MATCH_S, concurrent=True) is not None
        except TimeoutError as error:
            raise EngineError(f"{wrong}: {one_line(error)}") from None

    wrong = f"{CONFIG}: {key} has {pattern[:100]!r}"
    try:
        expression = regex.compile(rf"(.*\.)?({pattern})$")
    except regex.error as error:
        raise EngineError(f"{wrong}: {one_line(error)}") from None
    return fits


def _changes(folder: Path, model: JsonObject, scales: "_Scales") -> Mapping[str, LoraModule]:
    path, shapes = folder / WEIGHTS, _shapes(folder)
    matrices = _matrices(path, shapes, model)
    if not matrices:
        raise EngineError(f"{path} holds no weights")
    changes: dict[str, LoraModule] = {}
    for module, sides in matrices.items():
        if sides.keys() != {"A", "B"}:
            raise EngineError(f"{path}: {module} has lora_{min(sides)} only: copy or download the folder again")
        keys = sides["A"], sides["B"]
        (rank, inputs), (outputs, inner) = (shapes[key] for key in keys)
        if rank != inner:
            raise EngineError(f"{path}: {module} has lora_A of rank {rank} and lora_B of rank {inner}")
        name, base = module.removeprefix(BASE), f"{module}.base_layer.weight"
        scale = scales.of_module(name)
        changes[name] = LoraModule(keys, rank, outputs, inputs, scale, base if base in shapes else None)
    return changes


def _matrices(path: Path, shapes: Mapping[str, Sequence[int]], model: JsonObject) -> Mapping[str, Mapping[str, str]]:
    """Return the names of A and B of each module in the file. Raises EngineError."""
    hidden = model.count("hidden_size") if "hidden_size" in model else None
    layers = model.count("num_hidden_layers") if "num_hidden_layers" in model else None
    matches = {key: _WEIGHT.fullmatch(key) for key in shapes}
    bases = {f"{found['module']}.base_layer.weight" for found in matches.values() if found is not None}
    modules: dict[str, dict[str, str]] = {}
    for key, found in matches.items():
        if key in bases:
            continue
        if found is None:
            raise EngineError(f"{path}: {key} is not a weight of a LoRA adapter that can be served")
        side = found["side"] or found["of_embedding"]
        module = found["module"].rpartition(".")[2]
        ranked, width = shapes[key] if side == "A" else shapes[key][::-1]
        if ranked > MAX_RANK:
            raise EngineError(f"{path}: the rank of {key} is {ranked}, more than {MAX_RANK}")
        if _TOWER.search(key):
            raise EngineError(f"{path}: {key} is of a tower: adapters change the decoder alone")
        if hidden and side == "A" and module in FROM_HIDDEN and width != hidden:
            raise EngineError(f"{path}: {key} is for a model with hidden_size {width}, and this one has {hidden}")
        layer = _LAYER.search(key)
        if layers and layer and int(layer[1]) >= layers:
            raise EngineError(f"{path}: {key} is for a model with more layers than the {layers} of this one")
        modules.setdefault(found["module"], {})[side] = key
    return modules


def _shapes(folder: Path) -> Mapping[str, Sequence[int]]:
    """Return the shapes of the matrices in the header of a safetensors file. Raises EngineError."""
    from safetensors import SafetensorError, safe_open  # an engine brings it; without adapters none is needed

    try:
        path = find_file(folder, WEIGHTS)
        with safe_open(path, framework="np") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 - it has no other iterator
    except FileNotFoundError:
        raise EngineError(f"{folder} has no {WEIGHTS}: no other format of adapters is loaded") from None
    except ModelFileError as error:
        raise EngineError(str(error)) from None
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{path} is not a safetensors file: {one_line(error)}") from None
    for key, shape in shapes.items():
        if len(shape) != 2 or 0 in shape:
            raise EngineError(f"{path}: {key} is not a matrix")
    return shapes
