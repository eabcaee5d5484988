"""4-bit weights through Transformers' own loading: `from_pretrained(path, quantization_config=FourBitConfig("nf4"))`.

Linear layers are replaced before loading; each weight is quantized as it comes from the file, or taken as it is from a checkpoint
that is in 4 bits already. Head, embeddings, norms and routers stay in 16 bits. An NF4 model is saved as a bitsandbytes
checkpoint, which stock Transformers reads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from .checkpoint import (
    SUFFIXES,
    Stored,
    check_nf4,
    check_tensor,
    from_bitsandbytes,
    read_headers,
    stored_name,
    to_bitsandbytes,
)
from .experts import PRODUCTS, FourBitExperts, is_experts
from .formats import FORMATS, NF4, Format, FormatError, packed_bytes
from .linear import FourBitLinear

METHOD = "longreach_4bit"
ROUTERS = ("gate", "router", "shared_expert_gate")  # last parts of the names of linear layers that choose experts


@register_quantization_config(METHOD)
class FourBitConfig(QuantizationConfigMixin):
    """Quantization config of Transformers for 4-bit weights; pass it to `from_pretrained` or in TRL's `model_init_kwargs`.

    Args:
        weights: "nf4" or "mxfp4".
        modules_to_not_convert: names or patterns of modules that stay in 16 bits, beside the head and routers.
        double: NF4's scales are stored in 8 bits.
        experts: experts of known kinds are in 4 bits too.
        stored_as: how a checkpoint names its tensors and itself: "bitsandbytes", "gpt-oss" or "longreach"; None for what
            others can read, if any can.

    Raises:
        ValueError: an unknown format.
    """

    def __init__(
        self,
        weights: str = "nf4",
        modules_to_not_convert: list[str] | None = None,
        double: bool = True,
        experts: bool = True,
        stored_as: str | None = None,
        **unused: Any,
    ) -> None:
        if weights not in FORMATS:
            raise ValueError(f"weights={weights!r}: choose one of {', '.join(map(repr, FORMATS))}")
        self.quant_method = METHOD  # type: ignore[assignment]
        self.weights = weights
        self.modules_to_not_convert = modules_to_not_convert
        self.double = double
        self.experts = experts
        self.stored_as = stored_as

    @property
    def format(self) -> Format:
        chosen = FORMATS[self.weights]
        return dataclasses.replace(chosen, double=self.double) if isinstance(chosen, NF4) else chosen

    def to_dict(self) -> dict[str, Any]:
        """What `config.json` says: bitsandbytes' or gpt-oss's own entry where the checkpoint is one."""
        if self.stored_as == "bitsandbytes":
            return {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": self.double,
                "bnb_4bit_compute_dtype": "bfloat16",
                "bnb_4bit_quant_storage": "uint8",
                "llm_int8_skip_modules": self.modules_to_not_convert,
            }
        if self.stored_as == "gpt-oss":
            return {"quant_method": "mxfp4", "modules_to_not_convert": self.modules_to_not_convert}
        return dict(self.__dict__)


def stored_config(quantization: Any, name: str) -> FourBitConfig | None:
    """How a checkpoint is quantized, from its config's entry; None if it is not.

    Raises:
        ValueError: a method that can't be read, named.
    """
    if quantization is None:
        return None
    entry = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = getattr(entry.get("quant_method"), "value", entry.get("quant_method"))
    if method == METHOD:
        return FourBitConfig(**entry)
    if method == "mxfp4":
        return FourBitConfig("mxfp4", entry.get("modules_to_not_convert"), stored_as="gpt-oss")
    if method == "bitsandbytes" and not entry.get("load_in_8bit") and entry.get("bnb_4bit_quant_type") == "nf4":
        storage = str(entry.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")
        if storage != "uint8":
            raise ValueError(f"{name}: bnb_4bit_quant_storage={storage!r}; only codes stored as 'uint8' can be read")
        double, skip = bool(entry.get("bnb_4bit_use_double_quant")), entry.get("llm_int8_skip_modules")
        return FourBitConfig("nf4", skip, double, experts=False, stored_as="bitsandbytes")
    if method == "bitsandbytes":
        method = "bitsandbytes int8" if entry.get("load_in_8bit") else "bitsandbytes fp4"
    raise ValueError(
        f"{name} is stored with {method!r} quantization, which can't be trained here; supported are bitsandbytes nf4 and "
        "mxfp4. Take the 16-bit model and weights='nf4'."
    )


@register_quantizer(METHOD)
class FourBitQuantizer(HfQuantizer):
    """Puts `FourBitLinear` in the place of linear layers and fills them while a checkpoint is read."""

    quantization_config: FourBitConfig

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("device_map puts modules on 'disk', which 4-bit weights don't support; give devices only")

    def update_device_map(self, device_map: Any) -> Any:
        """Quantize on the GPU if there is one."""
        return {"": torch.cuda.current_device()} if device_map is None and torch.cuda.is_available() else device_map

    # ---- before the weights come

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> None:
        config = self.quantization_config
        skip = config.modules_to_not_convert
        if self.pre_quantized:
            skip = self.get_modules_to_not_convert(model, skip, model._keep_in_fp32_modules)
        else:
            # gpt-oss is published with its experts in MXFP4 and nothing else.
            published = (
                ["model.layers.*.self_attn"]
                if config.weights == "mxfp4" and model.config.model_type == "gpt_oss"
                else []
            )
            skip = [*(published if skip is None else skip), *default_skips(model)]
        for name, module in list(model.named_modules()):
            if not should_convert_module(name, skip):
                continue
            if type(module) is nn.Linear:
                model.set_submodule(name, self._empty(module))
            elif config.experts and is_experts(module):
                model.set_submodule(name, FourBitExperts.empty(module, config.format, stored=self.pre_quantized))
        if not self.pre_quantized:
            config.modules_to_not_convert = [n for n, m in model.named_modules() if type(m) is nn.Linear]
            found = {type(m) for m in model.modules()} & {FourBitLinear, FourBitExperts}
            config.experts = FourBitExperts in found
            config.stored_as = "bitsandbytes" if config.weights == "nf4" and not config.experts else "longreach"
            if config.weights == "mxfp4" and found == {FourBitExperts} and model.config.model_type == "gpt_oss":
                config.stored_as = "gpt-oss"
            if not found:
                raise ValueError(f"{type(model).__name__}: no layer that can be stored in 4 bits was found")
        self._check(model, read_headers(checkpoint_files or []))

    def _empty(self, linear: nn.Linear) -> FourBitLinear:
        format = self.quantization_config.format
        made = FourBitLinear(linear.in_features, linear.out_features, False, format=format, device="meta")
        made.bias = linear.bias
        if not self.pre_quantized:
            # What comes from the file is cast to this tensor's dtype before it is quantized.
            made.weight = nn.Parameter(linear.weight.data, requires_grad=False)
        return made

    def _check(self, model: Any, stored: dict[str, Stored]) -> None:
        """Refuse a 4-bit checkpoint that does not fit, before anything is read."""
        if not self.pre_quantized or not stored:
            return
        nf4 = isinstance(self.quantization_config.format, NF4)
        for name, module in model.named_modules():
            if isinstance(module, FourBitLinear) and nf4:
                full = stored_name(f"{name}.weight", stored, model.base_model_prefix)
                check_nf4(full, (module.out_features, module.in_features), stored)
            elif isinstance(module, (FourBitLinear, FourBitExperts)):
                for part, tensor in _own(module).items():
                    check_tensor(stored_name(f"{name}.{part}", stored, model.base_model_prefix), tensor, stored)

    # ---- while they come

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        owner, _, part = param_name.rpartition(".")
        return not self.pre_quantized and _takes(model.get_submodule(owner), part)

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        if self.param_needs_quantization(model, param_name):
            return packed_bytes(self.quantization_config.format, tuple(param.shape)) / param.numel()
        return param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize()

    def get_weight_conversions(self) -> list[WeightConverter]:
        if not self.pre_quantized or not isinstance(self.quantization_config.format, NF4):
            return []
        return [WeightConverter([*(f"weight.{s}" for s in SUFFIXES), "weight"], "weight", [_FromBitsAndBytes()])]

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Tensors of a 4-bit weight keep their dtype; the others take the model's."""
        floats = param.get_dtype().startswith(("F", "BF")) if hasattr(param, "get_dtype") else param.is_floating_point()
        return dtype if floats and dtype is not None and dtype.is_floating_point else None

    # ---- afterwards

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, module in model.named_modules():
            if isinstance(module, (FourBitLinear, FourBitExperts)):
                for part, tensor in _own(module).items():
                    if tensor.is_meta or (_takes(module, part) and tensor.is_floating_point()):
                        raise FormatError(f"{name}.{part}: not found in the checkpoint")
        # Saving writes final names itself: what gathered the weights that are in 4 bits now must not take them apart again.
        conversions = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [c for c in conversions if not _gathers(c, self.quantization_config.experts)]
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, dict[str, Any]]:
        """NF4 weights under bitsandbytes' names; others under the modules' own."""
        state = model.state_dict()
        for name, module in model.named_modules():
            if isinstance(module, FourBitLinear) and isinstance(module.format, NF4):
                for part in set(module.packed.tensors) - {"codes"}:
                    del state[f"{name}.{part}"]
                found = to_bitsandbytes(module.packed, model.dtype)
                state |= {f"{name}.weight.{suffix}".rstrip("."): tensor for suffix, tensor in found.items()}
        return state, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype or model.dtype
        for name, module in list(model.named_modules()):
            if isinstance(module, FourBitLinear):
                made: nn.Module = nn.Linear(module.in_features, module.out_features, False, device="meta")
                made.weight, made.bias = nn.Parameter(module.dequantize(kind)), module.bias
            elif isinstance(module, FourBitExperts):
                made = module.stock_module(kind)
            else:
                continue
            model.set_submodule(name, made.train(module.training))
        if "_weight_conversions" in vars(model):
            del model._weight_conversions  # the model's default ones hold again
        return model


