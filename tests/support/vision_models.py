"""Tiny random models of text and images, their folders, and prompts with pictures; the reference is transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_transformers import SHAPE, random_model, save
from transformers import AutoImageProcessor, PretrainedConfig, PreTrainedModel
from transformers.utils.import_utils import is_torchvision_available

from text_generation_proto.values import Stopping
from text_generation_shard.engine import Media, NewSequence
from text_generation_shard.engines.torch.engine.engine import TorchEngine
from text_generation_shard.engines.torch.models.huggingface.llama4_images import Llama4ImageProcessor

IMAGE, VIDEO, START, END = 3, 4, 5, 6
"""Ids of the placeholder of images, and of tokens around them."""
TEXT = SHAPE | {"tie_word_embeddings": False, "num_hidden_layers": 3}
SIDE, PATCH = 28, 14
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}
QWEN_VISION = {
    "depth": 3,
    "hidden_size": 16,
    "num_heads": 2,
    "out_hidden_size": SHAPE["hidden_size"],
    "patch_size": PATCH,
    "intermediate_size": 16,
}
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
GLM_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": START,
    "image_end_token_id": END,
}
PINPOINTS = [[28, 56], [56, 28], [56, 56]]
FIXED = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
PIXTRAL = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 112}}
QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "size": {"shortest_edge": 784, "longest_edge": 12 * 784},
}
GLM = QWEN | {"image_processor_type": "Glm4vImageProcessor"}
PROCESSOR_SETTINGS = {
    "gemma3": {"do_pan_and_scan": False},
    "internvl": {"crop_to_patches": True},
    "mistral3": {"patch_size": 2 * PATCH},
}
"""The arguments of the processor of images that the library's processors of texts and images give it, whatever its file says."""
LLAMA4_WIDTHS = ("projector_input_dim", "projector_output_dim", "vision_output_dim")
SMOLVLM = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": SIDE}}


def _rope(*sections: int) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}


