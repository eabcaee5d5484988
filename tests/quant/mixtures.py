"""Tiny mixtures of experts in 4 bits beside the same weights in floating point, with PEFT adapters on attention and experts."""

from __future__ import annotations

import torch
from torch import nn

from longreach.quant.experts import PRODUCTS, FourBitExperts, is_experts
from tests.exactness.models import build

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = [f"mlp.experts.{name}" for name in PRODUCTS]


def four_bit(model: nn.Module, format) -> nn.Module:
    """Every layer's experts replaced."""
    for name, module in list(model.named_modules()):
        if is_experts(module):
            model.set_submodule(name, FourBitExperts.of(module, format))
    return model


def pair(name: str, dtype: torch.dtype, format) -> tuple[nn.Module, nn.Module]:
    """(the dequantized weights in Transformers' modules, the same in 4 bits)."""
    whole, packed = build(name, dtype, lora=False), four_bit(build(name, dtype, lora=False), format)
    with torch.no_grad():
        for path, module in whole.named_modules():
            if is_experts(module):
                for product in PRODUCTS:
                    getattr(module, product).copy_(packed.get_submodule(path).dequantize(product, dtype))
    return whole, packed


def adapted(model: nn.Module, dtype: torch.dtype, **config) -> nn.Module:
    """PEFT's stock adapters; both matrices random."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    given = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "target_parameters": EXPERTS} | config
    model = get_peft_model(model, LoraConfig(**given)).to(dtype)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.1)
    return model.train()
