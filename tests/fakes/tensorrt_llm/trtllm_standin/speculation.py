"""Speculative decoding: which kinds an LLM accepts, what they draft, and the parameters they cannot honour.

Sources: llm_args.py (1.2.1; main in mid 2026), _torch/speculative/interface.py, spec_sampler_base.py @be5be52f and mtp.py near 1.2.1,
unit tests of one_model_sampling_rejection_reason (main).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KINDS = (
    "MTPDecodingConfig",
    "EagleDecodingConfig",
    "Eagle3DecodingConfig",
    "NGramDecodingConfig",
    "DraftTargetDecodingConfig",
    "AutoDecodingConfig",
    "SADecodingConfig",
    "PARDDecodingConfig",
    "DFlashDecodingConfig",
    "DSparkDecodingConfig",
)
AUTO_DRAFT = 3
"""Tokens that AutoDecodingConfig drafts with few sequences: it chooses NGram by the batch size."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """The drafter of an engine."""

    kind: str
    draft_tokens: int
    """Tokens drafted in each step of a sequence."""
    one_model: bool
    """The drafter is part of the model: SpecSampler chooses the tokens, not TorchSampler."""
    samples: bool
    """Requests may sample; otherwise every request is greedy, without a message."""

    def tokens(self, generated: int) -> int:
        """Return the tokens of the next step: the first alone, then one to all drafted ones and one more."""
        return 1 if generated == 0 else 1 + generated * 7 // 3 % (self.draft_tokens + 1)


def read_speculation(config: Any, classes: Mapping[str, Any], *, by_type: bool) -> Speculation | None:  # noqa: ANN401
    """Return the drafter of `speculative_config`. Raises ValueError. `by_type`: a mapping may name its class."""
    if config is None:
        return None
    known = {kind: classes[kind] for kind in KINDS if kind in classes}
    if isinstance(config, Mapping):
        if not by_type:
            # 1.2.1: decoding_type is no field, and each class of the union forbids others. Only trtllm-serve converts.
            raise ValueError(
                f"{9 * 2} validation errors for TorchLlmArgs\ndecoding_type: Extra inputs are not permitted"
            )
        named = {cls.model_fields["decoding_type"].default: cls for cls in known.values()}
        if config.get("decoding_type") not in named:
            raise ValueError(
                f"1 validation error for TorchLlmArgs\nspeculative_config: {config.get('decoding_type')!r}"
            )
        config = named[config["decoding_type"]](**config)
    kind = type(config).__name__
    if kind not in known:
        raise ValueError(f"speculation type {kind} is not supported on the pytorch backend")
    draft = config.max_draft_len
    if kind == "MTPDecodingConfig":
        # 1.2.1 takes max_draft_len only from an argument num_nextn_predict_layers, and fails later without one.
        draft = (
            config.num_nextn_predict_layers
            if not by_type and "num_nextn_predict_layers" in config.model_fields_set
            else draft
        )
        draft = draft or (1 if by_type else None)
    if kind == "AutoDecodingConfig":
        draft = AUTO_DRAFT
    if not draft:
        raise ValueError(f"max_draft_len must be > 0 for {kind}")
    if kind.startswith(("Eagle", "DraftTarget", "PARD", "DFlash", "DSpark")) and config.speculative_model is None:
        raise ValueError(
            "Draft model must be provided for EAGLE" if kind[0] == "E" else "speculative_model must be specified"
        )
    one_model = {
        "MTPDecodingConfig": getattr(config, "mtp_eagle_one_model", False),
        "NGramDecodingConfig": False,
        "AutoDecodingConfig": False,
        # Their drafts are made in the forward pass of the target model (llm_args.py, use_one_engine).
        **dict.fromkeys(
            ("SADecodingConfig", "PARDDecodingConfig", "DFlashDecodingConfig", "DSparkDecodingConfig"), True
        ),
        "DraftTargetDecodingConfig": by_type,
    }.get(kind, getattr(config, "eagle3_one_model", False))
    return Speculation(kind, draft, one_model, samples=by_type or not one_model or config.allow_advanced_sampling)


def unsupported_sampling(params: Any) -> str | None:  # noqa: ANN401 - SamplingParams
    """Return why SpecSampler refuses the parameters; None if it does not (one_model_sampling_rejection_reason)."""
    asked = {
        "min_tokens": bool(params.min_tokens),
        "bad words": bool(params.bad or params.bad_token_ids),
        "no_repeat_ngram_size": bool(params.no_repeat_ngram_size),
        "embedding_bias": params.embedding_bias is not None,
        "min_p": bool(params.min_p),
    }
    return next(
        (
            f"{name} is not supported with one-model speculative decoding"
            for name, is_asked in asked.items()
            if is_asked
        ),
        None,
    )
