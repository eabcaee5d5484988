"""A decoder layer written out by hand: the same function as Transformers' module, with its backward, in few passes over memory.

For the dense pre-norm families (Llama, Qwen2, Qwen3, Mistral) and Gemma 3. It takes the module's own parameters, with or without
PEFT adapters, and recomputes in the backward only what the backward reads. Where a layer has anything that it does not know
(dropout, hooks, another adapter, another dtype under autocast), the general path of `layer.py` runs the module itself.

Shape suffixes: C tokens of the chunk, M hidden size, H query heads, K key/value heads, D head size, F MLP size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import AttentionSpec, KeyValues, attention_backward, attention_forward
from ..kernels.norm import rms_norm, rms_norm_backward
from ..kernels.rope import qk_norm_rope, qk_norm_rope_backward
from ..kernels.swiglu import swiglu, swiglu_backward
from ..lora import Linear, LinearGroup
from ..lora.linear import Grads
from .support import check_window
from .tree import Chunk


@dataclass(frozen=True)
class Family:
    """How a family's layer differs from Llama's.

    Attributes:
        unit_offset: norms multiply by 1 + weight, in fp32 (Gemma).
        sandwich: attention and MLP outputs are normed before they are added (Gemma 2 and 3).
        activation: of the gate.
    """

    unit_offset: bool = False
    sandwich: bool = False
    activation: str = "silu"


FAMILIES = {
    "LlamaDecoderLayer": Family(),
    "MistralDecoderLayer": Family(),
    "Qwen2DecoderLayer": Family(),
    "Qwen3DecoderLayer": Family(),
    "Gemma3DecoderLayer": Family(unit_offset=True, sandwich=True, activation="gelu_tanh"),
}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
SLEEPING = ("transformers.utils.output_capturing", __package__ + ".")  # modules whose hooks do not concern a chunk
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


class FusedLayer:
    """One layer for one pass over its chunks; adapters are cast once. Made by `FusedLayer.of`."""

    def __init__(self, layer: Any, family: Family, linears: dict[str, Linear], dtype: torch.dtype) -> None:
        self.family, self.dtype = family, dtype
        # Which adapters this form reads, and how strong they are.
        self.adapters: tuple[Any, ...] = tuple((id(line.a), line.scale) for line in linears.values())
        attention = layer.self_attn
        self.qkv = LinearGroup([linears[n] for n in QKV], dtype)
        self.kv_only = LinearGroup([linears[n] for n in QKV[1:]], dtype)
        self.out = LinearGroup([linears["o_proj"]], dtype)
        if "down_proj" in linears:
            self.gate_up = LinearGroup([linears[n] for n in GATE_UP], dtype)
            self.down = LinearGroup([linears["down_proj"]], dtype)
        self.norm_in = layer.input_layernorm
        self.norm_mlp = layer.pre_feedforward_layernorm if family.sandwich else layer.post_attention_layernorm
        self.norm_after = (
            (layer.post_attention_layernorm, layer.post_feedforward_layernorm) if family.sandwich else None
        )
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.head_dim, self.scale = attention.head_dim, attention.scaling
        self.sinks: nn.Parameter | None = getattr(attention, "sinks", None)
        self.window = attention_window(attention)
        check_window(attention, self.window)

    @classmethod
    def of(cls, layer: nn.Module, dtype: torch.dtype, *, keep: bool = True, checked: bool = False) -> FusedLayer | None:
        """The hand-written form of a layer, or None where the module itself must run.

        `keep`: weights that are stored in 4 bits are made once for the pass, not for each product. `checked`: the layer had
        this form in the forward, so its modules need not be searched again.
        """
        family = FAMILIES.get(type(layer).__name__)
        if family is None or not (checked or unhooked(layer)):
            return None
        kind = layer.mlp.config  # type: ignore[union-attr]
        act = getattr(kind, "hidden_act", None) or getattr(kind, "hidden_activation", None)
        if ACTIVATIONS.get(str(act)) != family.activation:
            return None
        places = ((layer.self_attn, (*QKV, "o_proj")), (layer.mlp, (*GATE_UP, "down_proj")))
        linears = find_linears(places, dtype, keep)
        if linears is None:
            return None
        fused = cls(layer, family, linears, dtype)
        if checked:
            return fused
        known = {p for line in linears.values() for p in line.parameters} | {m.weight for m in fused.norms()}
        if any(p.requires_grad and p not in known for p in layer.parameters()):
            return None
        return fused

    def norms(self) -> list[Any]:
        found = (self.norm_in, self.norm_mlp, *(self.norm_after or ()), self.q_norm, self.k_norm)
        return [m for m in found if m is not None]

    # ---- forward

    def forward(self, h_CM: Tensor, cos_sin: tuple[Tensor, Tensor], kv: KeyValues, chunk: Chunk) -> tuple[Tensor, Any]:
        """Layer output [C, M] and (attention output, lse) of the chunk."""
        x_CM, _ = self._norm(h_CM, self.norm_in)
        (q, k, v), _ = self.qkv.forward(x_CM)
        q_CHD, k_CKD, _ = self._rotate(q, k, cos_sin)
        out_CHD, lse_HC = attention_forward(q_CHD, k_CKD, self._heads(v), self._spec(kv, chunk), self.sinks)
        del x_CM, q, k, v, q_CHD, k_CKD
        h2_CM, _, _ = self._join(self.out, h_CM, out_CHD.flatten(1), 0)
        return self._mlp(h2_CM), (out_CHD, lse_HC)

    def _mlp(self, h2_CM: Tensor) -> Tensor:
        """The layer's output from its middle."""
        x_CM, _ = self._norm(h2_CM, self.norm_mlp)
        (gate_CF, up_CF), _ = self.gate_up.forward(x_CM)
        del x_CM
        inner_CF = swiglu(gate_CF, up_CF, activation=self.family.activation)
        del gate_CF, up_CF
        return self._join(self.down, h2_CM, inner_CF, 1)[0]

    def store_keys(self, h_CM: Tensor, cos_sin: tuple[Tensor, Tensor], kv: KeyValues, chunk: Chunk) -> None:
        """Only the chunk's keys and values, to the bit those of `forward`."""
        x_CM, _ = self._norm(h_CM, self.norm_in)
        (k, v), _ = self.qkv.forward(x_CM, 1)
        _, k_CKD, _ = self._rotate(None, k, cos_sin)
        kv.write(chunk.start, k_CKD, self._heads(v))

    # ---- backward

    def backward(
        self,
        dy_CM: Tensor,
        h_CM: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        kv: KeyValues,
        chunk: Chunk,
        saved: tuple[Tensor, Tensor] | None,
        need_dx: bool,
    ) -> tuple[Tensor | None, Grads]:
        """dh [C, M] (None unless `need_dx`) and the chunk's parameter gradients, from the output's gradient."""
        grads: Grads = {}
        spec = self._spec(kv, chunk, saved)
        dh2_CM = da = None
        if saved is not None:  # the MLP's part comes first then: fewer tensors at once
            dh2_CM, da = self._upper_backward(dy_CM, h_CM, saved[0].flatten(1), grads)
        x_CM, rstd = self._norm(h_CM, self.norm_in)
        (q, k, v), t_qkv = self.qkv.forward(x_CM)
        q_CHD, k_CKD, stats = self._rotate(q, k, cos_sin)
        out_CHD, lse_HC = attention_forward(q_CHD, k_CKD, self._heads(v), spec, self.sinks)
        if dh2_CM is None or da is None:
            dh2_CM, da = self._upper_backward(dy_CM, h_CM, out_CHD.flatten(1), grads)
        sinks = self.sinks if self.sinks is not None and self.sinks.requires_grad else None
        dq_CHD, dk_CKD, dv_CKD, dsinks_H = attention_backward(da.view_as(out_CHD), q_CHD, out_CHD, lse_HC, spec, sinks)
        if sinks is not None and dsinks_H is not None:
            grads[sinks] = dsinks_H
        del da, out_CHD, q_CHD, k_CKD, v
        dq, dk = self._unrotate(dq_CHD, dk_CKD, q, k, cos_sin, stats, grads)
        del q, k
        needed = need_dx or self.norm_in.weight.requires_grad
        dx_CM = self.qkv.backward([dq, dk, dv_CKD.flatten(1)], x_CM, t_qkv, grads, need_dx=needed)
        return self._norm_backward(dx_CM, h_CM, self.norm_in, rstd, dh2_CM, grads) if dx_CM is not None else None, grads

    def _upper_backward(self, dy_CM: Tensor, h_CM: Tensor, a_CO: Tensor, grads: Grads) -> tuple[Tensor, Tensor]:
        """From the layer's output down to the attention output: gradients at the layer's middle and at that output."""
        h2_CM, o_CM, t_out = self._join(self.out, h_CM, a_CO, 0)
        dh2_CM = self._mlp_backward(dy_CM, h2_CM, grads)
        del h2_CM
        da = self.out.backward([self._unjoin(dh2_CM, o_CM, 0, grads)], a_CO, t_out, grads)
        assert da is not None
        return dh2_CM, da

    def _mlp_backward(self, dy_CM: Tensor, h2_CM: Tensor, grads: Grads) -> Tensor:
        """Gradient at the layer's middle: the MLP's and the residual branch's."""
        activation = self.family.activation
        x_CM, rstd = self._norm(h2_CM, self.norm_mlp)
        (gate_CF, up_CF), t_gate_up = self.gate_up.forward(x_CM)
        down_CM = None
        if self.norm_after is not None:
            _, down_CM, _ = self._join(self.down, h2_CM, swiglu(gate_CF, up_CF, activation=activation), 1)
        d_down = self._unjoin(dy_CM, down_CM, 1, grads)
        dt_CR = self.down.low_rank_backward([d_down])
        dinner_CF = self.down.input_backward([d_down], dt_CR)
        # One pass: the gradients over gate and up, and the product again over its own gradient.
        dgate_CF, dup_CF, inner_CF = swiglu_backward(dinner_CF, gate_CF, up_CF, activation=activation, return_h=True)
        self.down.parameter_backward([d_down], inner_CF, self.down.low_rank(inner_CF), dt_CR, grads)
        del dinner_CF, inner_CF
        dx_CM = self.gate_up.backward([dgate_CF, dup_CF], x_CM, t_gate_up, grads)
        assert dx_CM is not None
        return self._norm_backward(dx_CM, h2_CM, self.norm_mlp, rstd, dy_CM, grads)

    def keys_backward(
        self, h_CM: Tensor, cos_sin: tuple[Tensor, Tensor], kv: KeyValues, chunk: Chunk, need_dx: bool
    ) -> tuple[Tensor | None, Grads]:
        """The same for a chunk of which only keys and values were read."""
        grads: Grads = {}
        dk_CKD, dv_CKD = kv.owed(chunk.start, chunk.stop)
        x_CM, rstd = self._norm(h_CM, self.norm_in)
        (k, _), t_kv = self.kv_only.forward(x_CM)
        _, _, stats = self._rotate(None, k, cos_sin)
        _, dk = self._unrotate(None, dk_CKD, None, k, cos_sin, stats, grads)
        dx_CM = self.kv_only.backward(
            [dk, dv_CKD.flatten(1)], x_CM, t_kv, grads, need_dx=need_dx or self.norm_in.weight.requires_grad
        )
        return self._norm_backward(dx_CM, h_CM, self.norm_in, rstd, None, grads) if dx_CM is not None else None, grads

    # ---- parts

    def _spec(self, kv: KeyValues, chunk: Chunk, saved: tuple[Tensor, Tensor] | None = None) -> AttentionSpec:
        return AttentionSpec(kv, chunk.start, chunk.calls(self.window), self.scale, saved=saved)

    def _heads(self, x_CO: Tensor) -> Tensor:
        return x_CO.unflatten(-1, (-1, self.head_dim))

    def _norm(self, x_CM: Tensor, module: Any) -> tuple[Tensor, Tensor]:
        """The norm in the dtype of matrix products, which a residual stream in fp32 does not have."""
        out = None if x_CM.dtype == self.dtype else torch.empty_like(x_CM, dtype=self.dtype)
        return rms_norm(x_CM, module.weight, norm_eps(module), unit_offset=self.family.unit_offset, out=out)

    def _norm_backward(
        self, dy_CM: Tensor, x_CM: Tensor, module: Any, rstd_C: Tensor, add: Tensor | None, grads: Grads
    ) -> Tensor:
        """dx + add in the dtype of x, in the memory of dy where that has it too."""
        wanted = module.weight.requires_grad
        dx_CM, dweight = rms_norm_backward(
            dy_CM,
            x_CM,
            module.weight,
            rstd_C,
            unit_offset=self.family.unit_offset,
            add=add,
            need_dweight=wanted,
            out=dy_CM if dy_CM.dtype == x_CM.dtype else torch.empty_like(x_CM),
        )
        if dweight is not None:
            grads[module.weight] = dweight
        return dx_CM

    def _join(
        self, group: LinearGroup, residual_CM: Tensor, x: Tensor, which: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """residual + [norm of] the group's output; also that output where a norm follows it, and the low-rank product."""
        if self.norm_after is None:
            sum_CM, t = group.add_to(residual_CM, x)
            return sum_CM, None, t
        (y_CM,), t = group.forward(x)
        normed, _ = self._norm(y_CM, self.norm_after[which])
        return residual_CM + normed, y_CM, t

    def _unjoin(self, d_CM: Tensor, y_CM: Tensor | None, which: int, grads: Grads) -> Tensor:
        """Gradient at the group's output, in the dtype of matrix products."""
        if self.norm_after is None or y_CM is None:
            return d_CM.to(self.dtype)
        module = self.norm_after[which]
        _, rstd = self._norm(y_CM, module)
        d_CM = d_CM.clone() if d_CM.dtype == self.dtype else d_CM
        return self._norm_backward(d_CM, y_CM, module, rstd, None, grads)

    def _rotate(self, q: Tensor | None, k: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Any]:
        """Normed and rotated heads and the norms' statistics; without queries the keys take their place in the op."""
        k_CKD = self._heads(k)
        q_norm = self.k_norm if q is None else self.q_norm
        first, second, stats = qk_norm_rope(
            k_CKD if q is None else self._heads(q), k_CKD[:, :0] if q is None else k_CKD, *cos_sin,
            norm_weight(q_norm), norm_weight(self.k_norm), norm_eps(self.k_norm), self.family.unit_offset,
        )  # fmt: skip
        return (first, first, stats) if q is None else (first, second, stats)

    def _unrotate(
        self,
        dq: Tensor | None,
        dk: Tensor,
        q: Tensor | None,
        k: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        stats: Any,
        grads: Grads,
    ) -> tuple[Tensor, Tensor]:
        k_CKD = self._heads(k)
        norms = [self.k_norm, None] if q is None else [self.q_norm, self.k_norm]
        wanted = any(m is not None and m.weight.requires_grad for m in norms)
        dfirst, dsecond, *dweights = qk_norm_rope_backward(
            dk if dq is None else dq, dk[:, :0] if dq is None else dk,
            k_CKD if q is None else self._heads(q), k_CKD[:, :0] if q is None else k_CKD, *cos_sin,
            norm_weight(norms[0]), norm_weight(self.k_norm), stats, self.family.unit_offset, need_dweight=wanted,
        )  # fmt: skip
        for module, dweight in zip(norms, dweights):
            if module is not None and module.weight.requires_grad and dweight is not None:
                grads[module.weight] = dweight
        return dfirst.flatten(1), dfirst.flatten(1) if q is None else dsecond.flatten(1)


def find_linears(
    places: Iterable[tuple[Any, tuple[str, ...]]], dtype: torch.dtype, keep: bool
) -> dict[str, Linear] | None:
    """The linear layers of these (module, names) by name; None if one of them is of an unknown form."""
    linears = {}
    for owner, names in places:
        for name in names:
            linear = Linear.of(getattr(owner, name), dtype, keep=keep)
            if linear is None:
                return None
            linears[name] = linear
    return linears


def attention_window(attention: Any) -> int | None:
    """The sliding window of an attention module (Mistral's stands only in its config)."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return getattr(attention.config, "sliding_window", None) if type(attention).__name__ == "MistralAttention" else None


def norm_weight(module: Any) -> Tensor | None:
    """The weight of a norm module; None without a norm."""
    return None if module is None else module.weight


def norm_eps(module: Any) -> float:
    """What a norm module adds to the mean square; 0 without a norm."""
    if module is None:
        return 0.0
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


def unhooked(layer: nn.Module) -> bool:
    """Whether no module has hooks that a hand-written layer would skip; Transformers' output recorders sleep unless asked for,
    ours have acted."""
    for module in layer.modules():
        if "_hf_hook" in module.__dict__:  # accelerate's
            return False
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        ):
            if hooks and any(not getattr(h, "__module__", "").startswith(SLEEPING) for h in hooks.values()):
                return False
    return True
