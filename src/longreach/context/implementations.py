"""Which attention implementations on this machine compute gpt-oss rightly: sinks and windows, forward and backward.

Every implementation that is registered in Transformers, and ours, runs gpt-oss's attention module on the same weights and tokens;
the reference is Transformers' eager attention in fp64. Many kernels know no sinks: they give other outputs without a word, or
the right outputs and no gradient for the sinks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..attention import KeyValues
from .install import ATTENTION
from .kv import CHUNK_KWARG, ChunkContext
from .tree import TokenTree

TOKENS, WINDOW = 96, 32
WIDTH, HEADS, KV_HEADS, HEAD_SIZE = 256, 8, 2, 64
# A right implementation errs at most so many times what eager attention errs in the same dtype, or this floor.
MULTIPLE = 3.0
FLOOR = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
PACKAGES = {"flash_attention_2": "2", "flash_attention_3": "3", "flash_attention_4": "4"}


@dataclass(frozen=True)
class Finding:
    """What was found about one implementation.

    Attributes:
        name: as in `attn_implementation`; ours is "longreach".
        absent: why it does not run here, or None.
        errors: by what was compared (output, gradients), relative error with and without a window, the larger; infinite where
            a gradient is missing.
        allowed: the largest error of a right implementation, likewise.
    """

    name: str
    absent: str | None
    errors: dict[str, float]
    allowed: dict[str, float]

    @property
    def wrong(self) -> list[str]:
        """What is wrong, in words; empty for a right or an absent one."""
        return [
            f"no gradient for {what}" if error == float("inf") else f"{what} off by {error:.0%}"
            for what, error in self.errors.items()
            if not error <= self.allowed[what]
        ]

    def __str__(self) -> str:
        if self.absent is not None:
            return self.absent
        if self.wrong:
            return "WRONG for gpt-oss: " + ", ".join(self.wrong)
        return f"right, forward and backward (largest relative error {max(self.errors.values()):.0e})"


def check_implementations(device: torch.device, dtype: torch.dtype | None = None) -> Iterator[Finding]:
    """All that are registered here, ours first, one after the other: some compile for a while.

    Args:
        device: where they run.
        dtype: None for bf16 on a GPU and fp32 elsewhere.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    registered = [name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in name]  # paged ones only generate
    names = [ATTENTION, "eager", *sorted({*registered} - {ATTENTION, "eager"})]
    exact = {window: _run("eager", window, device, torch.float64) for window in (None, WINDOW)}
    eager = _check("eager", exact, device, dtype, {})
    allowed = {what: max(MULTIPLE * error, FLOOR[dtype]) for what, error in eager.errors.items()}
    for name in names:
        yield replace(eager, allowed=allowed) if name == "eager" else _check(name, exact, device, dtype, allowed)


def _check(
    name: str, exact: dict[Any, dict[str, Tensor]], device: torch.device, dtype: torch.dtype, allowed: dict[str, float]
) -> Finding:
    absent = _absent(name)
    errors: dict[str, float] = {}
    if absent is None:
        try:
            for window, expected in exact.items():
                for what, x in _run(name, window, device, dtype).items():
                    errors[what] = max(errors.get(what, 0.0), _error(x, expected[what]))
        except Exception as error:  # what a kernel raises that does not fit this device is its own
            text = " ".join(str(error).split())
            absent, errors = f"does not run here: {type(error).__name__}: {text[:160]}", {}
    return Finding(name, absent, errors, allowed)


def _absent(name: str) -> str | None:
    """Why a known package's implementation is not there; asked first, so that nothing is fetched from the Hub."""
    from transformers import utils

    if name not in PACKAGES:
        return None
    available: Callable[[], bool] | None = getattr(utils, f"is_flash_attn_{PACKAGES[name]}_available", None)
    return None if available is not None and available() else "not installed"


def _error(x: Tensor | None, exact: Tensor) -> float:
    if x is None:
        return float("inf")
    error = float((x.double() - exact).norm() / exact.norm())
    return error if error == error else float("inf")


def _run(name: str, window: int | None, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Output of the attention module and gradients of its input, projections and sinks."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    kind = "full_attention" if window is None else "sliding_attention"
    config = GptOssConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_SIZE, num_hidden_layers=1,
        layer_types=[kind], sliding_window=WINDOW,
    )  # fmt: skip
    config._attn_implementation = name
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        module: Any = GptOssAttention(config, 0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator).bfloat16() * (1.0 if p.ndim == 1 else 0.05))
        module.sinks += 3  # takes a large share of each softmax, so that a kernel without sinks is far off
    module.to(device, dtype)
    hidden, dout = (torch.randn(1, TOKENS, WIDTH, generator=generator).bfloat16().to(device, dtype) for _ in range(2))
    hidden.requires_grad_()
    cos, sin = (
        torch.randn(1, TOKENS, HEAD_SIZE // 2, generator=generator).bfloat16().to(device, dtype) for _ in range(2)
    )
    out = module(hidden, (cos, sin), **_arguments(name, config, hidden, window))[0]
    leaves: dict[str, Tensor] = {"input": hidden, "sinks": module.sinks}
    leaves |= {part: module.get_submodule(f"{part}_proj").weight for part in "qkv"}
    grads = torch.autograd.grad(out, list(leaves.values()), dout, allow_unused=True)
    named = {"the sinks" if n == "sinks" else f"gradient of {n}": g for n, g in zip(leaves, grads)}
    return {"output": out.detach(), **named}


def _arguments(name: str, config: Any, hidden: Tensor, window: int | None) -> dict[str, Any]:
    """The mask as Transformers makes it for this implementation; for ours, the whole sequence as one chunk."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    if name == ATTENTION:
        layout = TokenTree.from_sequences([torch.arange(TOKENS)]).layout
        (chunk,) = layout.chunks(TOKENS)
        return {"attention_mask": None, CHUNK_KWARG: ChunkContext(KeyValues(TOKENS), chunk, False, None)}
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    positions = torch.arange(TOKENS, device=hidden.device)
    # The names of arguments that don't matter here differ between versions of Transformers.
    known = inspect.signature(make).parameters
    given = {
        "config": config, "inputs_embeds": hidden, "attention_mask": None, "position_ids": positions[None],
        "cache": None, "past_key_values": None, "cache_position": positions,
    }  # fmt: skip
    return {"attention_mask": make(**{k: v for k, v in given.items() if k in known})}
