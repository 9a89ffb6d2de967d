"""Writes tests/corpus/quantized: weights that the libraries of each format packed, and what they dequantize them to.

Needs an environment of its own, because some of these libraries pin torch: compressed-tensors 0.20.0, transformers 5, bitsandbytes 0.50.2, and the
files of auto-gptq 0.7.1 and autoawq 0.2.9, unpacked:

    python tests/support/make_quantized_corpus.py --auto-gptq FOLDER --autoawq FOLDER --out tests/corpus/quantized

Each case is the file NAME.safetensors: the tensors of a module `m`, `expected` (the dequantized weight) and in its metadata the
quantization config of a checkpoint.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

OUTPUTS, INPUTS = 32, 64
FP8 = torch.float8_e4m3fn


def main() -> None:
    """Write all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--auto-gptq", type=Path, required=True)
    parser.add_argument("--autoawq", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    cases = {
        **gptq(module(options.auto_gptq / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py")),
        **awq(module(options.autoawq / "awq/utils/packing_utils.py")),
        **compressed_tensors(),
        **transformers(),
        **bitsandbytes(),
    }
    for name, (config, tensors, expected) in cases.items():
        stored = {f"m.{key}": tensor.contiguous().clone() for key, tensor in tensors.items()}
        save_file(
            stored | {"expected": expected.contiguous().clone()},
            options.out / f"{name}.safetensors",
            {"quantization_config": json.dumps(config)},
        )


Case = tuple[dict[str, Any], dict[str, Tensor], Tensor]


def module(path: Path) -> ModuleType:
    """Return the module of a file without its package, which needs more libraries."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def gptq(library: ModuleType) -> dict[str, Case]:
    """Pack by AutoGPTQ's QuantLinear, and let it multiply with the unit matrix."""
    cases: dict[str, Case] = {}
    for name, bits, size, act_order in (
        ("gptq-int4", 4, 32, False),
        ("gptq-int4-act-order", 4, 16, True),
        ("gptq-int8-whole", 8, -1, False),
    ):
        linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False).half()
        groups = 1 if size == -1 else INPUTS // size
        g_idx = torch.arange(INPUTS) // (INPUTS if size == -1 else size)
        g_idx = g_idx[torch.randperm(INPUTS)] if act_order else g_idx
        scales = (torch.rand(OUTPUTS, groups) * 0.02 + 0.01).half()
        zeros = torch.randint(1, (1 << bits) - 1, (OUTPUTS, groups))
        codes = torch.randint(0, 1 << bits, (OUTPUTS, INPUTS))
        linear.weight.data = (codes - zeros[:, g_idx]).half() * scales[:, g_idx]
        layer = library.QuantLinear(bits, size, INPUTS, OUTPUTS, bias=False, weight_dtype=torch.float16)
        layer.pack(linear, scales.float(), zeros.float(), g_idx.int())
        expected = layer(torch.eye(INPUTS, dtype=torch.float16)).t()
        tensors = {key: getattr(layer, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
        config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": False, "desc_act": act_order}
        cases[name] = config, tensors, expected
        if not act_order:
            # Format gptq_v2 differs in the zero points alone.
            ones = {4: 0x11111111, 8: 0x01010101}[bits]
            tensors = tensors | {"qzeros": layer.qzeros + ones}
            cases[f"{name}-v2"] = config | {"checkpoint_format": "gptq_v2"}, tensors, expected
    return cases


def awq(library: ModuleType) -> dict[str, Case]:
    """Dequantize random words by AutoAWQ's function."""
    words = torch.randint(-(1 << 31), 1 << 31, (INPUTS, OUTPUTS // 8)).int()
    zeros = torch.randint(-(1 << 31), 1 << 31, (INPUTS // 32, OUTPUTS // 8)).int()
    scales = (torch.rand(INPUTS // 32, OUTPUTS) * 0.02 + 0.01).half()
    expected = library.dequantize_gemm(words, zeros, scales, 4, 32).t()
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return {"awq": (config, {"qweight": words, "qzeros": zeros, "scales": scales}, expected)}


def compressed_tensors() -> dict[str, Case]:
    """Compress and decompress by the library."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    def group(bits: int, size: int, symmetric: bool = True) -> dict[str, Any]:
        return {"num_bits": bits, "type": "int", "strategy": "group", "group_size": size, "symmetric": symmetric}

    channel = {"type": "int", "strategy": "channel", "num_bits": 8}
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    fp4 = {"num_bits": 4, "type": "float", "symmetric": True}
    tokens = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    schemes: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
        "pack-int4": ("pack-quantized", group(4, 32), None),
        "pack-int4-zero": ("pack-quantized", group(4, 32, symmetric=False), None),
        "pack-int8-channel": ("pack-quantized", channel | {"symmetric": True}, None),
        "pack-int8-channel-zero": ("pack-quantized", channel | {"symmetric": False}, None),
        "int8-channel": ("int-quantized", channel | {"symmetric": True}, None),
        "float8-channel": ("float-quantized", fp8 | {"strategy": "channel"}, tokens),
        "float8-block": ("float-quantized", fp8 | {"strategy": "block", "block_structure": [12, 48]}, None),
        "nvfp4": ("nvfp4-pack-quantized", fp4 | {"strategy": "tensor_group", "group_size": 16}, None),
        "mxfp4": ("mxfp4-pack-quantized", fp4 | {"strategy": "group", "group_size": 32}, None),
    }
    cases: dict[str, Case] = {}
    for name, (kind, weights, inputs) in schemes.items():
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
        state = {"weight": torch.randn(OUTPUTS, INPUTS, dtype=torch.bfloat16)}
        width = weights.get("group_size") or INPUTS
        state["weight_scale"] = (torch.rand(OUTPUTS, INPUTS // width) * 0.2 + 0.1).to(torch.bfloat16)
        if weights["strategy"] == "block":
            state["weight_scale"] = (torch.rand(3, 2) * 0.2 + 0.1).to(torch.bfloat16)
        if weights["strategy"] == "tensor_group":
            state["weight_global_scale"] = torch.tensor([37.3])
            state["weight_scale"] = torch.rand(OUTPUTS, INPUTS // 16) * 20 + 1
        if name == "mxfp4":
            state["weight_scale"] = torch.randint(-4, 5, (OUTPUTS, INPUTS // 32)).to(torch.bfloat16).exp2()
        if not weights["symmetric"]:
            half = 1 << (weights["num_bits"] - 1)
            state["weight_zero_point"] = torch.randint(-half, half, state["weight_scale"].shape).to(torch.int8)
        compressor = BaseCompressor.get_value_from_registry(kind)
        stored = compressor.compress(state, scheme)
        expected = compressor.decompress(dict(stored), scheme)["weight"]
        config = {"quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"]}
        config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
        cases[f"compressed-tensors-{name}"] = config, stored, expected
    return cases


def transformers() -> dict[str, Case]:
    """Dequantize random tensors by the functions that transformers loads with."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weight = torch.randn(OUTPUTS, INPUTS).to(FP8)
    block = {"weight": weight, "weight_scale_inv": torch.rand(4, 2) * 0.1}
    whole = {"weight": weight, "weight_scale_inv": torch.rand(1) * 0.1}
    fp8 = Fp8Dequantize(None)
    blocks = torch.randint(0, 256, (3, 32, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (3, 32, 2), dtype=torch.uint8)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return {
        "fp8-block": (config | {"weight_block_size": [8, 32]}, block, fp8.convert(dict(block))["weight"]),
        "fp8-tensor": (config, whole, weight.float() * whole["weight_scale_inv"]),
        "mxfp4-experts": (
            {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
            {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": scales},
            convert_moe_packed_tensors(blocks, scales),
        ),
    }


def bitsandbytes() -> dict[str, Case]:
    """Quantize and dequantize by the library, on a CPU."""
    from bitsandbytes import functional

    cases: dict[str, Case] = {}
    weight = torch.randn(OUTPUTS, INPUTS, dtype=torch.bfloat16)
    for name, kind, nested in (("nf4-nested", "nf4", True), ("nf4", "nf4", False), ("fp4", "fp4", False)):
        codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
        tensors = {"weight": codes} | {f"weight.{key}": each for key, each in state.as_dict(packed=True).items()}
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        cases[f"bitsandbytes-{name}"] = config, tensors, functional.dequantize_4bit(codes, state)
    codes, scale, _ = functional.int8_vectorwise_quant(weight.half())
    tensors = {"weight": codes, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    cases["bitsandbytes-int8"] = config, tensors, functional.int8_vectorwise_dequant(codes, scale)
    return cases


if __name__ == "__main__":
    main()
