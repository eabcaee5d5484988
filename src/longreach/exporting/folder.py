"""The files of a merged model beside its weights: configuration, generation settings, tokenizer and chat template."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from .adapter import Changes
from .errors import ExportError
from .merge import merged_parts, unties
from .shards import ShardWriter
from .source import EXTRA_FILES, Source

PACKING_KEYS = ("quantization_config", "_pre_quantization_dtype")


def write_merged(
    source: Source, folder: Path, dtype: torch.dtype, changes: Changes, *, keep_packed: bool = False
) -> None:
    """Write a model folder: 16-bit safetensors, and all that belongs to them.

    Weights are read, merged and written one after the other, so that memory holds no more than one parameter of the model (and
    of a model in memory, nothing beside itself and that).
    """
    with ShardWriter(folder) as writer:
        for part in merged_parts(source.model, source.base, changes, dtype, keep_packed=keep_packed):
            writer.add(part.name, part.dtype, part.shape, part.pieces())
    packed = keep_packed and any(e.packed and not changes.touches(e.name) for e in source.base.entries())
    write_config(source, folder, dtype, untied=unties(source.config, changes), packed=packed)
    write_tokenizer(source, folder)


def write_config(source: Source, folder: Path, dtype: torch.dtype, *, untied: bool, packed: bool) -> None:
    """config.json without traces of quantization, and generation_config.json."""
    config = copy.deepcopy(source.config)
    if not packed:
        for key in PACKING_KEYS:
            if hasattr(config, key):
                delattr(config, key)
    config.dtype = dtype
    if untied:
        config.tie_word_embeddings = False
    base = source.base_model
    config.architectures = [type(base).__name__]
    config.save_pretrained(folder)
    generation = _generation_config(source, base)
    if generation is not None:
        generation.save_pretrained(folder)


def _generation_config(source: Source, base: Any) -> Any:
    from transformers import GenerationConfig

    for place in () if source.live else source.folders:
        if (place / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(place)
    return getattr(base, "generation_config", None)


def write_tokenizer(source: Source, folder: Path) -> None:
    """Tokenizer and chat template, and tokenizer files of the source that saving doesn't write."""
    try:
        source.tokenizer.save_pretrained(folder)
    except (AttributeError, TypeError) as error:
        raise ExportError(f"tokenizer is a {type(source.tokenizer).__name__} and can't be saved: {error}") from error
    for name in EXTRA_FILES:
        if (folder / name).exists():
            continue
        found = next((place / name for place in source.folders if (place / name).is_file()), None)
        if found is not None:
            shutil.copyfile(found, folder / name)


def write_adapter(source: Source, folder: Path) -> None:
    """The active adapter as PEFT saves it, and the tokenizer."""
    root: Any = source.model
    if source.adapter_folder is not None:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copyfile(source.adapter_folder / name, folder / name)
    else:
        (name,) = source.adapters
        config = root.peft_config[name]
        if not (config.base_model_name_or_path or source.base_name):
            raise ExportError(
                "the base model has no name (config._name_or_path is empty), so nobody could load the adapter; save the "
                "base model and load it from there, or choose format='merged'"
            )
        root.save_pretrained(folder, selected_adapters=[name])
        if name != "default":  # PEFT puts other names into a folder of their own
            for file in (folder / name).iterdir():
                file.rename(folder / file.name)
            (folder / name).rmdir()
        (folder / "README.md").unlink(missing_ok=True)
        file = folder / "adapter_config.json"
        written = json.loads(file.read_text(encoding="utf-8"))
        if not written.get("base_model_name_or_path"):  # PEFT takes it from the model only while the adapter is made
            written["base_model_name_or_path"] = source.base_name
            file.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(source, folder)
