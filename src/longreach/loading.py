"""Load a model and its tokenizer, ready for exact chunked training."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .lora.experts import expert_parameters
from .origin import origin_of
from .quant.embedding import store_in_8_bits
from .quant.formats import FORMATS
from .spelling import nearest

# Arguments of `from_pretrained` that are likely to be passed on: not taken for misspelt names of ours.
PASSED_ON = (
    "attn_implementation", "cache_dir", "code_revision", "config", "device_map", "dtype", "experts_implementation",
    "force_download", "generation_config", "ignore_mismatched_sizes", "key_mapping", "local_files_only", "low_cpu_mem_usage",
    "max_memory", "offload_folder", "output_loading_info", "quantization_config", "revision", "state_dict", "subfolder", "token",
    "torch_dtype", "trust_remote_code", "use_cache", "use_kernels", "use_safetensors", "variant", "weights_only",
)  # fmt: skip
DTYPE_NAMES = {"dtype", "torch_dtype"}
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LORA_ALPHA_PER_RANK = 2


def load(
    name_or_path: str,
    *,
    weights: str | None = None,
    lora: Any = None,
    lora_dtype: str | None = None,
    max_length: int | None = None,
    device: str | torch.device | None = None,
    embedding: str | None = None,
    parity_check: bool = True,
    **kwargs: Any,
) -> tuple[nn.Module, Any]:
    """A causal language model of Transformers with chunked execution on, and its tokenizer.

    Args:
        name_or_path: a Hub id, a local folder, the folder of an adapter (loaded on its base model, to train on), a GGUF file
            (unpacked), or "zoo", the embedded model.
        weights: "bf16", "fp16", "fp32"; "nf4" or "mxfp4" for 4-bit linear layers, quantized tensor by tensor while loading
            (what stays in 16 bits has the checkpoint's dtype, or that of `dtype=`); None for what the checkpoint stores.
        lora: a peft.LoraConfig, a rank (LoRA on all linear layers but the head, experts included, alpha twice the rank), or
            None for no adapter.
        lora_dtype: "bf16" to keep the adapter, new or from its folder, and with it its gradients and optimizer states, in 16
            bits; None for PEFT's choice, fp32 on a model in half precision. (In fp16 AdamW's epsilon is 0.)
        max_length: the longest sequence you will train on, tokens; checked against the model's positions.
        device: e.g. "cuda", "cpu"; None takes the GPU if there is one.
        embedding: "int8" stores embedding and head in 8 bits, frozen; the logits change slightly. None leaves them.
        parity_check: as for `enable`.
        **kwargs: passed on to `AutoModelForCausalLM.from_pretrained`.

    Returns:
        (model, tokenizer); the model is a PeftModel if `lora` is given.

    Raises:
        ValueError: an unknown `weights`, `embedding` or `lora_dtype`, a `lora` of another type, a `max_length` beyond the model's
            positions, weights beyond the range of fp16, or a checkpoint whose quantization can't be read or does not fit
            `weights`.
        FormatError: a 4-bit checkpoint that is cut off or does not fit the model; it names the tensor.
        MissingModelError: there is no such model.
        TypeError: a misspelt argument, with the one that was probably meant.
        UnsupportedModelError, ParityError: see `enable`.
    """
    from .context.install import enable
    from .context.precision import check_range
    from .context.support import check_supported

    if weights is not None and weights not in (*WEIGHTS, *FORMATS):
        raise ValueError(
            f"weights={weights!r}: choose one of {', '.join(map(repr, (*WEIGHTS, *FORMATS)))}, or None to keep the checkpoint's"
        )
    _check_kwargs(kwargs)
    if embedding not in (None, "int8"):
        raise ValueError(f"embedding={embedding!r}: choose 'int8', or None to leave embedding and head as they are")
    if lora_dtype not in (None, "bf16"):
        raise ValueError(f"lora_dtype={lora_dtype!r}: choose 'bf16', or None for PEFT's choice")
    place = device_of(device)
    adapter = lora_config(lora)
    trusted = {k: v for k, v in kwargs.items() if k in ("trust_remote_code", "revision", "token")}
    origin = origin_of(name_or_path)
    if origin.adapter and adapter is not None:
        raise ValueError(f"lora={lora!r}: {name_or_path!r} is an adapter already; leave lora out to go on training it")
    if lora_dtype is not None and origin.adapter is None and adapter is None:
        raise ValueError(
            f"lora_dtype={lora_dtype!r}: {name_or_path!r} has no adapter and lora=None adds none; give lora too"
        )
    config = kwargs.pop("config", None) or origin.config(**trusted)
    text = config.get_text_config()
    check_supported(text)
    check_positions(text, max_length)
    kwargs = {"dtype": WEIGHTS.get(weights or "", "auto")} | quantization(config, weights, origin.base, kwargs)
    kwargs |= {name: _dtype(kwargs[name]) for name in DTYPE_NAMES & set(kwargs)}
    if "quantization_config" in kwargs or getattr(config, "quantization_config", None) is not None:
        kwargs.setdefault("device_map", {"": place})
    model: Any = origin.load_base(config, **kwargs)
    if weights in WEIGHTS and getattr(model, "is_quantized", False):
        model = model.dequantize(WEIGHTS[weights]).requires_grad_(True)
    check_range(model)
    if embedding is not None:
        store_in_8_bits(model)
    model.to(place)
    tokenizer = origin.load_tokenizer(**trusted)
    if origin.adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, origin.adapter, is_trainable=True)
    if adapter is not None:
        from peft import get_peft_model

        if not isinstance(lora, type(adapter)):
            adapter.target_parameters = expert_parameters(model) or None
        model = get_peft_model(model, adapter)
    if lora_dtype is not None:
        for p in (p for name, p in model.named_parameters() if "lora_" in name):
            p.data = p.data.to(WEIGHTS[lora_dtype])
    enable(model, parity_check=parity_check)
    return model, tokenizer


def quantization(config: Any, weights: str | None, name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` of `from_pretrained` with what makes a model's weights what was asked for; a stored quantization is handed to
    our quantizer by way of `config`.

    Raises:
        ValueError: two answers to the same question, or a stored quantization that can't be read.
    """
    from .context.stored import check_not_quantized_again
    from .quant.quantizer import FourBitConfig, stored_config

    for key, answers in {"dtype": [*WEIGHTS], "quantization_config": [*WEIGHTS, *FORMATS]}.items():
        if key in kwargs and weights in answers:
            raise ValueError(f"weights={weights!r} and {key}={kwargs[key]!r} say the same; give one of the two")
    stored = stored_config(getattr(config, "quantization_config", None), name)
    if stored is None:
        return kwargs | ({"quantization_config": FourBitConfig(weights)} if weights in FORMATS else {})
    check_not_quantized_again(weights, stored.weights, name)
    if "quantization_config" in kwargs:
        raise ValueError(f"quantization_config=...: {name} is stored in {stored.weights} already; leave it out")
    config.quantization_config = dict(stored.__dict__)
    return kwargs


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


