"""What is exported: a model in memory, or one on disk of which only the structure is built (`from_disk`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..quant.experts import FourBitExperts
from ..quant.linear import FourBitLinear
from .adapter import Changes, changes_of
from .errors import ExportError
from .weights import BaseWeights, MemoryWeights

# Read by programs that don't load Transformers' tokenizer.json, and lost when a tokenizer is saved again.
EXTRA_FILES = ("tokenizer.model",)


@dataclass(frozen=True)
class Source:
    """All that an export is made from.

    Attributes:
        model: the live model or, with `live=False`, one of the same modules without weights.
        tokenizer: the tokenizer to export.
        config: the model's configuration.
        base: where base weights are read.
        adapters: active adapters by name, the tensors of each as PEFT saves them; empty for a plain model.
        base_name: Hub id, folder or file of the base model, "" if unknown.
        weights: "nf4" or "mxfp4" if the base weights were in 4 bits while the model trained and are read as such; else None.
        original: base weights are those of the 16-bit checkpoint although the model trained on 4-bit ones.
        folders: where tokenizer files may lie that saving a tokenizer would lose, most specific first.
        adapter_folder: the adapter's folder, for an adapter on disk.
        run: the header record of the run's log, empty if there is none.
    """

    model: nn.Module
    tokenizer: Any
    config: Any
    base: BaseWeights
    adapters: Mapping[str, Mapping[str, Tensor]]
    base_name: str
    live: bool = True
    weights: str | None = None
    original: bool = False
    folders: tuple[Path, ...] = ()
    adapter_folder: Path | None = None
    run: Mapping[str, Any] | None = None

    @property
    def base_model(self) -> Any:
        """The Transformers model, without PEFT's wrapper."""
        root: Any = self.model
        return root.get_base_model() if hasattr(root, "peft_config") else root

    def changes(self) -> Changes:
        """What the adapters change. Raises ExportError for a tensor that belongs nowhere."""
        return changes_of(self.model, self.adapters) if self.adapters else Changes()

    @contextmanager
    def trained(self) -> Iterator[nn.Module]:
        """The model as it was trained, in evaluation mode for the time of the block."""
        if self.live:
            model: nn.Module = self.model
        else:
            from .from_disk import load_trained

            model = load_trained(self)
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            yield model
        finally:
            for module, mode in modes:
                module.training = mode


def live_source(model: nn.Module, tokenizer: Any) -> Source:
    """A source from objects. A PeftModel gives its active adapters; merged or disabled ones are refused."""
    root: Any = model
    config = getattr(root, "config", None)
    if config is None or not hasattr(root, "get_input_embeddings"):
        raise ExportError(
            f"model is a {type(model).__name__}; pass a Transformers model, a PeftModel, or the folder of one"
        )
    if tokenizer is None:
        raise ExportError("tokenizer is None; pass the model's tokenizer (None is only for a model given as a folder)")
    adapters: dict[str, dict[str, Tensor]] = {}
    if hasattr(root, "peft_config"):
        _check_state(root)
        from peft import get_peft_model_state_dict

        for name in root.active_adapters:
            state = get_peft_model_state_dict(root, adapter_name=name, save_embedding_layers=False)
            adapters[name] = {key: value.detach().cpu() for key, value in state.items()}
    name = str(getattr(config, "_name_or_path", "") or "")
    places = (Path(name), Path(str(getattr(tokenizer, "name_or_path", ""))))
    folders = tuple(place for place in places if place != Path() and place.is_dir())
    return Source(
        root, tokenizer, config, MemoryWeights(root), adapters, name, weights=stored_format(root), folders=folders
    )


def check_tokenizer(tokenizer: Any, size: int) -> list[str]:
    """Refuse a tokenizer with tokens that a vocabulary of this size has no row for, as another model's has.

    Returns:
        A remark on special tokens beyond the vocabulary that no text or chat holds (padding, or the images of a model of text).
    """
    beyond = sorted((number, text) for text, number in tokenizer.get_vocab().items() if number >= size)
    if not beyond:
        return []
    added, ends = tokenizer.added_tokens_decoder, (tokenizer.bos_token_id, tokenizer.eos_token_id)
    chat = str(tokenizer.chat_template)
    idle = [n for n, text in beyond if n in added and added[n].special and n not in ends and text not in chat]
    if len(idle) < len(beyond):
        number, text = next((n, text) for n, text in beyond if n not in idle)
        raise ExportError(
            f"the tokenizer has {len(tokenizer):,} tokens, the model's vocabulary {size:,} (ids 0 to {size - 1:,}), so that "
            f"{text!r} with id {number:,} has no row: was another tokenizer used? Export with the one that the model was "
            "trained with"
        )
    named = ", ".join(repr(text) for _, text in beyond)
    return [f"the tokenizer's {named} lies beyond the model's vocabulary of {size:,}: the model can't be given it"]


def stored_format(model: nn.Module) -> str | None:
    """The format of a model's 4-bit weights; None if it has none."""
    found = {m.format.name for m in model.modules() if isinstance(m, (FourBitLinear, FourBitExperts))}
    return min(found) if found else None


def _check_state(model: Any) -> None:
    for name, module in model.named_modules():
        if getattr(module, "merged_adapters", None):
            raise ExportError(f"the adapter is merged into {name!r} already; call model.unmerge_adapter() first")
        if getattr(module, "disable_adapters", False) is True:
            raise ExportError(
                "the adapter is disabled; the export would hold the base model. Call model.enable_adapter_layers()"
            )
