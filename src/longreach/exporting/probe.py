"""What the training model computes, measured once, for its exports to be compared with: logits, weights, token ids.

Shape suffixes: S sequence, V vocabulary, N sampled rows, I the rest of a weight's last dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..quant.experts import FourBitExperts
from .adapter import Changes, bare_name

PROBE_TOKENS = 64
SAMPLED_VALUES = 2**20  # of one weight, at the most
SAMPLED_ROWS = 16
_RANDOM_SEED = 20_811
_TEXTS = (
    "The harbour master keeps two ledgers. In the first she writes every ship that arrives, with its draught in metres and the "
    "hour of the tide; in the second, which nobody else reads, she writes what the captains said about the weather.",
    "def moving_average(values, width):\n    total = sum(values[:width])\n    yield total / width\n    for old, new in "
    "zip(values, values[width:]):\n        total += new - old\n        yield total / width\n",
    "Question: A tank holds 240 litres and loses 3% of its content each hour. How much is left after 12 hours? Answer: "
    "240 * 0.97 ** 12 = 166.5 litres, so a little over two thirds.",
)
BEYOND_ASCII = "Größe: 12 µm, naïve café, 東京の天気, Привет! 🚀"
TOKENIZED = (BEYOND_ASCII, "A plain line.\n\n  Indented, with 3.14 and x = y\n")  # compared as token ids


@dataclass(frozen=True)
class Probe:
    """A token sequence [S] and where it is from; `text` is None for random tokens."""

    name: str
    ids: tuple[int, ...]
    text: str | None


@dataclass(frozen=True)
class Sample:
    """Rows of an adapted weight: what they were and what the adapter adds, by the training model itself, fp32.

    Attributes:
        target: name of the parameter.
        expert: its expert, for stacked experts.
        rows: which rows (of that expert).
        base_NI: the weight that was trained against.
        delta_NI: what the adapter adds, by PEFT's own formula.
    """

    target: str
    expert: int | None
    rows: slice
    base_NI: Tensor
    delta_NI: Tensor


@dataclass(frozen=True)
class Reference:
    """The training model's own numbers; logits are fp32 on the CPU, one [S, V] for each probe."""

    probes: tuple[Probe, ...]
    logits: tuple[Tensor, ...]
    samples: tuple[Sample, ...]
    dtype: torch.dtype


def probes_for(tokenizer: Any, vocab_size: int) -> tuple[Probe, ...]:
    """Passages of prose, code and arithmetic, and random tokens."""
    probes = []
    for number, text in enumerate(_TEXTS):
        ids = tokenizer(text)["input_ids"][:PROBE_TOKENS]
        probes.append(Probe(f"text {number + 1}", tuple(ids), text))
    special = set(tokenizer.all_special_ids)
    usable = torch.tensor([i for i in range(min(vocab_size, len(tokenizer))) if i not in special])
    drawn = torch.randint(len(usable), (PROBE_TOKENS,), generator=torch.Generator().manual_seed(_RANDOM_SEED))
    return (*probes, Probe("random tokens", tuple(usable[drawn].tolist()), None))


def logits_of(model: nn.Module, probes: Sequence[Probe]) -> tuple[Tensor, ...]:
    """Logits of a Transformers model, [S, V] fp32 on the CPU for each probe."""
    device = next(model.parameters()).device
    found = []
    with torch.no_grad():
        for probe in probes:
            ids = torch.tensor([probe.ids], device=device)
            found.append(model(input_ids=ids, use_cache=False).logits[0].float().cpu())
    return tuple(found)


def measure(model: nn.Module, tokenizer: Any, changes: Changes) -> Reference:
    """Run the training model and sample its adapted weights."""
    root: Any = model
    probes = probes_for(tokenizer, root.get_input_embeddings().weight.shape[0])
    with torch.no_grad():
        return Reference(probes, logits_of(model, probes), tuple(_samples(root, changes)), root.dtype)


def _samples(model: Any, changes: Changes) -> list[Sample]:
    if not hasattr(model, "peft_config"):
        return []
    samples: list[Sample] = []
    seen: set[str] = set()
    for name, module in model.named_modules():
        if not hasattr(module, "get_delta_weight"):
            continue
        adapters = [a for a in module.active_adapters if a in module.lora_A or a in module.lora_embedding_A]
        if not adapters:
            continue
        target = f"{bare_name(name)}.{getattr(module, 'parameter_name', 'weight')}"
        base = base_weight(module, model.dtype)
        delta = sum(module.get_delta_weight(a).float() for a in adapters)
        samples += _sampled(target, base, delta)
        seen.add(target)
    parameters = {bare_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    for target, tensor in changes.replaced.items():
        if target not in seen and tensor.dim() == 2:
            samples += _sampled(target, torch.zeros_like(tensor), tensor.to(parameters[target].device))
    return samples


def base_weight(module: Any, dtype: torch.dtype) -> Tensor:
    """The weight under an adapter, as it was trained against: unpacked to `dtype` if it is stored in fewer bits."""
    base, name = module.get_base_layer(), getattr(module, "parameter_name", "weight")
    if isinstance(base, FourBitExperts):
        return base.dequantize(name, dtype)
    return base.dequantize(dtype) if hasattr(base, "dequantize") else getattr(base, name).detach()


def _sampled(target: str, base: Tensor, delta: Any) -> list[Sample]:
    experts: list[int | None] = list(range(base.shape[0])) if base.dim() == 3 else [None]
    count = max(1, min(SAMPLED_ROWS, SAMPLED_VALUES // (len(experts) * base.shape[-1]), base.shape[-2]))
    rows = slice(0, None, max(1, base.shape[-2] // count) | 1)  # an odd step meets both kinds of interleaved rows
    picked = []
    for expert in experts:
        w, d = (base, delta) if expert is None else (base[expert], delta[expert])
        picked.append(Sample(target, expert, rows, w[rows].float().cpu(), d[rows].float().cpu()))
    return picked
