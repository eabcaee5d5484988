"""Load a model and its tokenizer, ready for exact chunked training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LORA_ALPHA_PER_RANK = 2


def load(
    name_or_path: str,
    *,
    weights: str | None = None,
    lora: Any = None,
    max_length: int | None = None,
    device: str | torch.device | None = None,
    parity_check: bool = True,
    **kwargs: Any,
) -> tuple[nn.Module, Any]:
    """A causal language model of Transformers with chunked execution on, and its tokenizer.

    Args:
        name_or_path: a Hub id or a local folder.
        weights: "bf16", "fp16", "fp32", or None for the dtype of the checkpoint.
        lora: a peft.LoraConfig, a rank (LoRA on all linear layers but the head, alpha twice the rank), or None for no adapter.
        max_length: the longest sequence you will train on, tokens; checked against the model's positions.
        device: e.g. "cuda", "cpu"; None takes the GPU if there is one.
        parity_check: as for `enable`.
        **kwargs: passed on to `AutoModelForCausalLM.from_pretrained`.

    Returns:
        (model, tokenizer); the model is a PeftModel if `lora` is given.

    Raises:
        ValueError: an unknown `weights`, a `lora` of another type, or a `max_length` beyond the model's positions.
        UnsupportedModelError, ParityError: see `enable`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from .context.install import enable
    from .context.support import check_supported

    if weights is not None and weights not in WEIGHTS:
        raise ValueError(
            f"weights={weights!r}: choose one of {', '.join(map(repr, WEIGHTS))}, or None to keep the checkpoint's"
        )
    adapter = lora_config(lora)
    trusted = {k: v for k, v in kwargs.items() if k in ("trust_remote_code", "revision", "token")}
    config = AutoConfig.from_pretrained(name_or_path, **trusted)
    text = config.get_text_config()
    check_supported(text)
    check_positions(text, max_length)
    model: Any = AutoModelForCausalLM.from_pretrained(
        name_or_path, dtype=WEIGHTS[weights] if weights else "auto", **kwargs
    )
    model.to(torch.device(device) if device is not None else default_device())
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **trusted)
    if adapter is not None:
        from peft import get_peft_model

        model = get_peft_model(model, adapter)
    enable(model, parity_check=parity_check)
    return model, tokenizer


def lora_config(lora: Any) -> Any:
    """A peft.LoraConfig from what users give: a config, a rank, or None."""
    if lora is None:
        return None
    from peft import LoraConfig

    if isinstance(lora, LoraConfig):
        return lora
    if isinstance(lora, bool) or not isinstance(lora, int) or lora < 1:
        raise ValueError(f"lora={lora!r}: give a peft.LoraConfig, a rank from 1 up, or None")
    return LoraConfig(r=lora, lora_alpha=LORA_ALPHA_PER_RANK * lora, target_modules="all-linear", task_type="CAUSAL_LM")


def check_positions(config: Any, max_length: int | None) -> None:
    """Refuse a context that the model has no positions for."""
    limit = getattr(config, "max_position_embeddings", None)
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length={max_length}: a prompt and a completion need at least 2 tokens")
    if max_length is not None and limit is not None and max_length > limit:
        raise ValueError(
            f"max_length={max_length} is beyond the {limit} positions of this {config.model_type} model "
            "(max_position_embeddings); shorten it, or extend the model's rotary scaling (rope_parameters, e.g. YaRN) in its "
            "config first"
        )


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
