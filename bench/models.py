"""Random models of real shapes, made on the device in bf16: speed and memory of a step do not depend on the values."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from longreach.context.shape import KNOWN, ModelShape

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 32


def shape_of(name: str, layers: int | None, tiny: bool) -> ModelShape:
    """A well-known shape by name, with fewer layers if asked for; `tiny` keeps the family and shrinks every width."""
    try:
        shape = KNOWN[name.lower()]
    except KeyError:
        raise SystemExit(f"--model {name}: choose one of {', '.join(s.name for s in KNOWN.values())}") from None
    if tiny:
        small = {"vocab": 512, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 128}
        shape = dataclasses.replace(shape, layers=2, windows=shape.windows[-2:], **small)
    if layers:
        # The last layers, so that a pattern of sliding and full attention keeps a full one.
        shape = dataclasses.replace(shape, layers=layers, windows=shape.windows[-layers:])
    return shape


def config_of(shape: ModelShape, positions: int) -> Any:
    """The Transformers config of a shape."""
    from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config

    kinds = {"qwen3": Qwen3Config, "llama": LlamaConfig, "gemma3_text": Gemma3TextConfig}
    extra: dict[str, Any] = {}
    if shape.kind == "gemma3_text":
        types = ["full_attention" if w is None else "sliding_attention" for w in shape.windows]
        window = next((w for w in shape.windows if w), 1024)
        extra = {"layer_types": types, "sliding_window": window, "query_pre_attn_scalar": shape.head_dim}
    return kinds[shape.kind](
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=max(positions, 64),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **extra,
    )


def build(
    shape: ModelShape, positions: int, device: str, *, dtype: torch.dtype = torch.bfloat16, attention: str = "sdpa"
) -> Any:
    """The bare model with random weights; the same seed gives every engine the same model."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config_of(shape, positions), dtype=dtype, attn_implementation=attention
        )
    return model.train()


def adapt(model: Any) -> Any:
    """LoRA r=32 on all seven kinds of linear layer; both matrices random, so that every gradient is alive."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=LINEARS, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def token_ids(count: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """[count] int64 on the CPU."""
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))