def _check_kwargs(kwargs: Mapping[str, Any]) -> None:
    """What goes on to Transformers, which would find a wrong name or dtype after the download and in its own words."""
    mine = [name for name, p in inspect.signature(load).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in kwargs:
        if name not in PASSED_ON and "did you mean" in nearest(name, (*mine, *PASSED_ON)):
            raise TypeError(f"load takes no {name!r}{nearest(name, (*mine, *PASSED_ON))}")
    for name in DTYPE_NAMES & set(kwargs):
        if kwargs[name] not in (None, "auto") and not isinstance(_dtype(kwargs[name]), torch.dtype):
            near = nearest(str(kwargs[name]).removeprefix("torch."), DTYPES)
            raise ValueError(
                f"{name}={kwargs[name]!r}: give 'auto', a dtype of torch such as torch.bfloat16, or its name{near}"
            )


def _dtype(given: Any) -> Any:
    """The dtype of torch in any of its forms; None and "auto" as they are."""
    return given if given in (None, "auto") else getattr(torch, str(given).removeprefix("torch."), None)


def check_positions(config: Any, max_length: int | None) -> None:
    """Refuse a context that the model has no positions for."""
    limit = getattr(config, "max_position_embeddings", None)
    if max_length is not None and (isinstance(max_length, bool) or not isinstance(max_length, int)):
        raise ValueError(f"max_length={max_length!r}: give a whole number of tokens, or None")
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length={max_length}: a prompt and a completion need at least 2 tokens")
    if max_length is not None and limit is not None and max_length > limit:
        raise ValueError(
            f"max_length={max_length} is beyond the {limit} positions of this {config.model_type} model "
            "(max_position_embeddings); shorten it, or extend the model's rotary scaling (rope_parameters, e.g. YaRN) in its "
            "config first"
        )


def device_of(device: str | torch.device | None) -> torch.device:
    """The device that was asked for, or the GPU if there is one. Raises ValueError for one that is not here."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device={device!r}: give 'cuda', 'cuda:1', 'cpu' or another device of torch, or None"
        ) from None
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= cards:
        raise ValueError(f"device={str(device)!r}: PyTorch sees {cards} GPUs here; give another device, or None")
    return found
