"""Tiny models of every supported architecture, with structure switched on (windows, sinks, biases, routers, softcaps)."""

from __future__ import annotations

import contextlib

import torch
import transformers as T
from torch import nn

COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {**COMMON, "head_dim": 12}
MIXED = ["sliding_attention", "full_attention"] * 2
LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

CONFIGS = {
    "llama": lambda: T.LlamaConfig(**HEAD),
    "qwen2": lambda: T.Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=9, max_window_layers=2),
    "qwen3": lambda: T.Qwen3Config(**HEAD),
    "qwen3_moe": lambda: T.Qwen3MoeConfig(**HEAD, **MOE, decoder_sparse_step=1),
    "mistral": lambda: T.MistralConfig(**HEAD, sliding_window=9),
    "mixtral": lambda: T.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=11),
    "gemma2": lambda: T.Gemma2Config(
        **HEAD, sliding_window=7, query_pre_attn_scalar=12, attn_logit_softcapping=20.0, final_logit_softcapping=10.0
    ),
    "gemma3": lambda: T.Gemma3TextConfig(**HEAD, sliding_window=7, query_pre_attn_scalar=12, layer_types=MIXED),
    "gpt_oss": lambda: T.GptOssConfig(
        **{**HEAD, "intermediate_size": 32},
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=MIXED,
    ),
    "phi3": lambda: T.Phi3Config(**COMMON, sliding_window=9),
    "glm4": lambda: T.Glm4Config(**HEAD),
    "olmo2": lambda: T.Olmo2Config(**COMMON),
    "olmo3": lambda: T.Olmo3Config(**COMMON, sliding_window=8),
    "granite": lambda: T.GraniteConfig(**COMMON, logits_scaling=4.0, residual_multiplier=0.7, embedding_multiplier=2.0),
    "deepseek_v3": lambda: T.DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4},
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        first_k_dense_replace=1,
    ),
    "qwen3_next": lambda: T.Qwen3NextConfig(
        **HEAD,
        **LINEAR,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "qwen3_5": lambda: T.Qwen3_5TextConfig(**HEAD, **LINEAR),
}
HYBRID = ("qwen3_next", "qwen3_5")
LORA_TARGETS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj", "q_a_proj",
    "q_b_proj", "kv_b_proj", "in_proj_qkvz", "in_proj_qkv", "out_proj",
)  # fmt: skip


def build(
    name: str,
    dtype: torch.dtype,
    *,
    lora: bool,
    attention: str = "eager",
    seed: int = 0,
    spread: float = 0.15,
    **config,
) -> nn.Module:
    """A model with random weights and non-zero norms, sinks, biases, router and adapter."""
    torch.manual_seed(seed)
    cfg = CONFIGS[name]()
    for key, value in config.items():
        setattr(cfg, key, value)
    model = T.AutoModelForCausalLM.from_config(cfg, attn_implementation=attention).to(dtype)
    generator = torch.Generator().manual_seed(1)
    _perturb(model, generator, spread)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    if lora:
        from peft import LoraConfig, get_peft_model

        present = {n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        targets = [t for t in LORA_TARGETS if t in present]
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets)).to(dtype)
        with torch.no_grad():
            for n, p in model.named_parameters():
                if "lora_B" in n:
                    p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.1)
    return model.train()


def _perturb(model: nn.Module, generator: torch.Generator, scale: float) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) * scale)


@contextlib.contextmanager
def true_fp64():
    """Transformers casts norms, rotary angles and softmax to torch.float32 by name; for fp64 tests that name means fp64."""
    kept = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = kept


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def worst(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest max|difference| / max|expected| over parameters, and where."""
    out = (0.0, "")
    for name in sorted(set(expected) | set(got)):
        a, b = expected.get(name), got.get(name)
        zero = torch.zeros(())
        top = max(float((zero if a is None else a).abs().max()), 0.0)
        difference = float(((zero if a is None else a) - (zero if b is None else b)).abs().max())
        if top == 0.0 and difference == 0.0:
            continue
        out = max(out, (difference / max(top, 1e-30), name))
    return out
