"""Random models of real shapes, made on the device in bf16: speed and memory of a step do not depend on the values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from longreach.context.shape import KNOWN, ModelShape

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 32
OPTIMIZERS = ("adamw", "adamw8bit", "paged8bit")  # PyTorch's, fused on a GPU; bitsandbytes'


def shape_of(name: str, layers: int | None, tiny: bool) -> ModelShape:
    """A well-known shape by name, with fewer layers if asked for; `tiny` keeps the family and shrinks every width."""
    try:
        shape = KNOWN[name.lower()]
    except KeyError:
        raise SystemExit(f"--model {name}: choose one of {', '.join(s.name for s in KNOWN.values())}") from None
    if tiny:
        small = {"vocab": 512, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 128}
        small |= {"experts": 4, "active": 2} if shape.experts else {}
        shape = dataclasses.replace(shape, layers=2, windows=shape.windows[-2:], **small)
    if layers:
        # The last layers, so that a pattern of sliding and full attention keeps a full one.
        shape = dataclasses.replace(shape, layers=layers, windows=shape.windows[-layers:])
    return shape


def config_of(shape: ModelShape, positions: int) -> Any:
    """The Transformers config of a shape."""
    from transformers import Gemma3TextConfig, GptOssConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    kinds = {
        "qwen3": Qwen3Config, "llama": LlamaConfig, "gemma3_text": Gemma3TextConfig, "gpt_oss": GptOssConfig,
        "qwen3_moe": Qwen3MoeConfig,
    }  # fmt: skip
    extra: dict[str, Any] = {}
    if shape.kind in ("gemma3_text", "gpt_oss"):
        types = ["full_attention" if w is None else "sliding_attention" for w in shape.windows]
        extra = {"layer_types": types, "sliding_window": next((w for w in shape.windows if w), 1024)}
    if shape.kind == "gemma3_text":
        extra["query_pre_attn_scalar"] = shape.head_dim
    if shape.kind == "gpt_oss":
        extra |= {"num_local_experts": shape.experts, "num_experts_per_tok": shape.active}
        # the context of the rotary table, without YaRN's factor: it changes no size
        extra["rope_parameters"] = {"rope_type": "default", "rope_theta": 150000.0}
    if shape.kind == "qwen3_moe":
        extra |= {"num_experts": shape.experts, "num_experts_per_tok": shape.active}
        extra |= {"moe_intermediate_size": shape.mlp, "norm_topk_prob": True}
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
    if shape.kind == "gpt_oss" and attention == "sdpa":
        attention = "eager"  # its sinks have no other implementation in Transformers that runs everywhere
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


def optimizer(kind: str, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """One of `OPTIMIZERS` over the parameters."""
    params = list(params)
    if kind == "adamw":
        return torch.optim.AdamW(params, lr=1e-5, fused=params[0].is_cuda)
    import bitsandbytes

    classes = {"adamw8bit": bitsandbytes.optim.AdamW8bit, "paged8bit": bitsandbytes.optim.PagedAdamW8bit}
    return classes[kind](params, lr=1e-5)


def pack(model: Any, weights: str) -> Any:
    """Linear layers and experts of the decoder in a 4-bit format; of gpt-oss in "mxfp4" the experts only, as published."""
    from longreach.quant.experts import FourBitExperts, is_experts
    from longreach.quant.formats import MXFP4, NF4
    from longreach.quant.linear import FourBitLinear

    form = {"nf4": NF4(), "mxfp4": MXFP4()}[weights]
    linears = not (weights == "mxfp4" and model.config.model_type == "gpt_oss")
    for layer in model.get_decoder().layers:
        for name, module in list(layer.named_modules()):
            if is_experts(module):
                layer.set_submodule(name, FourBitExperts.of(module, form))
            elif linears and type(module) is torch.nn.Linear:
                layer.set_submodule(name, FourBitLinear.of(module, form))
    return model


def write(shape: Any, positions: int, folder: Path, device: str) -> None:
    """Config, random weights, and a tokenizer of as many words, which some loaders insist on."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    build(shape, positions, device).save_pretrained(folder)
    words = {f"w{i}": i for i in range(shape.vocab)}
    words["<eos>"] = words.pop(f"w{shape.vocab - 1}")
    words["<pad>"] = words.pop(f"w{shape.vocab - 2}")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
        unk_token="w0",
        eos_token="<eos>",
        pad_token="<pad>",
    )
    tokenizer.save_pretrained(folder)


def stretch(folder: Path, positions: int) -> None:
    """Positions for the longest length of this run, so that no rotary scaling comes in."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["max_position_embeddings"] = max(positions, config["max_position_embeddings"])
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")


def token_ids(count: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """[count] int64 on the CPU."""
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))
