"""One decode step through the model's own modules: every supported decoder, its adapters and 4-bit layers, on any device.

The rows of a step go through the model as one packed sequence; a registered attention function stores each row's key and value in
its page and attends over the row's own pages and its prompt's.

Shape suffixes: B rows of the step, H query heads, K key/value heads, D and W head sizes, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ..context.install import Engine
from ..context.support import UnsupportedModelError, check_window
from ..kernels.decode_attention import DecodePlan, decode_attention
from .cache import Kind, LayerCache
from .state import RowState

ATTENTION = "longreach_rollout"
STEP_KWARG = "longreach_step"


class Step:
    """Travels as a keyword argument through one call of the model, to the attention function of each layer."""

    def __init__(self, state: RowState, rows: int, plans: dict[Kind, DecodePlan]) -> None:
        self.state, self.rows, self.plans, self.layer = state, rows, plans, 0
        own_B = state.own_length_S[:rows]
        last_B = (own_B - 1).clamp_min(0).long()
        page = state.limits.page
        self.offset_B = last_B % page
        self.page_B = {}
        for kind, table in state.own_pages.items():
            page_B = table[:rows].gather(1, (last_B // page)[:, None])[:, 0].long()
            self.page_B[kind] = torch.where(own_B > 0, page_B, state.pool.idle_page(kind))


class Probe:
    """Notes what each layer's attention is given, for one token that attends to itself."""

    def __init__(self) -> None:
        self.layers: list[LayerCache] = []


def step_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that Transformers' attention modules call: [1, H, B, D] in, [1, B, H, W] out."""
    step: Step | Probe | None = kwargs.get(STEP_KWARG)
    if step is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} dropped the keyword argument {STEP_KWARG!r}: the rollout engine can't run it. Use "
            "rollout='transformers'."
        )
    check_window(module, sliding_window)
    if torch.is_autocast_enabled(query.device.type):  # as for PyTorch's own attention
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    q_BHD, k_BKD, v_BKW = (x[0].transpose(0, 1) for x in (query, key, value))
    if isinstance(step, Probe):
        heads = k_BKD.shape[1]
        step.layers.append(LayerCache(heads, k_BKD.shape[-1], v_BKW.shape[-1], k_BKD.dtype, sliding_window))
        return v_BKW.repeat_interleave(q_BHD.shape[1] // heads, 1)[None], None
    pool, layer = step.state.pool, step.layer
    k_pages, v_pages, kind = pool.k[layer], pool.v[layer], pool.layers[layer].window
    step.layer += 1
    at = (step.page_B[kind], step.offset_B)
    k_pages[at] = k_BKD
    v_pages[at] = v_BKW
    with pool.prompts_of(layer) as (prompt_k, prompt_v):
        out_BHW = decode_attention(
            q_BHD, k_pages, v_pages, step.plans[kind], scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=softcap, sinks_H=s_aux, prefix_k_pages=prompt_k, prefix_v_pages=prompt_v,
        )  # fmt: skip
    return out_BHW[None], None


AttentionInterface.register(ATTENTION, step_attention)


class ModuleStep:
    """Logits of a step from the model's forward."""

    def __init__(self, model: nn.Module, engine: Engine, state: RowState) -> None:
        self.model, self.engine, self.state = model, engine, state
        self._plans: dict[int, dict[Kind, DecodePlan]] = {}

    def current(self) -> bool:
        """The modules are always those of the model."""
        return True

    def refresh(self) -> None:
        """Nothing is copied from them."""

    def logits(self, rows: int) -> Tensor:
        """[B, V] of the first `rows` rows, each one token further."""
        state = self.state
        state.advance(rows)
        if rows not in self._plans:
            self._plans[rows] = decode_plans(state, rows, self.engine)
        plans = self._plans[rows]
        for plan in plans.values():
            plan.update()
        step = Step(state, rows, plans)
        return call(
            self.model,
            self.engine,
            step,
            state.token_S[None, :rows],
            state.position_S[None, :rows].clamp_min(0).long(),
        )[0]


def decode_plans(state: RowState, rows: int, engine: Engine) -> dict[Kind, DecodePlan]:
    """The work of a step's attention, by kind of layer, over the first `rows` rows."""
    heads = engine.config.num_attention_heads
    out: dict[Kind, DecodePlan] = {}
    for layer in state.pool.layers:
        if layer.window not in out:
            out[layer.window] = DecodePlan(
                state.own_pages[layer.window][:rows],
                state.own_length_S[:rows],
                state.prefix_of_S[:rows],
                state.prefix_pages[layer.window][:rows],
                state.prefix_length_S[:rows],
                state.members_SM[:rows],
                heads=heads,
                kv_heads=layer.kv_heads,
                head_dim=layer.value_dim,
                page=state.limits.page,
                window=layer.window,
            )
    return out


def probe(model: nn.Module, engine: Engine) -> list[LayerCache]:
    """What each layer stores per token, seen from a forward of one token."""
    seen = Probe()
    device = engine.causal.get_input_embeddings().weight.device
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    call(model, engine, seen, zero, zero)
    if len(seen.layers) != len(engine.layers):
        raise UnsupportedModelError(
            f"{engine.config.model_type!r}: {len(seen.layers)} of its {len(engine.layers)} layers store keys and values; the "
            "rollout engine decodes models all of whose layers do. Use rollout='transformers'."
        )
    return seen.layers


def call(model: nn.Module, engine: Engine, step: Step | Probe, ids: Tensor, positions: Tensor) -> Tensor:
    """Logits [1, B, V] of the model with our attention function."""
    with engine.stock(), _attention(engine.config):
        kwargs = {STEP_KWARG: step, "use_cache": False, "position_ids": positions}
        if engine.routers:
            kwargs["output_router_logits"] = False
        return model(input_ids=ids, **kwargs).logits


@contextlib.contextmanager
def _attention(config: Any) -> Iterator[None]:
    kept = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = kept