def vision_configs() -> dict[str, tuple[PretrainedConfig, dict[str, object]]]:
    """Return the config of each family, and the settings of its processor of images."""
    llama, qwen2 = transformers.LlamaConfig(**TEXT).to_dict(), transformers.Qwen2Config(**TEXT).to_dict()
    clip, siglip, pixtral = (
        config(**VISION).to_dict()
        for config in (transformers.CLIPVisionConfig, transformers.SiglipVisionConfig, transformers.PixtralVisionConfig)
    )
    wide = TEXT | {"head_dim": 16}
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
    hybrid = {
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "rope_parameters": {**_rope(2, 1, 1), "partial_rotary_factor": 0.5, "mrope_interleaved": True},
    }
    qwen3 = QWEN_VISION | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    qwen3_5 = QWEN_VISION | {"num_position_embeddings": 16}
    gemma3 = wide | {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    gemma4 = gemma3 | {
        "sliding_window": 50,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
        "pad_token_id": 0,
    }
    glm = TEXT | {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rope_parameters": {**_rope(1, 1, 2), "partial_rotary_factor": 0.5},
    }
    glm_vision = {
        **VISION,
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": SHAPE["hidden_size"],
        "image_size": 4 * SIDE,
    }
    llama4 = TEXT | {"head_dim": 8, "num_local_experts": 4, "attention_chunk_size": 64, "no_rope_layers": [1, 0, 1]}
    idefics = {"scale_factor": 2, "pad_token_id": 0, "image_token_id": IMAGE}
    return {
        "llava": (
            transformers.LlavaConfig(text_config=llama, vision_config=clip, image_token_index=IMAGE),
            {"image_processor_type": "CLIPImageProcessor", **FIXED},
        ),
        "llava, pixtral": (
            transformers.LlavaConfig(
                text_config=llama,
                vision_config=pixtral,
                image_token_index=IMAGE,
                vision_feature_layer=-1,
                vision_feature_select_strategy="full",
            ),
            PIXTRAL | {"patch_size": PATCH},
        ),
        "mistral3": (
            transformers.Mistral3Config(
                text_config=transformers.MistralConfig(**TEXT, sliding_window=None).to_dict(),
                vision_config=pixtral,
                image_token_index=IMAGE,
                tie_word_embeddings=False,
            ),
            PIXTRAL | {"patch_size": {"height": PATCH, "width": PATCH}},
        ),
        "llava_next": (
            transformers.LlavaNextConfig(
                text_config=llama, vision_config=clip, image_token_index=IMAGE, image_grid_pinpoints=PINPOINTS
            ),
            {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": PINPOINTS, **FIXED},
        ),
        "llava_onevision": (
            transformers.LlavaOnevisionConfig(
                text_config=qwen2, vision_config=siglip, image_token_index=IMAGE, image_grid_pinpoints=PINPOINTS
            ),
            {
                "image_processor_type": "LlavaOnevisionImageProcessor",
                "size": {"height": SIDE, "width": SIDE},
                "image_grid_pinpoints": PINPOINTS,
            },
        ),
        "smolvlm": (
            transformers.SmolVLMConfig(text_config=llama, vision_config=dict(VISION), **idefics),
            {"image_processor_type": "SmolVLMImageProcessor", **SMOLVLM},
        ),
        "idefics3": (
            transformers.Idefics3Config(text_config=llama, vision_config=dict(VISION), **idefics),
            {"image_processor_type": "Idefics3ImageProcessor", **SMOLVLM},
        ),
        "internvl": (
            transformers.InternVLConfig(
                text_config=qwen2,
                vision_config=VISION | {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]},
                image_token_id=IMAGE,
            ),
            {
                "image_processor_type": "GotOcr2ImageProcessor",
                "crop_to_patches": False,
                "max_patches": 4,
                "size": {"height": SIDE, "width": SIDE},
            },
        ),
        "llama4": (
            transformers.Llama4Config(
                text_config=llama4,
                vision_config=VISION | {"patch_size": 7, "intermediate_size": 64} | dict.fromkeys(LLAMA4_WIDTHS, 24),
                image_token_index=IMAGE,
            ),
            {"image_processor_type": "Llama4ImageProcessor", "size": {"height": SIDE, "width": SIDE}, "max_patches": 5},
        ),
        "gemma3": (
            transformers.Gemma3Config(
                text_config=gemma3 | {"sliding_window": 10, "query_pre_attn_scalar": 24},
                vision_config={"model_type": "siglip_vision_model", **VISION, "image_size": 4 * SIDE},
                mm_tokens_per_image=16,
                image_token_index=IMAGE,
                tie_word_embeddings=False,
            ),
            {
                "image_processor_type": "Gemma3ImageProcessor",
                "size": {"height": 4 * SIDE, "width": 4 * SIDE},
                "do_pan_and_scan": True,
                "pan_and_scan_min_crop_size": 9,
                "pan_and_scan_max_num_crops": 4,
                "pan_and_scan_min_ratio_to_activate": 1.2,
            },
        ),
        "gemma4": (
            transformers.Gemma4Config(
                text_config=gemma4,
                vision_config=VISION | {"patch_size": 4, "num_key_value_heads": 2, "head_dim": 8},
                image_token_id=IMAGE,
                tie_word_embeddings=False,
            ),
            {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70},
        ),
        "glm4v": (transformers.Glm4vConfig(text_config=glm, vision_config=glm_vision, **GLM_IDS), GLM),
        "glm46v": (
            transformers.Glm46VConfig(
                text_config=glm | {"model_type": "glm4v_text"},
                vision_config=glm_vision | {"model_type": "glm4v_vision"},
                **GLM_IDS,
            ),
            GLM | {"image_processor_type": "Glm46VImageProcessor"},
        ),
        "glm4v_moe": (
            transformers.Glm4vMoeConfig(
                text_config=glm | experts | {"n_routed_experts": 8, "first_k_dense_replace": 1},
                vision_config=glm_vision,
                **GLM_IDS,
            ),
            GLM,
        ),
        "qwen2_vl": (
            transformers.Qwen2VLConfig(
                text_config=TEXT | {"rope_parameters": _rope(1, 1, 2)},
                vision_config={
                    "depth": 2,
                    "embed_dim": 16,
                    "hidden_size": SHAPE["hidden_size"],
                    "num_heads": 2,
                    "patch_size": PATCH,
                },
                **QWEN_IDS,
            ),
            QWEN,
        ),
        "qwen2_5_vl": (
            transformers.Qwen2_5_VLConfig(
                text_config=TEXT | {"rope_parameters": _rope(1, 1, 2)},
                vision_config=QWEN_VISION | {"fullatt_block_indexes": [1]},
                **QWEN_IDS,
            ),
            QWEN,
        ),
        "qwen3_vl": (
            transformers.Qwen3VLConfig(
                text_config=wide | {"rope_parameters": _rope(4, 2, 2)}, vision_config=qwen3, **QWEN_IDS
            ),
            QWEN,
        ),
        "qwen3_vl_moe": (
            transformers.Qwen3VLMoeConfig(
                text_config=wide | experts | {"rope_parameters": _rope(4, 2, 2)}, vision_config=qwen3, **QWEN_IDS
            ),
            QWEN,
        ),
        "qwen3_5": (
            transformers.Qwen3_5Config(text_config=wide | hybrid, vision_config=qwen3_5, **QWEN_IDS),
            QWEN,
        ),
        "qwen3_5_moe": (
            transformers.Qwen3_5MoeConfig(
                text_config=wide | hybrid | experts | {"shared_expert_intermediate_size": 40},
                vision_config=qwen3_5,
                **QWEN_IDS,
            ),
            QWEN,
        ),
    }


def picture(width: int, height: int, seed: int = 0, file_format: str = "PNG") -> bytes:
    """Return the file of a random picture."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, file_format)
    return file.getvalue()


@dataclass
class Prompt:
    """A prompt with pictures."""

    ids: tuple[int, ...]
    media: tuple[Media, ...]


class VisionModel:
    """A tiny model in a folder, by transformers."""

    def __init__(self, name: str, folder: Path) -> None:
        config, processor = vision_configs()[name]
        model = random_model(config)
        for parameter_name, weight in model.named_parameters():
            # The usual weights are so small that a picture would not matter.
            if "language_model" not in parameter_name and "text_model" not in parameter_name and weight.ndim > 1:
                torch.nn.init.normal_(weight, 0.0, 0.3)
        with torch.no_grad():
            model.get_output_embeddings().weight[: END + 1] = 0.0  # no text has a placeholder
        self.folder = save(model, folder)
        if name == "qwen3_vl_moe":
            _transpose_experts(folder / "model.safetensors")
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        self.model: PreTrainedModel = type(model).from_pretrained(folder, dtype=torch.float32).eval()
        self._settings = PROCESSOR_SETTINGS.get(config.model_type, {})
        self._known: dict[object, tuple[torch.Tensor, list[int]]] = {}
        self._nested = config.model_type in ("smolvlm", "idefics3")
        types = {
            "gemma3": "token_type_ids",
            "glm": "mm_token_type_ids",
            "qwen": "mm_token_type_ids",
            "gemma4": "mm_token_type_ids",
        }
        self._types = next((name for begin, name in types.items() if config.model_type.startswith(begin)), "")
        if name == "llama4" and not is_torchvision_available():  # which the library's needs
            self._processor: Any = Llama4ImageProcessor(processor)
        else:
            self._processor = AutoImageProcessor.from_pretrained(folder)

    def prompt(self, files: Sequence[bytes], start: Sequence[int] = (7, 8, 9, 10)) -> Prompt:
        """Return a prompt with text around and between the pictures in `files`."""
        ids, media = list(start), []
        for number, data in enumerate(files):
            count = self._tokens(data)
            media.append(Media(len(ids) + 1, count, hashlib.sha256(data).digest(), data))
            ids += [START, *[IMAGE] * count, END, 11 + number, 23]
        return Prompt((*ids, 33, 44, 55), tuple(media))

    def _inputs(self, files: Sequence[bytes]) -> dict[str, Any]:
        images = [Image.open(BytesIO(data)).convert("RGB") for data in files]
        if self.model.config.model_type == "llama4":
            tiles = [self._processor(images=[each], return_tensors="pt")["pixel_values"] for each in images]
            return {"pixel_values": torch.cat(tiles).float()}
        nested = [images] if self._nested else images
        inputs = dict(self._processor(images=nested, return_tensors="pt", **self._settings))
        return {name: each for name, each in inputs.items() if name not in ("num_patches", "num_crops")}

    def _tokens(self, data: bytes) -> int:
        with torch.inference_mode():
            # Of a single picture Pixtral's part of the library cannot return a single row.
            output = self.model.get_image_features(**self._inputs([data, data]))
        features = output.last_hidden_state if output.pooler_output is None else output.pooler_output
        return sum(each.numel() // each.shape[-1] for each in features) // 2

    def _logits(self, ids: Sequence[int], inputs: dict[str, Any]) -> torch.Tensor:
        known = torch.tensor([ids])
        if inputs and self._types:
            inputs = inputs | {self._types: (known == IMAGE).int()}
        with torch.inference_mode():
            logits: torch.Tensor = self.model(input_ids=known, use_cache=False, **inputs).logits[0]
        return logits.float()

    def reference(self, prompt: Prompt, count: int) -> tuple[torch.Tensor, list[int]]:
        """Return the log-probability of each token of a prompt after the first, and the most probable tokens after it."""
        key = prompt.ids, tuple(each.digest for each in prompt.media), count
        if key not in self._known:
            inputs = self._inputs([each.data for each in prompt.media]) if prompt.media else {}
            ids, logits = list(prompt.ids), self._logits(prompt.ids, inputs)
            scores = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
            ids.append(int(logits[-1].argmax()))
            while len(ids) < len(prompt.ids) + count:
                ids.append(int(self._logits(ids, inputs)[-1].argmax()))
            self._known[key] = scores, ids[len(prompt.ids) :]
        return self._known[key]

    def greedy(self, prompt: Prompt, count: int) -> list[int]:
        """Return the most probable tokens after a prompt."""
        return self.reference(prompt, count)[1]


def _transpose_experts(path: Path) -> None:
    """Store the tensors of all experts as Qwen3-VL does, [experts, inputs, outputs]."""
    tensors = load_file(path)
    stored = {name: each.transpose(1, 2).contiguous() if each.ndim == 3 else each for name, each in tensors.items()}
    save_file(stored, path, metadata={"format": "pt"})


def decoded(engine: TorchEngine, prompt: Prompt, computed: int = 0) -> dict[str, Any]:
    """Return the arguments by which a driver admits the pictures of a prompt, as a session does; waits for them."""
    assert engine.decode_images is not None
    new = NewSequence(0, prompt.ids, Stopping(max_new_tokens=1), media=prompt.media, computed_tokens=computed)
    images = engine.decode_images(new)
    wait([images])
    return {"media": prompt.media, "images": images}
