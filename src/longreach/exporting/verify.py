"""Load an export back in its own format and compare it with the training model. Each check returns its numbers and its faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .adapter import Changes, LowRank
from .chat import CONVERSATIONS, chat_faults, rendered
from .compare import Arrival, arrival_record, arrivals, as_record, beyond, difference, rounding_notes
from .libllama import GGUFModel
from .limits import Limit, computed_limit, gguf_limit
from .merge import checkpoint_changes
from .probe import BEYOND_ASCII, PROBE_TOKENS, SAMPLED_ROWS, TOKENIZED, Reference, Sample, logits_of
from .source import Source
from .vocabulary import stop_ids
from .weights import BaseWeights, CheckpointWeights, Entry


@dataclass
class Check:
    """One comparison: its name, its numbers for verification.json, and what is wrong, in words."""

    name: str
    record: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_merged(reference: Reference, source: Source, folder: Path, dtype: torch.dtype, device: torch.device) -> Check:
    """A merged folder in Transformers: logits, adapted weights, tokenizer, chat template, stop tokens."""
    from transformers import AutoModelForCausalLM

    check = Check("merged weights in Transformers")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=reference.dtype)
    model.to(device).eval()
    if source.original:
        found = difference(reference.logits, logits_of(model, reference.probes))
        check.record |= as_record(reference, found, ())
        check.notes.append(
            f"merged onto the original 16-bit weights, not the {source.weights} ones it trained on: relative difference "
            f"{found.relative:.1e}, same top token {found.agreement:.1%}, KL {found.kl:.1e} nats from the model that trained"
        )
    else:
        _compare(check, reference, model, computed_limit(reference.dtype), dtype)
    check_tokenizer(check, source, folder)
    return check


def check_written(source: Source, folder: Path, changes: Changes, dtype: torch.dtype) -> Check:
    """Read the written weights back from disk, without loading a model: every adapted tensor is base + change, rounded once.

    For a source whose base weights are read from a checkpoint; memory holds one slice of one tensor.
    """
    check = Check("weights read back")
    assert source.base.in_checkpoint_names
    written = CheckpointWeights(folder)
    stored = {entry.name: entry for entry in written.entries()}
    before = {entry.name: entry for entry in source.base.entries()}
    by_name = checkpoint_changes(source.base_model, changes, set(before))
    arrived: list[Arrival] = []
    for name, added in by_name.added.items():
        if name not in stored or name not in before:
            check.faults.append(f"{name}: not in the {'export' if name in before else 'base'}")
            continue
        arrived += _read_back(source.base, written, before[name], stored[name], added, dtype)
    lost = [a for a in arrived if not a.fits]
    check.faults += [f"{a.target}: {a.share:.3f} of the adapter's change is in the exported weight" for a in lost[:5]]
    if arrived:
        check.record["adapter"] = arrival_record(arrived)
        check.notes += rounding_notes(arrived, dtype)
    check_tokenizer(check, source, folder)
    return check


def _read_back(
    base: BaseWeights, written: BaseWeights, before: Entry, stored: Entry, added: list[LowRank], dtype: torch.dtype
) -> list[Arrival]:
    """Arrivals of one tensor: of each expert, or of the first rows of a matrix."""
    whole = len(before.shape) == 2
    parts = (
        [slice(0, min(SAMPLED_ROWS, before.shape[0]))] if whole else [slice(e, e + 1) for e in range(before.shape[0])]
    )
    found = []
    for part in parts:
        old = base.read(before, part).float()
        delta = torch.zeros_like(old)
        for change in added:
            change.add_to(delta, part)
        flat = Sample(before.name, None, slice(None), old.flatten(0, -2), delta.flatten(0, -2))
        now = written.read(stored, part).flatten(0, -2)
        found += arrivals([flat], {before.name: now}, dtype=dtype)
    return found


def check_adapter(reference: Reference, source: Source, folder: Path, loaded_model: nn.Module) -> Check:
    """An adapter folder, loaded on its base: every tensor of the file, logits, tokenizer, chat template."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    check = Check("adapter in PEFT")
    model: Any = loaded_model.eval()
    with safe_open(str(folder / "adapter_model.safetensors"), framework="pt") as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    trained = {key: tensor for tensors in source.adapters.values() for key, tensor in tensors.items()}
    loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
    for key in sorted(trained):
        if key not in stored or not torch.equal(stored[key].float(), trained[key].float()):
            check.faults.append(
                f"adapter tensor {key!r} is {'changed' if key in stored else 'missing'} in the exported file"
            )
        elif key not in loaded or not torch.equal(loaded[key].float().cpu(), stored[key].to(loaded[key].dtype).float()):
            check.faults.append(f"adapter tensor {key!r} does not reach PEFT's model")
    check.record["tensors"] = len(trained)
    _compare(check, reference, model, computed_limit(reference.dtype), None)
    check_tokenizer(check, source, folder)
    return check


