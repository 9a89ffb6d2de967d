"""The parts of transformers that the backend uses. Importing them takes seconds: only models that need them do.

No code of a model folder is run: configs and classes are those of the library, and nothing is fetched.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import transformers
from transformers import DynamicCache, PreTrainedModel, conversion_mapping
from transformers.image_processing_base import ImageProcessingMixin
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)
from transformers.utils import logging
from transformers.utils.import_utils import is_torchvision_available

from text_generation_shard.engines.torch.models.huggingface.llama4_images import Llama4ImageProcessor

VERSION: str = transformers.__version__

WRAPPERS: tuple[Any, ...] = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING
"""The mappings of models of several modalities."""
PROCESSOR_SETTINGS: dict[str, dict[str, Any]] = {
    "gemma3": {"do_pan_and_scan": False},
    "internvl": {"crop_to_patches": True},
}
"""The defaults of processors of texts and images, which win over the files of a model, by model_type."""
CONFIG_FILE, MODEL_FILE = "configuration_", "modeling_"
"""Begins of the names of the library's modules."""
ALIASES = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Model types with code of their own that computes the same as a model of the library, from the same fields and tensors."""

LibraryConfig: TypeAlias = Any
"""A PretrainedConfig: each has attributes of its own."""
LibraryModel: TypeAlias = Any
"""A PreTrainedModel, whose interface has no complete types."""
LibraryModule: TypeAlias = Any
"""A module of a model. Each has attributes of its own."""


def silence() -> None:
    """Keep the library's warnings out of the log."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def config_from_json(values: dict[str, Any]) -> LibraryConfig:
    """Return the config of a config.json. Raises an error of any type if the library does not take it."""
    with warnings.catch_warnings(action="ignore"):
        values = _as_known(values)
        return CONFIG_MAPPING[values["model_type"]].from_dict(values)


def is_known(model_type: str) -> bool:
    """Return True if this version of transformers has a config for `model_type`."""
    return ALIASES.get(model_type, model_type) in CONFIG_MAPPING


def decoder_class(whole: LibraryConfig) -> tuple[LibraryModel, LibraryConfig] | None:
    """Return the class that generates text with models of `whole`, and the config that it takes; None if there is none.

    For a model of several modalities this is the class of its text part, if the library has one, else its own class without the
    other parts.
    """
    text = whole.get_text_config(decoder=True)
    found = _mapped(MODEL_FOR_CAUSAL_LM_MAPPING, text) or _unlisted(text)
    if found is not None:
        return found, text
    wrapper = next((each for each in (_mapped(mapping, whole) for mapping in WRAPPERS) if each is not None), None)
    return None if wrapper is None else (_text_part(wrapper), whole)


def _mapped(mapping: Any, config: LibraryConfig) -> LibraryModel | None:  # noqa: ANN401 – a mapping of the library
    try:
        found = mapping.get(type(config), None)
    except ValueError:  # the mapping names a class that the library has not
        return None
    return found[0] if isinstance(found, tuple) else found


def _unlisted(config: LibraryConfig) -> LibraryModel | None:
    """Return the class for text with this config that the library has, although no mapping names it."""
    name = type(config).__module__
    if not name.rpartition(".")[2].startswith(CONFIG_FILE):
        return None
    module = import_module(name.replace(f".{CONFIG_FILE}", f".{MODEL_FILE}"))
    classes = (each for name, each in vars(module).items() if name.endswith("ForCausalLM"))
    return next((each for each in classes if each.config_class is type(config)), None)


def _text_part(wrapper: LibraryModel) -> LibraryModel:
    """Return the class of a model of several modalities without its parts that a text does not pass.

    So the names of tensors, their conversion and the last steps to the logits are those of the whole model.
    """

    def init(self: LibraryModel, config: LibraryConfig) -> None:
        wrapper.__init__(self, config)
        decoder, head = base_of(self), self.get_output_embeddings()
        passed = [module for module in self.modules() if decoder in module.modules() or head in module.modules()]
        for module in passed:
            if module is decoder or module is head:
                continue
            for name, child in module.named_children():
                if child not in passed and any(True for _ in child.parameters()):
                    setattr(module, name, None)

    return type(wrapper.__name__, (wrapper,), {"__init__": init, "__module__": wrapper.__module__})


