"""Replay a training step of real size on PyTorch's meta device: every tensor is allocated, none has memory behind it.

The engine itself runs, so what is counted is what it allocates. Kernels are stood in for by functions that allocate what the
Triton kernels allocate; attention by one that allocates outputs, plus what a flash backward takes inside. Used by the planner's
tests and by `bench/planner.py --device meta`.
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

ROUND = 512  # CUDA's caching allocator hands out multiples of this


class LiveBytes(TorchDispatchMode):
    """`now` and `peak`: bytes of the storages on `device` that operators made inside the `with` block and that still live."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in _pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = -(-storage.nbytes() // ROUND) * ROUND
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size

    def ignore(self, model: nn.Module) -> None:
        """Leave a model's weights out of the count."""
        for tensor in (*model.parameters(), *model.buffers()):
            self._seen.add(tensor.untyped_storage())


class FlashShaped:
    """Attention on the meta device: outputs, and a flash backward's fp32 sums of dq and, for grouped heads, of dk and dv."""

    name = "replay"

    def unsupported(self, **call: Any) -> str | None:
        return None

    def forward(self, q, k, v, cu_q, cu_k, **how: Any) -> tuple[Tensor, Tensor]:
        return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)

    def backward(self, dout, q, k, v, out, lse, cu_q, cu_k, **how: Any) -> tuple[Tensor, Tensor, Tensor]:
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        sums = [x.new_empty(x.shape, dtype=torch.float32) for x in ((q,) if q.shape[1] == k.shape[1] else (q, k, v))]
        del sums
        return grads


class LeanKernels:
    """The functions of `kernels.reference`, allocating only what the Triton kernels do."""

    def rms_norm(self, x, weight, eps, *, unit_offset=False, out=None):
        return torch.empty_like(x) if out is None else out, x.new_empty(len(x), dtype=torch.float32)

    def rms_norm_backward(self, dy, x, weight, rstd, *, unit_offset=False, add=None, need_dweight=False, out=None):
        target = out if out is not None else add
        return torch.empty_like(x) if target is None else target, torch.empty_like(weight) if need_dweight else None

    def qk_norm_rope(
        self, q, k, cos, sin, q_weight=None, k_weight=None, eps=0.0, unit_offset=False, *, q_out=None, k_out=None
    ):
        stats = None if q_weight is None else tuple(x.new_empty(x.shape[:2], dtype=torch.float32) for x in (q, k))
        outs = [x.new_empty(x.shape) if out is None else out for x, out in ((q, q_out), (k, k_out))]
        return *outs, stats

    def qk_norm_rope_backward(
        self, dq, dk, q, k, cos, sin, q_weight=None, k_weight=None, stats=None, unit_offset=False,
        *, need_dweight=False, dq_out=None, dk_out=None,
    ):  # fmt: skip
        dweights = [torch.empty_like(w) if need_dweight and w is not None else None for w in (q_weight, k_weight)]
        return dq if dq_out is None else dq_out, dk if dk_out is None else dk_out, *dweights

    def swiglu(self, gate, up, *, activation="silu", out=None):
        return gate.new_empty(gate.shape) if out is None else out

    def swiglu_backward(self, dh, gate, up, *, activation="silu", return_h=False):
        return (gate, up, dh) if return_h else (gate, up)

    def merge_blocks(self, out_a, lse_a, out_b, lse_b) -> None: ...

    def apply_sink(self, out, lse, sinks) -> None: ...

    def row_logprob(self, logits, labels, temperature=1.0, softcap=None, want_entropy=False):
        found = [logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3)]
        return found[0], found[1], found[2] if want_entropy else None

    def row_logprob_backward(self, logits, labels, lse, dlogprob, *rest: Any, **how: Any):
        return logits


@contextlib.contextmanager
def meta_engine() -> Iterator[None]:
    """Make the engine run on meta tensors: stand-in kernels and attention, no autocast, host memory that takes no bytes."""
    from longreach.attention import use_backend
    from longreach.context import logprob, offload

    enabled = torch.is_autocast_enabled
    lean = LeanKernels()
    with contextlib.ExitStack() as stack:
        for name in ("logprob", "merge", "norm", "rope", "swiglu"):
            module = importlib.import_module(f"longreach.kernels.{name}")
            stack.enter_context(mock.patch.object(module, "implementation", lambda x, name: lean))
        off = mock.patch.object(torch, "is_autocast_enabled", lambda *d: False if d == ("meta",) else enabled(*d))
        stack.enter_context(off)
        for name, stand_in in (("save", _save), ("prefetch", _prefetch), ("fetch", _fetch)):
            stack.enter_context(mock.patch.object(offload.HostRow, name, stand_in))
        at_once = logprob.LOGITS_AT_ONCE[True]  # that of a GPU
        stack.enter_context(mock.patch.object(logprob, "LOGITS_AT_ONCE", (at_once, at_once)))
        stack.enter_context(use_backend(FlashShaped()))
        yield


def _save(row: Any, start: int, stop: int, x: Tensor) -> None:
    row.host_T = SimpleNamespace(shape=(row.tokens, *x.shape[1:]), dtype=x.dtype)


def _prefetch(row: Any, start: int, stop: int) -> None:
    if (start, stop) not in row.coming and row.host_T is not None:
        x = torch.empty((stop - start, *row.host_T.shape[1:]), dtype=row.host_T.dtype, device="meta")
        row.coming[start, stop] = x


def _fetch(row: Any, start: int, stop: int) -> Tensor:
    row.prefetch(start, stop)
    return row.coming.pop((start, stop))


@dataclass(frozen=True)
class Replayed:
    """Peak bytes above the weights, of the forward and of the backward."""

    forward: int
    backward: int

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward)


def replay(model: nn.Module, tree: Any, **options: Any) -> Replayed:
    """One step of a model on the meta device; options as for `longreach.enable`. Gradients are left in the parameters."""
    import longreach
    from longreach.context.logprob import score

    longreach.enable(model, parity_check=False, **options)
    live = LiveBytes("meta")
    live.ignore(model)
    with meta_engine(), live:
        logprobs = score(model, tree).logprobs
        forward, live.peak = live.peak, live.now
        torch.cat(logprobs).sum().backward()
        del logprobs
    return Replayed(forward, live.peak)
