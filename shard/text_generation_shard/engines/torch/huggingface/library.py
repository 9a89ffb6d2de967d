"""The parts of transformers that the backend uses. Importing them takes seconds: only models that need them do.

No code of a model folder is run: configs and classes are those of the library, and nothing is fetched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import transformers
from torch import Tensor
from torch.nn import Linear
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.utils import logging

from text_generation_shard.engine import EngineError

OLDEST = (4, 57)
"""First version with the arguments and the attention interface that this backend uses."""
VERSION: str = transformers.__version__

TEXT_TYPE = "_text"
"""End of the model types of text parts."""

LibraryConfig: TypeAlias = Any
"""A PretrainedConfig: each has attributes of its own."""
LibraryModel: TypeAlias = Any
"""A PreTrainedModel, whose interface has no complete types."""
LibraryModule: TypeAlias = Any
"""A module of a model. Each has attributes of its own."""


def check_version() -> None:
    """Raise EngineError if this version of transformers is too old; keep the library's warnings out of the log."""
    if tuple(int(part) for part in VERSION.split(".")[:2]) < OLDEST:
        raise EngineError(f"transformers {VERSION} is too old, at least {'.'.join(map(str, OLDEST))} is needed")
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def config_from_json(values: dict[str, Any]) -> LibraryConfig:
    """Return the config of a config.json. Raises an error of any type if the library does not take it."""
    with warnings.catch_warnings(action="ignore"):
        return CONFIG_MAPPING[values["model_type"]].from_dict(_with_floats(values))


def is_known(model_type: str) -> bool:
    """Return True if this version of transformers has a config for `model_type`."""
    return model_type in CONFIG_MAPPING


def decoder_class(config: LibraryConfig) -> LibraryModel:
    """Return the class that generates text with models of `config`; None if there is none."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if (
        found is None
        and config.model_type.endswith(TEXT_TYPE)
        and (text_model := MODEL_MAPPING.get(type(config), None))
    ):
        return _with_head(text_model)
    return found[0] if isinstance(found, tuple) else found


def _with_head(text_model: LibraryModel) -> LibraryModel:
    """Return a class of the text part of a model of several modalities with an LM head: the library has only both parts."""

    def init(self: LibraryModel, config: LibraryConfig) -> None:
        pretrained.__init__(self, config)
        self.model = text_model(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self: LibraryModel, input_ids: Tensor, **named: object) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids=input_ids, **named).last_hidden_state))

    pretrained = text_model.__mro__[1]
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    members = {
        "__init__": init,
        "__module__": text_model.__module__,
        "forward": forward,
        "config_class": text_model.config_class,
        "base_model_prefix": "model",
        "_tied_weights_keys": {head: embedding} if int(VERSION.split(".")[0]) > OLDEST[0] else [head],
    }
    return type(f"{text_model.__name__.removesuffix('Model')}ForCausalLM", (pretrained,), members)


def register_attention(name: str, function: Callable[..., object]) -> None:
    """Make `function` the attention of models whose config asks for `name`."""
    ALL_ATTENTION_FUNCTIONS.register(name, function)


def new_cache(config: LibraryConfig) -> Any:  # noqa: ANN401 – see LibraryModel
    """Return an empty cache of the library for one sequence."""
    return DynamicCache(config=config)


def base_of(model: LibraryModel) -> LibraryModel:
    """Return the part of a model whose output its LM head gets."""
    decoder = model.get_decoder()
    if isinstance(decoder, PreTrainedModel) and decoder is not model:
        return decoder
    return model.base_model if model.base_model is not model else model.model


def use_attention(model: LibraryModel, name: str) -> None:
    """Let every part of the model use the attention function `name`."""
    for module in model.modules():
        if (config := getattr(module, "config", None)) is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


def _with_floats(value: Any) -> Any:  # noqa: ANN401 – JSON
    """Return JSON with the numbers that JSON has not, as the library writes them: {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        return (
            float(value["__float__"]) if set(value) == {"__float__"} else {k: _with_floats(v) for k, v in value.items()}
        )
    return [_with_floats(each) for each in value] if isinstance(value, list) else value