def image_part(whole: LibraryConfig) -> LibraryModel:
    """Return the class of a model of text and images without its decoder and its LM head. Raises LookupError if there is none."""
    wrapper = next(each for each in (_mapped(mapping, whole) for mapping in WRAPPERS) if each is not None)
    whole.tie_word_embeddings = False

    def init(self: LibraryModel, config: LibraryConfig) -> None:
        wrapper.__init__(self, config)
        dropped = self.get_decoder(), self.get_output_embeddings()
        for module in list(self.modules()):
            for name, child in list(module.named_children()):
                if child in dropped:
                    setattr(module, name, None)

    return type(wrapper.__name__, (wrapper,), {"__init__": init, "__module__": wrapper.__module__})


def image_processor(folder: Path, whole: LibraryConfig) -> Callable[..., Any]:
    """Return the image processor of a folder's model; as in the library, with torchvision if that is installed, else Pillow."""
    if whole.model_type == "llama4" and not is_torchvision_available():
        return Llama4ImageProcessor(ImageProcessingMixin.get_image_processor_dict(folder)[0])
    processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True)  # type: ignore[no-untyped-call]
    settings = PROCESSOR_SETTINGS.get(whole.model_type, {})
    if whole.vision_config.model_type == "pixtral":
        # Sides are multiples of the squares that become one token.
        settings = {"patch_size": whole.vision_config.patch_size * getattr(whole, "spatial_merge_size", 1)}
    return partial(processor, **settings)


def share_conversions(whole: LibraryConfig, model_class: LibraryModel) -> None:
    """Convert the tensors of a text part, such as those of single experts, as the library does for the whole model."""
    conversions: Callable[[str], list[Any] | None] = conversion_mapping.get_checkpoint_conversion_mapping
    known = (model_class.__name__, whole.get_text_config(decoder=True).model_type)
    given = conversions(whole.model_type) or []
    if any(hasattr(each, "operations") for each in given) and not any(conversions(name) for name in known):
        conversion_mapping.register_checkpoint_conversion_mapping(model_class.__name__, given)


def register_attention(name: str, function: Callable[..., object]) -> None:
    ALL_ATTENTION_FUNCTIONS.register(name, function)


def new_cache(config: LibraryConfig) -> Any:  # noqa: ANN401 – see LibraryModel
    return DynamicCache(config=config)


def base_of(model: LibraryModel) -> LibraryModel:
    """Return the part of a model whose output its LM head gets."""
    decoder = model.get_decoder()
    if isinstance(decoder, PreTrainedModel) and decoder is not model:
        return decoder
    return model.base_model if model.base_model is not model else model.model


def parts_before_head(model: LibraryModel) -> list[LibraryModel]:
    """Return the parts of a model that have the decoder and not the LM head: the head gets the output of one of them."""
    decoder, head = base_of(model), model.get_output_embeddings()
    return [each for each in model.modules() if decoder in (parts := list(each.modules())) and head not in parts]


class HiddenStates(BaseModelOutput):
    """The output of a base model, which has no other parts, under any name."""

    def __getattr__(self, name: str) -> None:
        return None


def use_attention(model: LibraryModel, name: str) -> None:
    """Let all parts of a model use `name`; `set_attn_implementation` skips classes that do not declare the interface."""
    for module in model.modules():
        if (config := getattr(module, "config", None)) is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


@contextmanager
def changed(places: Sequence[tuple[LibraryModule | LibraryConfig, str]], value: Any) -> Iterator[None]:  # noqa: ANN401 – of an attribute
    """Give attributes of objects another value for a time; those that only the class has are removed again."""
    before = [holder.__dict__.get(name) for holder, name in places]
    for holder, name in places:
        holder.__dict__[name] = value
    try:
        yield
    finally:
        for (holder, name), own in zip(places, before, strict=True):
            if own is None:
                del holder.__dict__[name]
            else:
                holder.__dict__[name] = own


def _as_known(value: Any) -> Any:  # noqa: ANN401 – JSON
    """Return JSON with known model types, and the numbers that JSON has not, as the library writes them: {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {
            key: ALIASES.get(each, each) if key == "model_type" and isinstance(each, str) else _as_known(each)
            for key, each in value.items()
        }
    return [_as_known(each) for each in value] if isinstance(value, list) else value
