"""Draft models of the form of EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a layer of Llama over hidden states of another model.

Its attention reads the embedding e of the next token and a hidden state h, both normed; h is a projection of the hidden states
before three layers of the model, and the output of the layer itself for further drafts:

    y = h + attention([norm(e), norm(h)])        h' = y + mlp(y)        logits = head · norm(h')

Logits are those of a part of the vocabulary; `d2t` has the differences to the tokens of the model. Read are the format of the
authors and of SGLang (`midlayer.*`) and that of the library speculators (`layers.0.*`).
"""

from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from text_generation_shard.engine import EngineError
from text_generation_shard.engines.torch.models.native.config import read_model_config
from text_generation_shard.engines.torch.models.native.model_config import ModelConfig, PredictionConfig
from text_generation_shard.engines.torch.models.native.prediction_names import PredictionNames
from text_generation_shard.engines.torch.weights.checkpoint import Checkpoint
from text_generation_shard.json_object import JsonObject

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
SERVED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
    "parallel_drafting": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "use_aux_norm": False,
    "norm_output": False,
}
"""Fields of other forms, with the values of this one."""


def read_eagle(folder: Path, target: ModelConfig, *, has_files: bool) -> PredictionConfig:
    """Read the draft model of `folder` for `target`; `has_files`: False with random weights. Raises EngineError."""
    try:
        whole = JsonObject.read(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise EngineError(f"--speculator: {folder / 'config.json'} does not exist") from None
    kind = whole.optional_text("speculators_model_type")
    own = whole if kind is None else whole.inner("transformer_layer_config")
    nested = whole.inner("eagle_config").values if "eagle_config" in whole else {}
    named = kind or str(whole.get("architectures"))
    if "eagle3" not in named.lower() and (kind or "draft_vocab_size" not in whole):
        raise whole.error(f"no draft model of the form of EAGLE-3: {shortened(named)}")
    for name, served in SERVED.items():
        if (value := {**whole.values, **nested}.get(name)) not in (None, served):
            raise whole.error(f"{name} {shortened(value)} is not supported, only {served}")
    if own.get("model_type") not in (None, "llama"):
        raise own.error(f"a draft model of type {shortened(own.get('model_type'))} is not supported, only llama")
    changes = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    model = read_model_config(folder, whole=own.merged(changes))
    target_hidden = whole.count("target_hidden_size", own.get("target_hidden_size") or model.hidden_size)
    for what, size, wanted in (
        ("num_hidden_layers", model.num_layers, 1),
        ("vocab_size", model.vocab_size, target.vocab_size),
        ("the hidden size of its target", target_hidden, target.hidden_size),
    ):
        if size != wanted:
            raise whole.error(f"{what} is {size}, the model needs {wanted}")
    if model.quantization is not None:
        raise whole.error("quantized draft models are not supported")
    names = Checkpoint(folder).names if has_files else []
    has_embedding, has_head = "embed_tokens.weight" in names, not has_files or "lm_head.weight" in names
    if has_files and not (has_embedding and has_head) and model.hidden_size != target.hidden_size:
        lacks = "LM head" if has_embedding else "embedding"
        raise whole.error(f"it has no {lacks}, and the hidden size {model.hidden_size}, not {target.hidden_size}")
    drafted = whole.count("draft_vocab_size", model.vocab_size)
    if not has_head and drafted != target.vocab_size:
        raise whole.error(f"it has no LM head, and draft_vocab_size is {drafted}, not {target.vocab_size}")
    layer = "layers.0." if any(name.startswith("layers.0.") for name in names) else "midlayer."
    return PredictionConfig(
        names=PredictionNames("", f"{layer}input_layernorm", f"{layer}hidden_norm", "fc", "norm", layer=layer),
        model=model,
        folder=folder,
        taken_before=_layers(whole, nested.get(LAYER_IDS), target.num_layers),
        inputs=3 * target_hidden,
        draft_vocab_size=drafted,
        is_mapped="d2t" in names,
        has_embedding=has_embedding,
        has_head=has_head,
        norm_before_residual=whole.flag("norm_before_residual", default=kind is not None),
    )


def _layers(whole: JsonObject, inner: object, count: int) -> tuple[int, ...]:
    """Return the layers before which the hidden states are taken; `inner`, the ids in eagle_config, are the layers before these."""
    ids: Any = inner or whole.get(LAYER_IDS) or [2, count // 2, count - 3]
    is_list = isinstance(ids, list) and all(isinstance(each, int) for each in ids)
    layers = tuple(sorted({each + bool(inner) for each in ids})) if is_list else ()
    if len(layers) != 3 or layers[0] < 0 or layers[-1] > count:
        raise whole.error(f"{LAYER_IDS} is {shortened(ids)}, not three layers of {count}")
    return layers