def _compare(check: Check, reference: Reference, model: Any, limit: Limit, dtype: torch.dtype | None) -> None:
    """Logits within the limit and, with the `dtype` of the export, every adapted weight changed by what the adapter adds."""
    found = difference(reference.logits, logits_of(model, reference.probes))
    arrived = []
    if dtype is not None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        arrived = arrivals(reference.samples, parameters, dtype=dtype)
        check.notes += rounding_notes(arrived, dtype)
        lost = [a for a in arrived if not a.fits]
        for a in lost[:5]:
            check.faults.append(
                f"{a.target}: {a.share:.3f} of the adapter's change is in the exported weight, 1 expected"
            )
        if lost[5:]:
            check.faults.append(f"and {len(lost) - 5} weights more")
    check.record |= as_record(reference, found, arrived) | {"limit": vars(limit)}
    check.faults += [f"logits: {fault}" for fault in beyond(limit, found)]


def check_tokenizer(check: Check, source: Source, folder: Path) -> None:
    """The exported tokenizer, chat template and stop tokens against those of training."""
    from transformers import AutoTokenizer

    exported: Any = AutoTokenizer.from_pretrained(folder)
    expected = source.tokenizer
    for text in TOKENIZED:
        if exported(text)["input_ids"] != expected(text)["input_ids"]:
            check.faults.append(f"the exported tokenizer gives other ids for {text[:20]!r}")
    if expected.chat_template:
        texts = rendered(exported) if exported.chat_template else [None] * len(CONVERSATIONS)
        check.faults += chat_faults(
            expected,
            texts,
            lambda t: exported(t, add_special_tokens=False)["input_ids"],
            where="the exported tokenizer",
        )
    wanted, got = expected_stops(source), stop_ids(folder)
    if (folder / "config.json").is_file() and sorted(wanted) != sorted(got):
        check.faults.append(f"stop tokens {got}, expected {wanted}")
    check.record["chat template"] = "compared" if expected.chat_template else "none"


def expected_stops(source: Source) -> list[int]:
    """Where generation stops, by the training model's generation settings, its configuration or its tokenizer."""
    base = source.base_model
    for place in () if source.live else source.folders:
        if found := stop_ids(place):
            return found
    generation = getattr(base, "generation_config", None)
    for holder in (generation, source.config.get_text_config()):
        given = getattr(holder, "eos_token_id", None)
        if given is not None:
            return [int(i) for i in (given if isinstance(given, (list, tuple)) else [given])]
    return []


def check_gguf(reference: Reference, source: Source, file: Path, kind: str, stops: list[int]) -> Check:
    """A GGUF file in libllama: logits, tokenizer, chat template, stop tokens."""
    check = Check(f"{kind} in libllama")
    with GGUFModel(file, context=2 * PROBE_TOKENS) as model:
        got = [model.logits(probe.ids) for probe in reference.probes]
        found = difference(reference.logits, got)
        limit = gguf_limit(kind, reference.dtype)
        check.record |= as_record(reference, found, ()) | {"limit": vars(limit)}
        check.faults += [f"logits: {fault}" for fault in beyond(limit, found)]
        _check_vocabulary(check, source, model)
        _check_chat(check, source, model)
        check.faults += [
            f"token {i} stops generation in training but not in libllama" for i in stops if not model.ends(i)
        ]
    check.record["stop tokens"] = stops
    return check


def _check_vocabulary(check: Check, source: Source, model: GGUFModel) -> None:
    tokenizer = source.tokenizer
    for text in TOKENIZED:
        wanted, got = tokenizer(text)["input_ids"], model.tokenize(text, special=True)
        if wanted == got:
            continue
        if text == BEYOND_ASCII and _is_unigram(tokenizer):
            check.notes.append(
                "llama.cpp spells unknown characters of a unigram tokenizer as <unk>, the tokenizer in bytes"
            )
        else:
            check.faults.append(f"libllama tokenizes {text[:20]!r} as {got[:8]}…, the tokenizer as {wanted[:8]}…")


def _is_unigram(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and type(backend.model).__name__ == "Unigram"


def _check_chat(check: Check, source: Source, model: GGUFModel) -> None:
    if not source.tokenizer.chat_template:
        check.record["chat template"] = "none"
        return
    stored = model.chat_template
    texts = rendered(source.tokenizer, template=stored) if stored else [None] * len(CONVERSATIONS)
    check.faults += chat_faults(
        source.tokenizer, texts, lambda t: model.tokenize(t, special=False), where="the GGUF file"
    )
    check.record["chat template"] = "compared"
