"""PEFT's adapters on weights that are stored in 4 or 8 bits: their forward on experts, and clear refusals of what needs the
weight's values, of which PEFT would take the codes."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora.layer import Embedding as PeftEmbedding
from peft.tuners.lora.layer import Linear as PeftLinear
from peft.tuners.lora.layer import ParamWrapper as PeftParamWrapper
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn

from ..quant.embedding import EightBitEmbedding, EightBitHead
from ..quant.experts import FourBitExperts
from ..quant.linear import FourBitLinear
from .experts import unwrap

# What is stored in few bits, in how many, and what leaves it in 16.
STORED = {
    FourBitLinear: ("a linear layer", 4, "weights='bf16'"),
    FourBitExperts: ("experts", 4, "weights='bf16'"),
    EightBitHead: ("the head", 8, "without embedding='int8'"),
    EightBitEmbedding: ("the embedding", 8, "without embedding='int8'"),
}
READING_FIELDS = ("use_dora", "kasa_config")
READING_INITS = ("pissa", "olora", "corda", "mica", "loftq", "orthogonal", "lora_ga")


class _Refusals:
    """What PEFT's wrappers can't do around such a weight. Ours bear PEFT's names, by which PEFT finds wrappers again."""

    get_base_layer: Any

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """PEFT's, which adds an adapter. Raises ValueError for one that starts from the weight or reads it."""
        what, bits, remedy = STORED[type(self.get_base_layer())]
        wanted = {field: getattr(config, field, None) for field in READING_FIELDS}
        if str(config.init_lora_weights).lower().startswith(READING_INITS):
            wanted["init_lora_weights"] = config.init_lora_weights
        for field, value in wanted.items():
            if value:
                raise ValueError(
                    f"{field}={value!r} needs the weight itself, and {what} is stored in {bits} bits here; leave {field} out, or "
                    f"load the model in 16 bits ({remedy})"
                )
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)  # type: ignore[misc]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused: the sum of weight and adapter is no weight of so few bits any more."""
        what, bits, _ = STORED[type(self.get_base_layer())]
        raise ValueError(
            f"the adapter of {getattr(self, 'parameter_name', what)} can't be merged into weights of {bits} bits. Write the sum "
            "in 16 bits: longreach.export(model, tokenizer, path, format='merged'), or `longreach export RUN --format merged`; "
            "to sample, leave the adapter on"
        )


class Linear(_Refusals, PeftLinear):
    """PEFT's LoRA on a linear layer in 4 bits or a head in 8."""


class Embedding(_Refusals, PeftEmbedding):
    """PEFT's LoRA on an embedding in 8 bits."""


class ParamWrapper(_Refusals, PeftParamWrapper):
    """PEFT's wrapper around experts in 4 bits, whose own forward would need the weights in floating point.

    Nested wrappers are one call: the outermost runs the experts with the adapters of all.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._check_forward_args(x, *args, **kwargs)
        unwrapped = unwrap(self)
        if unwrapped is None:
            raise ValueError(
                "experts in 4 bits take one active adapter of PEFT's standard form at a time, not merged; active are "
                f"{list(self.active_adapters)}, merged {list(self.merged_adapters)}"
            )
        base, adapters = unwrapped
        return base.run(x, *args, {name: (*adapter.stacked(), adapter.scale) for name, adapter in adapters.items()})


OURS: dict[type[nn.Module], type[nn.Module]] = {
    PeftLinear: Linear,
    PeftEmbedding: Embedding,
    PeftParamWrapper: ParamWrapper,
}


def adopt(wrapper: nn.Module) -> None:
    """Give one of PEFT's wrappers around a weight in few bits its class of ours, if there is one."""
    wrapper.__class__ = OURS.get(type(wrapper), type(wrapper))


def refuse_copy(wrapper: nn.Module, kept: nn.Module) -> None:
    """Raise ValueError for one of PEFT's wrappers that trains a copy of a module (or rows of it) with a weight in few bits."""
    fields = {ModulesToSaveWrapper: "modules_to_save", TrainableTokensWrapper: "trainable_token_indices"}
    if type(wrapper) in fields:
        field = fields[type(wrapper)]
        what, bits, remedy = next(STORED[type(m)] for m in kept.modules() if type(m) in STORED)
        raise ValueError(
            f"{field}: {what} would be trained, and is stored in {bits} bits, frozen; leave {field} out, or load the model in 16 "
            f"bits ({remedy})"
        )
