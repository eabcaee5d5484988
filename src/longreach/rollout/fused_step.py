"""One decode step written out by hand, for the families that `context/fused.py` knows: few launches, no Python inside a capture.

The same function of the same parameters as the model's modules: per layer four matrix products, and between them the norms,
rotary embedding, attention and activation with the adapters' second product folded in.

Shape suffixes: B rows of the step, M hidden size, H query heads, D head size, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..context.fused import GATE_UP, QKV, FusedLayer, norm_eps, norm_weight, unhooked
from ..context.fused_moe import FusedMoeLayer, fused_layer
from ..context.install import Engine
from ..context.logprob import final_scale
from ..kernels.decode_attention import decode_attention
from ..kernels.decode_ops import decode_add_norm, decode_qkv, decode_swiglu
from ..kernels.norm import rms_norm
from ..quant.embedding import rows_dtype
from .cache import Kind
from .joined import JoinedLinears
from .module_step import decode_plans
from .moe_step import CodedExperts, MixedExperts, experts_of
from .state import RowState

DTYPES = (torch.bfloat16, torch.float32)


class _Norm:
    """A norm as the ops take it: its own weight, or where that multiplies in fp32 (gpt-oss), a copy of its distance from one."""

    def __init__(self, module: Any, unit_offset: bool, wide: bool) -> None:
        self.module, self.unit_offset, self.wide = module, unit_offset or wide, wide
        self.eps = norm_eps(module)
        self.weight: Tensor = module.weight.detach().float() - 1 if wide else module.weight.detach()

    def current(self) -> bool:
        return self.wide or self.weight.data_ptr() == self.module.weight.data_ptr()

    def refresh(self) -> None:
        if self.wide:
            self.weight.copy_(self.module.weight.detach().float() - 1)


class _Layer:
    """What a step needs of one layer."""

    def __init__(self, layer: Any, form: FusedLayer, dtype: torch.dtype) -> None:
        self.form, self.window = form, form.window
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = JoinedLinears([getattr(attention, n) for n in QKV], dtype)
        self.out = JoinedLinears([attention.o_proj], dtype)
        self.groups = [self.qkv, self.out]
        self.experts: CodedExperts | MixedExperts | None = None
        if isinstance(form, FusedMoeLayer):
            self.experts = experts_of(form, mlp.experts, dtype)
        else:
            self.gate_up = JoinedLinears([getattr(mlp, n) for n in GATE_UP], dtype)
            self.down = JoinedLinears([mlp.down_proj], dtype)
            self.groups += [self.gate_up, self.down]
        self.heads, self.kv_heads = self.qkv.rows[0] // form.head_dim, self.qkv.rows[1] // form.head_dim
        wide = isinstance(form, FusedMoeLayer) and form.moe.wide_norm
        self.norm_in, self.norm_mlp = (_Norm(m, form.family.unit_offset, wide) for m in (form.norm_in, form.norm_mlp))
        self.norms = [self.norm_in, self.norm_mlp]

    @staticmethod
    def fits(layer: Any, form: FusedLayer, dtype: torch.dtype) -> bool:
        """Whether a step can run this layer by hand."""
        attention, mlp = layer.self_attn, layer.mlp
        groups = [[getattr(attention, n) for n in QKV], [attention.o_proj]]
        if not isinstance(form, FusedMoeLayer):
            groups += [[getattr(mlp, n) for n in GATE_UP], [mlp.down_proj]]
        return all(JoinedLinears.joins(group, dtype) for group in groups)


class FusedStep:
    """Logits of a step from the layers' hand-written form."""

    def __init__(self, engine: Engine, state: RowState, forms: list[FusedLayer], dtype: torch.dtype) -> None:
        self.engine, self.state, self.dtype = engine, state, dtype
        self.layers = [_Layer(layer, form, dtype) for layer, form in zip(engine.layers, forms)]
        decoder: Any = engine.decoder
        self.rotary = decoder.rotary_emb
        self.norm = _Norm(decoder.norm, forms[-1].family.unit_offset, self.layers[-1].norm_in.wide)
        self.rotary_by_type = "layer_type" in inspect.signature(type(self.rotary).forward).parameters
        types = getattr(engine.config, "layer_types", None)
        self.types = list(types[: len(self.layers)]) if types and self.rotary_by_type else [""] * len(self.layers)
        self.divisor, self.softcap = final_scale(engine.config, 1.0)
        self._plans: dict[int, dict[Kind, Any]] = {}
        self._rows: dict[int, Tensor] = {}

    @classmethod
    def of(cls, engine: Engine, state: RowState) -> FusedStep | None:
        """The step of a model, or None where its modules must run."""
        embedding = engine.causal.get_input_embeddings()
        dtype, device = rows_dtype(embedding), embedding.weight.device.type
        if dtype not in DTYPES or (torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != dtype):
            return None
        forms = [fused_layer(layer, dtype, keep=False) for layer in engine.layers]
        fit = all(f is not None and _Layer.fits(layer, f, dtype) for layer, f in zip(engine.layers, forms))
        return cls(engine, state, forms, dtype) if fit else None  # type: ignore[arg-type]

    @property
    def captures(self) -> bool:
        """Whether a step can be captured in a CUDA graph."""
        return all(layer.experts is None or layer.experts.captures for layer in self.layers)

    def _held(self) -> list[Any]:
        held: list[Any] = [self.norm]
        for layer in self.layers:
            held += [*layer.groups, *layer.norms, *([] if layer.experts is None else [layer.experts])]
        return held

    def current(self) -> bool:
        """Whether the model's tensors still are those that this step was made from."""
        return all(held.current() for held in self._held()) and all(map(unhooked, self.engine.layers))

    def refresh(self) -> None:
        """Adapters, biases and norms as they are now."""
        for held in self._held():
            held.refresh()

    def prepare(self, rows: int) -> None:
        """Make what a step over `rows` rows keeps between steps (not to be done inside a capture)."""
        if rows not in self._plans:
            self._plans[rows] = decode_plans(self.state, rows, self.engine)
            self._rows[rows] = torch.arange(rows, dtype=torch.int32, device=self.state.device)

    def logits(self, rows: int) -> Tensor:
        """[B, V] of the first `rows` rows, each one token further."""
        self.prepare(rows)
        state, plans = self.state, self._plans[rows]
        state.advance(rows)
        for plan in plans.values():
            plan.update()
        h_BM = self.engine.causal.get_input_embeddings()(state.token_S[:rows])
        tables = self._rotary(h_BM, state.position_S[:rows])
        first = self.layers[0].norm_in
        x_BM, _ = rms_norm(h_BM, first.weight, first.eps, unit_offset=first.unit_offset)
        for i, layer in enumerate(self.layers):
            after = self.layers[i + 1].norm_in if i + 1 < len(self.layers) else self.norm
            x_BM = self._layer(i, layer, h_BM, x_BM, after, tables[self.types[i]], rows)
        logits_BV = self.engine.causal.get_output_embeddings()(x_BM)
        if self.softcap is not None:
            logits_BV = self.softcap * torch.tanh(logits_BV / self.softcap)
        return logits_BV if self.divisor == 1.0 else logits_BV / self.divisor

    def _rotary(self, h_BM: Tensor, position_B: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Rotary tables [B, R] of the rows' positions, by type of layer."""
        positions = position_B.clamp_min(0).long()[None]
        out = {}
        for kind in dict.fromkeys(self.types):
            cos, sin = self.rotary(h_BM, positions, kind) if self.rotary_by_type else self.rotary(h_BM, positions)
            cos, sin = cos[0], sin[0]
            if cos.shape[-1] * 2 == self.layers[0].form.head_dim:  # gpt-oss has each angle once
                cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
            out[kind] = (cos, sin)
        return out

    def _layer(
        self,
        index: int,
        layer: _Layer,
        h_BM: Tensor,
        x_BM: Tensor,
        after: _Norm,
        cos_sin: tuple[Tensor, Tensor],
        rows: int,
    ) -> Tensor:
        """Adds the layer to h in place; returns the next layer's normed input."""
        form, pool, state = layer.form, self.state.pool, self.state
        k_pages, v_pages, plan = pool.k[index], pool.v[index], self._plans[rows][layer.window]
        q_BHD = decode_qkv(
            layer.qkv(x_BM), layer.heads, layer.kv_heads, form.head_dim, lora_b_Or=layer.qkv.lora_b_Or, bias_O=layer.qkv.bias_O,
            q_norm_D=norm_weight(form.q_norm), k_norm_D=norm_weight(form.k_norm), eps=norm_eps(form.k_norm),
            unit_offset=form.family.unit_offset, cos_SR=cos_sin[0], sin_SR=cos_sin[1], position_B=self._rows[rows],
            k_pages=k_pages, v_pages=v_pages, own_pages_BN=state.own_pages[layer.window][:rows],
            own_length_B=state.own_length_S[:rows],
        )  # fmt: skip
        with pool.prompts_of(index) as (prompt_k, prompt_v):
            a_BHD = decode_attention(
                q_BHD, k_pages, v_pages, plan, scale=form.scale, sinks_H=form.sinks, prefix_k_pages=prompt_k,
                prefix_v_pages=prompt_v,
            )  # fmt: skip
        x_BM = self._join(h_BM, layer.out, layer.out(a_BHD.flatten(1)), layer.norm_mlp, form, 0)
        if layer.experts is not None:
            return self._join(h_BM, None, layer.experts(x_BM), after, form, 1)
        z_BF = decode_swiglu(layer.gate_up(x_BM), lora_b_Or=layer.gate_up.lora_b_Or, activation=form.family.activation)
        return self._join(h_BM, layer.down, layer.down(z_BF), after, form, 1)

    def _join(
        self, h_BM: Tensor, group: JoinedLinears | None, y_BN: Tensor, norm: _Norm, form: FusedLayer, which: int
    ) -> Tensor:
        """h += a product's output [normed], its bias and adapter added; returns norm(h)."""
        return decode_add_norm(
            h_BM, y_BN, norm.weight, norm.eps, lora_b_Or=None if group is None else group.lora_b_Or,
            bias_M=None if group is None else group.bias_O,
            post_weight_M=None if form.norm_after is None else form.norm_after[which].weight, unit_offset=norm.unit_offset,
        )  # fmt: skip
