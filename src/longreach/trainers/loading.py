"""From what the user hands to a trainer to a model, a tokenizer and an enabled engine."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, set_seed

from ..context.install import enable
from ..context.support import check_supported
from ..loading import check_positions, load
from ..origin import origin_of
from ..quant.experts import FourBitExperts
from ..quant.linear import FourBitLinear
from .config import GRPOConfig, SFTConfig
from .planning import refuse_before_loading

logger = logging.getLogger(__name__)

WEIGHTS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "auto": None}


def require_config(args: Any, cls: type[GRPOConfig] | type[SFTConfig], trainer: str) -> None:
    """Raise TypeError unless `args` is the configuration class of this package."""
    if args is not None and not isinstance(args, cls):
        raise TypeError(
            f"args is a {type(args).__module__}.{type(args).__name__}; {trainer} takes a longreach.{cls.__name__}, "
            "which has all fields of TRL's"
        )


def default_output_dir(model: Any, suffix: str) -> str:
    """TRL's rule for the folder of a run whose configuration is left out: the model's name and the method."""
    name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
    return f"{name.rstrip('/').split('/')[-1]}-{suffix}"


def load_tokenizer(model: Any, args: Any) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model's weights. Raises ValueError if the model does not say where it came from."""
    name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
    if not name:
        raise ValueError("processing_class is None and the model does not say where it came from; pass its tokenizer")
    kwargs: dict[str, Any] = {"trust_remote_code": _trusts(args)}
    revision = (args.model_init_kwargs or {}).get("revision")
    return origin_of(name).load_tokenizer(revision=revision, **kwargs)


def check_architecture(model: Any, args: Any) -> Any:
    """The text config of a model given by name or as an object. Refused are, before any weights are read, a model that cannot
    be run exactly (UnsupportedModelError) and a GRPO `max_length` that it has no positions for (ValueError)."""
    if isinstance(model, str):
        config = origin_of(model).config(trust_remote_code=_trusts(args))
    elif hasattr(model, "config"):
        config = model.config
    else:
        raise TypeError(f"model is a {type(model).__name__}; pass a model's name, folder or a Transformers model")
    text = config.get_text_config(decoder=True)
    check_supported(text)
    check_positions(text, _positions_needed(args))
    return text


def settle_router_loss(text: Any, args: Any) -> None:
    """Leave the routers' load-balancing loss out, unless `router_aux_loss_coef` or a model with `output_router_logits=True`
    asks for it. TRL would add it with the coefficient in the model's config, which is a setting of its pretraining."""
    own = getattr(text, "router_aux_loss_coef", 0.0)
    if args.router_aux_loss_coef is not None:
        return
    asked = getattr(text, "output_router_logits", False)
    args.router_aux_loss_coef = own if asked else 0.0
    if own and not asked:
        logger.warning(
            "the routers' load-balancing loss is off; set router_aux_loss_coef (%g in the model's config) to train with it",
            own,
        )


def wants_longreach_load(args: GRPOConfig | SFTConfig, quantization_config: Any) -> bool:
    """Whether `longreach.load` knows all that is asked for; TRL's own loading takes any argument of Transformers."""
    kwargs = args.model_init_kwargs or {}
    plain = quantization_config is None and not _trusts(args)
    return plain and set(kwargs) <= {"dtype"} and _dtype_name(kwargs) in ("", *WEIGHTS)


def load_model(name: str, args: GRPOConfig | SFTConfig, *, peft_config: Any = None) -> Any:
    """Load a model by name on this process's device, in the dtype of `model_init_kwargs`.

    Without one, weights that train are float32, as in TRL (smaller types would round small updates away), and frozen
    weights under an adapter stay in the type they are stored in, where TRL makes them float32, unless neither `bf16` nor
    `fp16` is asked for; with `fp16` what is stored in 16 bits becomes float16.

    Raises:
        PlanError: its largest step cannot fit this machine, and `on_misfit` is "error".
    """
    set_seed(args.seed)  # new heads are drawn at random: the seed comes first, as in TRL
    origin = origin_of(name)
    if origin.adapter is not None and peft_config is not None:
        raise ValueError(f"model={name!r} is an adapter already; leave peft_config out to go on training it")
    adapted = peft_config is not None or origin.adapter is not None
    half = args.bf16 or args.fp16
    dtype = _dtype_name(args.model_init_kwargs or {}) or ("auto" if adapted and half else "float32")
    kwargs: dict[str, Any] = {"dtype": torch.float16} if dtype == "auto" and args.fp16 else {"weights": WEIGHTS[dtype]}
    if origin.adapter is None:
        config = origin.config()
        stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
        refuse_before_loading(config, args, stored if dtype == "auto" else dtype, peft_config)
    # The engine is checked once the adapter is on, by `enable_engine`.
    model, _ = load(name, max_length=_positions_needed(args), device=args.device, parity_check=False, **kwargs)
    return model


def _positions_needed(args: GRPOConfig | SFTConfig) -> int | None:
    """The longest row asked for; TRL's SFT configuration has a `max_length` by default, which says little."""
    return args.max_length if isinstance(args, GRPOConfig) else None


def _trusts(args: GRPOConfig | SFTConfig) -> bool:
    return bool(getattr(args, "trust_remote_code", False))  # not a field of every supported TRL


def _dtype_name(kwargs: Any) -> str:
    return str(kwargs.get("dtype") or "").removeprefix("torch.")


def settle_adapters(model: Any, args: GRPOConfig | SFTConfig) -> None:
    """Adapters on 4-bit weights in bfloat16, as TRL makes them on bitsandbytes' (it knows those by an attribute that would send
    Transformers looking for that package); float32 with fp16, whose loss scaling needs them."""
    if args.fp16 or not any(isinstance(m, (FourBitLinear, FourBitExperts)) for m in model.modules()):
        return
    for name, p in model.named_parameters():
        if p.requires_grad and "lora_magnitude_vector" not in name:  # steps too small for bf16 (TRL, too)
            p.data = p.data.to(torch.bfloat16)


def enable_engine(
    model: Any, args: GRPOConfig | SFTConfig, options: dict[str, Any], *, parity_check: bool | None = None
) -> None:
    """Install exact chunked execution, and compare it with stock attention if the configuration asks for it.

    Args:
        options: those of `longreach.enable`, as planned.

    Raises:
        UnsupportedModelError: an architecture that cannot be run exactly.
        ParityError: the comparison failed; the message holds the measured difference.
    """
    enable(model, **options, parity_check=args.parity_check if parity_check is None else parity_check)
