"""Tiny models of every architecture that is exported, with tokenizers of the families' kinds, and adapters that matter."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers as T
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set front = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set front = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else 'user' }}\n"
    "{{ front if loop.first else '' }}{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_CORPUS = [
    "The harbour master keeps two ledgers, one for every ship that arrives and one for what the captains said.",
    "def total(values):\n    return sum(value * 2 for value in values)\n",
    "What is 12 + 30? Name a colour. Blue. Another one, please: Answer in one word. Is water wet?",
    "user assistant system model",
]

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
HEAD = {**SIZES, "head_dim": 16}
MIXED = ["sliding_attention", "full_attention"]

CONFIGS: dict[str, Any] = {
    "llama": lambda **k: T.LlamaConfig(
        **HEAD, **k, rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": lambda **k: T.MistralConfig(**HEAD, **k, sliding_window=None),
    "qwen2": lambda **k: T.Qwen2Config(**SIZES, **k, tie_word_embeddings=True),
    "qwen3": lambda **k: T.Qwen3Config(**HEAD, **k),
    "qwen3_moe": lambda **k: T.Qwen3MoeConfig(**HEAD, **k, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True),
    "gemma2": lambda **k: T.Gemma2Config(
        **HEAD, **k, sliding_window=32, query_pre_attn_scalar=16, attn_logit_softcapping=20.0, final_logit_softcapping=10.0
    ),
    # libllama knows the family's own pattern only: five sliding layers, one that sees everything.
    "gemma3_text": lambda **k: T.Gemma3TextConfig(
        **{**HEAD, "num_hidden_layers": 6}, **k, sliding_window=32, query_pre_attn_scalar=16,
        layer_types=[*["sliding_attention"] * 5, "full_attention"],
    ),
    "gpt_oss": lambda **k: T.GptOssConfig(
        # libllama rounds YaRN's borders between dimensions, so they have to lie as in the real models.
        **{**HEAD, "intermediate_size": 64, "head_dim": 64, "max_position_embeddings": 131072}, **k,
        num_local_experts=4, num_experts_per_tok=2, sliding_window=32, layer_types=MIXED,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    "phi3": lambda **k: T.Phi3Config(**SIZES, **k, sliding_window=None),
    "granite": lambda **k: T.GraniteConfig(
        **SIZES, **k, logits_scaling=4.0, residual_multiplier=0.7, embedding_multiplier=2.0, attention_multiplier=0.25
    ),
    "olmo2": lambda **k: T.Olmo2Config(**SIZES, **k),
}  # fmt: skip
MOE = ("qwen3_moe", "gpt_oss")
SENTENCEPIECE = ("mistral", "gemma2", "gemma3_text", "phi3")
EXPERT_PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@functools.cache
def _trained(kind: str) -> Tokenizer:
    """A BPE tokenizer: "bytes" with Llama 3's split, "bytes-qwen" with Qwen's, "pieces" with byte fallback."""
    if kind == "pieces":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special = ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)]]
        trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE())
        split = Regex(LLAMA3 if kind == "bytes" else QWEN2)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(split, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<s>", "</s>"],
            show_progress=False,
        )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def tokenizer_for(name: str) -> Any:
    """The tokenizer of an architecture's family: its kind, its chat template, its stop tokens."""
    pieces = name in SENTENCEPIECE
    gemma = name.startswith("gemma")
    tokenizer = Tokenizer.from_str(
        _trained("pieces" if pieces else "bytes-qwen" if "qwen" in name else "bytes").to_str()
    )
    if pieces:
        # As stored on the Hub: bytes are ordinary pieces, not special tokens.
        described = json.loads(tokenizer.to_str())
        described["added_tokens"] = [t for t in described["added_tokens"] if not t["content"].startswith("<0x")]
        tokenizer = Tokenizer.from_str(json.dumps(described))
    if name == "gemma2" or gemma:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    marks = ["<start_of_turn>", "<end_of_turn>"] if gemma else ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    begins = pieces or name == "llama"
    if begins:
        first = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", first)]
        )
    made = T.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token=marks[1] if not gemma else "</s>",
        pad_token="</s>",
        unk_token="<unk>" if pieces else None,
    )
    made.chat_template = GEMMA if gemma else CHATML
    return made


def build(
    name: str, folder: Path, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, spread: float = 0.64, **changes: Any
) -> Path:
    """Save a tiny base model with random weights (rounded to `dtype`, norms and biases not trivial) and its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = tokenizer_for(name)
    stops = [tokenizer.eos_token_id]
    if name.startswith("gemma"):
        stops.append(tokenizer.convert_tokens_to_ids("<end_of_turn>"))
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": stops[0], "pad_token_id": tokenizer.pad_token_id}
    config = CONFIGS[name](vocab_size=len(tokenizer), **ids)
    if changes:
        config = type(config)(**{**config.to_dict(), "layer_types": None, **changes})
    model: Any = T.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread / config.hidden_size**0.5)
    model.generation_config = T.GenerationConfig(
        eos_token_id=stops if len(stops) > 1 else stops[0], temperature=0.7, do_sample=True
    )
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def pack_experts(folder: Path) -> Path:
    """Store a saved gpt-oss's experts in MXFP4, as the real models are."""
    from safetensors.torch import load_file, save_file

    from longreach.quant.formats import MXFP4

    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        packed = MXFP4().quantize(tensors.pop(name).transpose(1, 2).contiguous())
        tensors |= {f"{name}_blocks": packed.tensors["codes"], f"{name}_scales": packed.tensors["scales"]}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def adapted(name: str, base: Path, *, dtype: torch.dtype = torch.float32, **lora: Any) -> nn.Module:
    """The base model with LoRA on all linear layers and experts, B not zero."""
    from peft import LoraConfig, get_peft_model

    model = T.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    if name in MOE:
        settings["target_parameters"] = EXPERT_PARAMETERS
    tuned: Any = get_peft_model(model, LoraConfig(**{**settings, **lora}))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in tuned.named_parameters():
            if "lora_B" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return tuned.eval()