def default_skips(model: Any) -> list[str]:
    """Linear layers that stay in 16 bits: the head and routers."""
    head = model.get_output_embeddings()
    named = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    return [n for n, m in named if m is head or n.rpartition(".")[2] in ROUTERS]


def _gathers(conversion: Any, experts: bool) -> bool:
    """Whether a conversion of Transformers' made weights that are in 4 bits."""
    ours = any(isinstance(op, _FromBitsAndBytes) for op in getattr(conversion, "operations", []))
    return ours or (experts and any(t.endswith(PRODUCTS) for t in conversion.target_patterns))


def _own(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that a module really has."""
    return {k: v for k, v in [*module._parameters.items(), *module._buffers.items()] if v is not None}


def _takes(module: nn.Module, part: str) -> bool:
    """Whether a 16-bit tensor of this name is to be quantized into the module."""
    return (isinstance(module, FourBitLinear) and part == "weight") or (
        isinstance(module, FourBitExperts) and part in PRODUCTS
    )


def _done(owner: str, module: nn.Module, missing: set[str] | None) -> None:
    """Tell Transformers that nothing is left to do for a module."""
    module._is_hf_initialized = True  # type: ignore[assignment]
    for name in [*module.state_dict(), *PRODUCTS]:
        if missing is not None:
            missing.discard(f"{owner}.{name}")


class _Quantize(ConversionOps):
    """One weight of a 16-bit checkpoint on its way into its module."""

    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], *, model: Any, missing_keys: set[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        rest = {}
        for name, value in input_dict.items():
            owner, _, part = name.rpartition(".")
            module: Any = model.get_submodule(owner)
            if not _takes(module, part):
                rest[name] = value
                continue
            value = value[0] if isinstance(value, list) else value
            if isinstance(module, FourBitExperts):
                module.adopt(part, value)
            else:
                module.adopt(module.format.quantize(value), name)
            _done(owner, module, missing_keys)
        return rest


class _FromBitsAndBytes(ConversionOps):
    """One weight of a bitsandbytes checkpoint, from its tensors; whatever has a single tensor passes."""

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        *,
        full_layer_name: str,
        model: Any,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        tensors = {key: value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        owner = full_layer_name.rpartition(".")[0]
        module = model.get_submodule(owner)
        if not isinstance(module, FourBitLinear):
            return input_dict
        by_suffix = {key.removeprefix("weight").removeprefix("."): value for key, value in tensors.items()}
        shape = (module.out_features, module.in_features)
        module.adopt(from_bitsandbytes(full_layer_name, shape, by_suffix), full_layer_name)
        _done(owner, module, missing_keys)
        return {}

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError("weights are given bitsandbytes' names by get_state_dict_and_metadata")
