"""Which models can run in chunks: tested ones, refused ones with the reason, and what any model must fulfil."""

from __future__ import annotations

from typing import Any

from ..lora import adopt_wrappers

# In the exactness tests, with LoRA and with full parameters.
TESTED = (
    "deepseek_v3", "gemma2", "gemma3_text", "glm4", "gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo2", "olmo3",
    "phi3", "qwen2", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next",
)  # fmt: skip

# Their decoders hand the embedding module's output to the first layer as it is; others scale it in between, say.
PLAIN_EMBEDDING = frozenset(TESTED) - {"gemma2", "granite"}

_MASK = "its chunked attention exists only in the mask, which chunked layers don't build"
_SHARED = "its layers share keys and values or take per-layer inputs"
_INDEX = "a sparse indexer picks keys over the whole sequence"
_COMPRESSED = "its attention works on compressed keys that chunked layers don't keep"
_SSM = "its state-space layers have no chunk-to-chunk gradient here"

REFUSED = {
    "llama4": _MASK,
    "llama4_text": _MASK,
    "gemma3n": _SHARED,
    "gemma3n_text": _SHARED,
    "gemma4": _SHARED,
    "gemma4_text": _SHARED,
    "diffusion_gemma": "it denoises blocks with a bidirectional mask",
    "deepseek_v32": _INDEX,
    "glm_moe_dsa": _INDEX,
    "glm5_next": _INDEX,
    "axk2": _INDEX,
    "hy_v4": _INDEX,
    "qwen4_exp": _INDEX,
    "deepseek_v4": _COMPRESSED,
    "minimax": "its lightning attention has a cache of its own",
    "mamba": _SSM,
    "mamba2": _SSM,
    "falcon_mamba": _SSM,
    "falcon_h1": _SSM,
    "bamba": _SSM,
    "jamba": _SSM,
    "zamba": _SSM,
    "zamba2": _SSM,
    "nemotron_h": _SSM,
    "granitemoehybrid": _SSM,
    "lfm2": "its convolution layers have no chunk-to-chunk gradient here",
}

KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention"}


class UnsupportedModelError(ValueError):
    """The model can't be trained exactly in chunks; the message says why and what to do instead."""


def check_supported(config: Any) -> None:
    """Raise `UnsupportedModelError` for a text config whose structure chunked layers can't reproduce."""
    kind = config.model_type
    reason = REFUSED.get(kind)
    unknown = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYER_TYPES
    if reason is None and unknown:
        reason = f"it has layers of type {', '.join(sorted(unknown))}; known are {', '.join(sorted(KNOWN_LAYER_TYPES))}"
    if reason is None and getattr(config, "use_bidirectional_attention", None):
        reason = f"its mask is bidirectional (use_bidirectional_attention={config.use_bidirectional_attention!r})"
    if reason is None and getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder; only decoders run in chunks"
    if reason is None and not getattr(config, "is_causal", True):
        reason = "its attention is not causal (is_causal=False)"
    if reason is None and (getattr(config, "attention_dropout", 0.0) or 0.0) > 0.0:
        reason = (
            f"attention_dropout={config.attention_dropout} drops single attention weights, which no flash kernel "
            "replays; set attention_dropout=0.0 in the config"
        )
    if reason is not None:
        raise UnsupportedModelError(
            f"model_type {kind!r} can't be trained in exact chunks: {reason}. "
            "Train it with stock TRL (from trl import GRPOTrainer, SFTTrainer), or choose a model of one of these types: "
            f"{', '.join(TESTED)}."
        )


def check_window(module: Any, window: int | None) -> None:
    """A sliding layer whose window reaches attention only through the mask would silently see everything."""
    config: Any = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if window is None and layer_types and index is not None and layer_types[index] == "sliding_attention":
        raise UnsupportedModelError(
            f"layer {index} of {config.model_type!r} is a sliding window, but {type(module).__name__} does not pass "
            "`sliding_window` to the attention function: its window lives only in the mask. Train it with stock TRL."
        )


def take_over_adapters(model: Any) -> None:
    """Give adapters on weights in 4 or 8 bits their own classes; raise `UnsupportedModelError` for a kind that can't run in
    chunks."""
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, dict):
        return
    for name, adapter in adapters.items():
        if getattr(adapter, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"adapter {name!r} is of type {adapter.peft_type}, which adds virtual tokens or keys outside the layers; chunked "
                "execution supports adapters inside them, such as LoRA. Train it with stock TRL."
            )
    adopt_wrappers(model)
