"""Experts whose frozen weights are stored in 4 bits: gpt-oss's MXFP4 checkpoints as they are, or any known experts quantized.

Takes the place of Transformers' experts module: called in the same way, with the same parameter names for PEFT. Weights are
made for a range of experts at a time, for all rows of a chunk that go to them; where a whole layer is small enough it is made
once for the pass.

Shape suffixes: T tokens, k choices of a token, E experts, e a range of them, M hidden size, F width of an expert, O and I output
and input features of a product (stored [E, O, I]).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..kernels import Gating, Routing, route, wide_dtype
from ..kernels.dequant import NESTED_BLOCK
from .formats import NF4, Format, Packed
from .linear import shared
from .mixture import LowRank, Part, local_offsets, mixture_backward, mixture_forward, pieces
from .stock_experts import gating_of, stock_forward

PRODUCTS = ("gate_up_proj", "down_proj")
EXPERT_SCRATCH = 512 * 2**20  # bytes of dequantized weights: what takes more comes range by range
CHECKPOINT_NAMES = {"mxfp4": {"codes": "blocks"}}  # gpt-oss's word

Adapters = dict[str, tuple[Tensor, Tensor, float]]  # product -> a [E, r, I], b [E, r, O], scale


def is_experts(module: nn.Module) -> bool:
    """Whether these are experts of Transformers that can be stored in 4 bits."""
    return gating_of(module) is not None


class FourBitExperts(nn.Module):
    """All experts of one layer, frozen.

    Attributes:
        format: of both weights; their tensors are parameters (uint8) and buffers, `gate_up_proj_<part>`, `down_proj_<part>`.
        gate_up_proj_bias, down_proj_bias: as in the module this one stands for, or None.
        stock: the class of that module.
    """

    def __init__(self, stock: Any, format: Format) -> None:
        super().__init__()
        gating = gating_of(stock)
        if gating is None:
            raise ValueError(
                f"{type(stock).__name__}: these experts can't be stored in 4 bits; their weights stay as they are"
            )
        self.gating: Gating = gating
        self.format, self.stock, self.config = format, type(stock), stock.config
        self.is_transposed, self.has_bias, self.has_gate = stock.is_transposed, stock.has_bias, True
        self.is_concatenated, self.num_experts = not gating.interleaved, stock.num_experts
        self.alpha, self.limit = getattr(stock, "alpha", None), getattr(stock, "limit", None)
        if hasattr(stock, "act_fn"):
            self.act_fn = stock.act_fn
        self.shapes = {name: self._stored(getattr(stock, name)).shape for name in PRODUCTS}
        self.dtype = stock.gate_up_proj.dtype
        for name in PRODUCTS:
            bias = getattr(stock, name + "_bias", None)
            self.register_parameter(name + "_bias", None if bias is None else nn.Parameter(bias.detach(), False))

    @classmethod
    def empty(cls, stock: Any, format: Format, *, stored: bool) -> FourBitExperts:
        """In the place of a module whose weights are about to be loaded.

        Args:
            stock: Transformers' module, on the meta device.
            stored: True for a checkpoint that holds the packed tensors; False for one that holds whole weights, which `adopt`
                will be given: until then their parameters stand here by their own names.
        """
        made = cls(stock, format)
        for name in PRODUCTS:
            if stored:
                for part, (shape, dtype) in format.layout(made.shapes[name]).items():
                    made._put(name, part, torch.empty(shape, dtype=dtype, device="meta"))
            else:
                made.register_parameter(name, nn.Parameter(getattr(stock, name).detach(), False))
        return made

    @classmethod
    def of(cls, stock: Any, format: Format) -> FourBitExperts:
        """A module quantized; biases are shared."""
        made = cls(stock, format)
        for name in PRODUCTS:
            made.adopt(name, getattr(stock, name).detach())
        return made.train(stock.training)

    def adopt(self, name: str, weight: Tensor) -> None:
        """Quantize a whole weight, in the layout of the module this one stands for."""
        packed = self.format.quantize(self._stored(weight.detach()).contiguous())
        self._parameters.pop(name, None)
        for part, tensor in packed.tensors.items():
            self._put(name, part, tensor)

    def packed(self, name: str) -> Packed:
        """A stored weight [E, O, I]. Raises FormatError, naming the tensor, if one does not fit."""
        parts = self.format.layout(self.shapes[name])
        tensors = {part: getattr(self, self._part_name(name, part)).detach() for part in parts}
        return Packed(self.format, tuple(self.shapes[name]), tensors)

    def check(self, prefix: str) -> None:
        """FormatError, naming the tensor after `prefix`, if a stored tensor does not fit."""
        for name in PRODUCTS:
            self.packed(name).check(f"{prefix}.{name}")

    def dequantize(self, name: str, dtype: torch.dtype) -> Tensor:
        """A whole weight in the layout of the module this one stands for."""
        return self._stored(self.packed(name).dequantize(dtype))

    def stock_module(self, dtype: torch.dtype) -> nn.Module:
        """Transformers' module with the weights in `dtype`; biases are shared."""
        with torch.device("meta"):
            made = self.stock(self.config)
        for name in PRODUCTS:
            made.register_parameter(name, nn.Parameter(self.dequantize(name, dtype).contiguous(), False))
            if self.has_bias:
                made.register_parameter(name + "_bias", getattr(self, name + "_bias"))
        return made.train(self.training)

    def dequantize_range(self, name: str, experts: slice, dtype: torch.dtype) -> Tensor:
        """[e, O, I] of a range of experts that begins and ends at a multiple of `granule`."""
        packed, (E, *each) = self.packed(name), self.shapes[name]
        if experts == slice(0, E):
            return packed.dequantize(dtype)
        size, tensors = math.prod(each), dict(packed.tensors)
        for part, weights in self._weights_per_entry(size).items():
            tensors[part] = tensors[part][experts.start * size // weights : -(-experts.stop * size // weights)]
        return Packed(self.format, (experts.stop - experts.start, *each), tensors).dequantize(dtype)

    def _weights_per_entry(self, expert: int) -> dict[str, int]:
        """How many weights an entry along the first axis of each stored tensor belongs to, of `expert` weights an expert; without
        the tensors that all share."""
        if not isinstance(self.format, NF4):
            return {"codes": expert, "scales": expert}
        found = {"codes": 2, "absmax": self.format.block}
        return found | ({"nested_absmax": self.format.block * NESTED_BLOCK} if self.format.double else {})

    @property
    def granule(self) -> int:
        """The fewest experts that can be made alone: scales of scales of NF4 may span several."""
        if not isinstance(self.format, NF4):
            return 1
        block = self.format.block * (NESTED_BLOCK if self.format.double else 1)
        sizes = [math.prod(shape[1:]) for shape in self.shapes.values()]
        return min(self.num_experts, math.lcm(*(block // math.gcd(block, size) for size in sizes)))

    # ---- the pass

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, M] from tokens [T, M], chosen experts [T, k] and their weights, as Transformers' module.

        `experts_implementation="eager"` runs the module's own loop over experts on weights made one expert at a time: slow,
        and independent of everything here.
        """
        return self.run(hidden_states, top_k_index, top_k_weights, {})

    def run(self, x_TM: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, adapters: Adapters) -> Tensor:
        """`forward` with adapters."""
        kind = x_TM.device.type
        if self.config._experts_implementation == "eager":
            return stock_forward(self, x_TM, expert_Tk, weight_Tk, adapters)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_TM.dtype
        given = [adapters.get(name, (None, None, 1.0)) for name in PRODUCTS]
        scales = [scale for *_, scale in given]
        flat = [t for a, b, _ in given for t in (a, b)]
        biases = [getattr(self, name + "_bias") for name in PRODUCTS]
        out = _Mixture.apply(self, x_TM.to(dtype), expert_Tk, weight_Tk, scales, *biases, *flat)
        return out.to(x_TM.dtype)

    def weights(self, dtype: torch.dtype, keep: bool = True) -> FourBitWeights:
        """For one pass over a layer; see `FourBitWeights`."""
        return FourBitWeights(self, dtype, keep)

    # ---- what PEFT and Transformers see

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True):
        """With `recurse=False`, how PEFT looks for a parameter to adapt, also the two weights, by their shapes."""
        yield from super().named_parameters(prefix, recurse, remove_duplicate)
        if not recurse:
            for name in PRODUCTS:
                if name not in self._parameters:
                    yield prefix + ("." if prefix else "") + name, getattr(self, name)

    def __getattr__(self, name: str) -> Any:
        if name in PRODUCTS and name not in self._parameters:
            return self._stand_in(name)
        return super().__getattr__(name)

    def __delattr__(self, name: str) -> None:
        if name in PRODUCTS and name not in self._parameters:
            raise RuntimeError(
                f"LoRA on {name} of experts in 4 bits runs through Longreach's own operation, and this adapter was there before "
                "it: call longreach.enable(model)"
            )
        super().__delattr__(name)

    def _stand_in(self, name: str) -> nn.Parameter:
        """Shape, dtype and device of a weight, without its values: reading them gives NaN, writing them an error."""
        shape = list(self.shapes[name])
        if self.is_transposed:
            shape[1], shape[2] = shape[2], shape[1]
        device = getattr(self, self._part_name(name, "codes")).device
        one = torch.full((), math.nan, dtype=self.dtype, device=device)
        return nn.Parameter(one.expand(shape), requires_grad=False)

    def extra_repr(self) -> str:
        hidden, width = self.shapes["down_proj"][1:]
        return f"experts={self.num_experts}, hidden={hidden}, width={width}, format={self.format}"

    def _stored(self, weight: Tensor) -> Tensor:
        """Between the stock layout and [E, O, I]."""
        return weight.transpose(1, 2) if self.is_transposed else weight

    def _part_name(self, name: str, part: str) -> str:
        return f"{name}_{CHECKPOINT_NAMES.get(self.format.name, {}).get(part, part)}"

    def _put(self, name: str, part: str, tensor: Tensor) -> None:
        name = self._part_name(name, part)
        if tensor.dtype == torch.uint8:
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        else:
            self.register_buffer(name, tensor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FourBitExperts:
        """Moves go through; casts reach biases only: the scales' dtype is part of the format."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        probe = fn(torch.empty(0, dtype=self.dtype))
        self.dtype = probe.dtype if probe.is_floating_point() else self.dtype
        return self


class FourBitWeights:
    """The weights of a layer for one pass, in the compute dtype.

    With `keep`, and where all experts together take at most `EXPERT_SCRATCH`, they are made once for the pass. Else a range of
    experts at a time, for the rows of one chunk; ranges without a row are left out, which has to ask the device for the loads.
    """

    def __init__(self, experts: FourBitExperts, dtype: torch.dtype, keep: bool) -> None:
        self.experts, self.dtype, self.gating = experts, dtype, experts.gating
        biases = [getattr(experts, name + "_bias") for name in PRODUCTS]
        self.gate_up_bias, self.down_bias = (None if b is None else b.detach() for b in biases)
        self.keep = keep
        self._made: tuple[Tensor, Tensor] | None = None

    @property
    def at_once(self) -> int:
        """Experts that are made together."""
        experts = self.experts
        each = sum(math.prod(shape[1:]) for shape in experts.shapes.values()) * self.dtype.itemsize
        fit = EXPERT_SCRATCH // each // experts.granule * experts.granule
        return min(experts.num_experts, max(fit, experts.granule))

    def parts(self, routing: Routing) -> Iterator[Part]:
        E, step = self.experts.num_experts, self.at_once
        if step == E:
            made: Any = self._made or shared(self.experts, self.dtype, lambda: self._make(slice(0, E)))  # type: ignore
            self._made = made if self.keep else None
            yield from self._pieces(routing, slice(0, E), slice(0, routing.slots), made)
            return
        ends = [0, *routing.offsets_E.tolist()]
        for experts in self._ranges(ends, step):
            rows = slice(ends[experts.start], ends[experts.stop])
            yield from self._pieces(routing, experts, rows, self._make(experts))

    def _ranges(self, ends: list[int], step: int) -> Iterator[slice]:
        """Runs of at most `step` experts, without granules that have no row at either end."""
        E, granule = self.experts.num_experts, self.experts.granule
        busy = [at for at in range(0, E, granule) if ends[min(at + granule, E)] > ends[at]]
        while busy:
            taken = [at for at in busy if at < busy[0] + step]
            # A gap costs weights that nobody needs: end the run there.
            run = next((i for i in range(1, len(taken)) if taken[i] != taken[i - 1] + granule), len(taken))
            yield slice(taken[0], min(taken[run - 1] + granule, E))
            busy = busy[run:]

    def _make(self, experts: slice) -> tuple[Tensor, Tensor]:
        gate_up, down = (self.experts.dequantize_range(name, experts, self.dtype) for name in PRODUCTS)
        return gate_up.transpose(1, 2), down.transpose(1, 2)

    def _pieces(self, routing: Routing, experts: slice, rows: slice, made: tuple[Tensor, Tensor]) -> Iterator[Part]:
        for piece in pieces(rows):
            yield Part(experts, piece, local_offsets(routing, experts, piece), *made)


class _Mixture(torch.autograd.Function):
    """The mixture with its hand-written backward. Keeps tokens and choices; weights are made again."""

    @staticmethod
    def forward(ctx: Any, experts: FourBitExperts, x_TM, expert_Tk, weight_Tk, scales, bias_EG, bias_EM, *adapters):
        ctx.experts, ctx.scales = experts, scales
        ctx.save_for_backward(x_TM, expert_Tk, weight_Tk, *adapters)
        lows = _low_ranks(adapters, scales, x_TM.dtype)
        routing = route(expert_Tk, experts.num_experts)
        return mixture_forward(x_TM, routing, weight_Tk, experts.weights(x_TM.dtype, keep=False), lows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TM: Tensor):
        x_TM, expert_Tk, weight_Tk, *adapters = ctx.saved_tensors
        lows = _low_ranks(adapters, ctx.scales, x_TM.dtype)
        routing = route(expert_Tk, ctx.experts.num_experts)
        weights = ctx.experts.weights(x_TM.dtype, keep=False)
        biases = [getattr(ctx.experts, name + "_bias") for name in PRODUCTS]
        trained = ctx.needs_input_grad[5:7]
        dbiases: Any = [b.new_zeros(b.shape, dtype=wide_dtype(b.dtype)) if t else None for b, t in zip(biases, trained)]
        dx_TM, dweight_Tk, found = mixture_backward(
            dy_TM.contiguous(), x_TM, routing, weight_Tk, weights, lows, dbiases
        )
        grads = [grad for sums in found for grad in ((None, None) if sums is None else sums.done())]
        typed = [None if g is None else g.to(a.dtype) for g, a in zip([*dbiases, *grads], [*biases, *adapters])]
        return None, dx_TM, None, dweight_Tk.to(weight_Tk.dtype), None, *typed


def _low_ranks(adapters, scales: list[float], dtype: torch.dtype) -> tuple[LowRank | None, LowRank | None]:
    pairs = zip(adapters[::2], adapters[1::2], scales)
    first, second = (None if a is None else LowRank.of(a, b, scale, dtype, (True, True)) for a, b, scale in pairs)
    return first, second
