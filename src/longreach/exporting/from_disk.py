"""A source from a folder or the Hub: of a run, an adapter, a model, or a GGUF file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..loading import load
from ..model_name import model_place, not_on_the_hub
from ..origin import Origin, origin_of
from ..quant.formats import FORMATS
from .errors import ExportError
from .source import Source, check_tokenizer, live_source
from .weights import CheckpointWeights

RUN_LOG = "log.jsonl"
# Models up to this many parameters are compared in fp32, where only the export's own rounding shows.
FP32_PARAMETERS = 4e9
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def folder_source(given: str | Path, tokenizer: Any = None, *, weights: str | None = None) -> Source:
    """Open it. Weights stay on disk until they are needed, except 4-bit ones made for training, which are made again.

    Args:
        given: a folder, a GGUF file or a Hub id.
        tokenizer: instead of the one that is found there.
        weights: what the adapter was trained on, "nf4" or "mxfp4"; None takes what the run's log says, and without a log what
            the checkpoint stores.
    """
    if weights is not None and weights not in FORMATS:
        raise ExportError(f"weights={weights!r}: choose one of {', '.join(FORMATS)}, or leave it out")
    place = _local(given)
    try:
        origin = origin_of(str(place))
    except ValueError as error:
        raise ExportError(str(error)) from error
    run = _run_header(place)
    trained_on = _trained_on(run, weights)
    base = Path(origin.base) if origin.gguf else _local(origin.base)
    if not origin.gguf and not (base / "config.json").is_file():
        raise ExportError(f"{str(base)!r} holds no config.json, so it is no model")
    folders = tuple(dict.fromkeys(p for p in (place, base) if p.is_dir()))
    facts: dict[str, Any] = {"base_name": origin.base, "folders": folders, "run": run}
    facts["adapter_folder"] = Path(origin.adapter) if origin.adapter else None
    if origin.gguf or _in_four_bits(base, trained_on):
        return dataclasses.replace(_loaded(place, origin, tokenizer, trained_on), **facts)
    return _structure(base, origin, tokenizer, facts)


def onto_original(source: Source) -> Source:
    """The same, with the base weights of the 16-bit checkpoint instead of the 4-bit ones made from it for training."""
    if source.weights is None:
        raise ExportError(
            "merge_onto='original' is for an adapter trained on 4-bit weights made from a 16-bit checkpoint; these were not, "
            "as far as is known here (say it with weights='nf4')"
        )
    folder = _local(source.base_name)
    if not folder.is_dir() or quant_method(origin_of(str(folder)).config()) is not None:
        raise ExportError(f"merge_onto='original': {source.base_name!r} holds no 16-bit weights")
    return dataclasses.replace(source, base=CheckpointWeights(folder), original=True)


def _trained_on(run: dict[str, Any], weights: str | None) -> str | None:
    """The 4-bit format of training, from the option or the run's log."""
    logged = run.get("config", {}).get("model", {}) if isinstance(run.get("config"), dict) else {}
    said = logged.get("weights") if isinstance(logged, dict) else None
    found = weights or said
    return found if found in FORMATS else None


def _in_four_bits(base: Path, trained_on: str | None) -> bool:
    """Whether base weights are packed in a way that only our loading unpacks: all but gpt-oss's own MXFP4."""
    method = quant_method(json.loads((base / "config.json").read_text(encoding="utf-8")).get("quantization_config"))
    return method not in (None, "mxfp4") or (method is None and trained_on is not None)


def _loaded(place: Path, origin: Origin, tokenizer: Any, weights: str | None) -> Source:
    try:
        if tokenizer is not None:
            check_tokenizer(tokenizer, origin.config().get_text_config().vocab_size)
        model, found = load(str(place), weights=weights, device="cpu", parity_check=False)
    except ValueError as error:
        raise ExportError(str(error)) from error
    return live_source(model, tokenizer or found)


def _structure(base: Path, origin: Origin, tokenizer: Any, facts: dict[str, Any]) -> Source:
    """The model's modules without weights, and readers of what is on disk."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(base)
    except ValueError as error:  # an architecture that this Transformers does not know
        raise ExportError(str(error)) from error
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    adapters: dict[str, dict[str, Tensor]] = {}
    if origin.adapter:
        from peft import PeftModel

        adapters["default"] = _adapter_tensors(Path(origin.adapter))
        model = PeftModel.from_pretrained(model, origin.adapter, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
    tokenizer = tokenizer or origin.load_tokenizer()
    return Source(model, tokenizer, config, CheckpointWeights(base), adapters, live=False, **facts)


def load_trained(source: Source) -> nn.Module:
    """Base model and adapter from disk."""
    dtype = _compute_dtype(source)
    if source.adapter_folder is None:
        return load_base(source, dtype)
    return load_adapted(source, source.adapter_folder, dtype)


def load_adapted(source: Source, adapter: Path, dtype: torch.dtype) -> nn.Module:
    """An adapter's folder on the base model: in PEFT, or by `longreach.load` where the base is in 4 bits or a GGUF file."""
    if source.weights is not None or source.base_name.endswith(".gguf"):
        return _load(source, str(adapter), dtype)
    from peft import PeftModel

    return PeftModel.from_pretrained(load_base(source, dtype), str(adapter), autocast_adapter_dtype=False)  # type: ignore


def _compute_dtype(source: Source) -> torch.dtype:
    entries = source.base.entries()
    if sum(torch.Size(e.shape).numel() for e in entries) <= FP32_PARAMETERS:
        return torch.float32
    return next(e.dtype for e in entries if e.dtype in (torch.bfloat16, torch.float16, torch.float32))


def load_base(source: Source, dtype: torch.dtype) -> nn.Module:
    """The base model, without the adapter, by Transformers."""
    from transformers import AutoModelForCausalLM

    place: Any = source.base_name if source.live else getattr(source.base, "folder", source.base_name)
    unpacked: dict[str, Any] = {}
    if quant_method(origin_of(str(place)).config()) == "mxfp4":  # for which Transformers has no kernel on the CPU
        from transformers.utils.quantization_config import Mxfp4Config

        unpacked["quantization_config"] = Mxfp4Config(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **unpacked)
    return model.to(dtype)  # unpacked MXFP4 comes in bf16 whatever was asked for


def _load(source: Source, place: str, dtype: torch.dtype) -> nn.Module:
    stored = None if source.base_name.endswith(".gguf") else quant_method(origin_of(source.base_name).config())
    kwargs: dict[str, Any] = {"dtype": dtype} if stored else {"weights": source.weights, "dtype": dtype}
    return load(place, device="cpu", parity_check=False, **kwargs)[0]


def quant_method(given: Any) -> str | None:
    """The method by which weights are packed, from a configuration or its section; None for plain weights."""
    section = given if isinstance(given, dict) or given is None else getattr(given, "quantization_config", None)
    if section is None:
        return None
    entry = section if isinstance(section, dict) else section.to_dict()
    return str(getattr(entry.get("quant_method"), "value", entry.get("quant_method")))


def _local(given: str | Path) -> Path:
    """The folder or file itself, or the folder of a Hub model (downloaded if it is not in the cache yet)."""
    try:
        path = Path(model_place(given))
    except ValueError as error:
        raise ExportError(str(error)) from error
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise ExportError(f"{str(given)!r} is a file; give the folder that `longreach train` wrote, or a model's")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(given), allow_patterns=_PATTERNS))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ExportError(str(not_on_the_hub(str(given), error))) from error


def _adapter_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise ExportError(f"{folder}: holds adapter_config.json but no adapter_model.safetensors")
    return load_file(file)


def _run_header(folder: Path) -> dict[str, Any]:
    """What the run's log says about model, data, reward and versions; of a checkpoint, its run's log."""
    for place in (folder, folder.parent if folder.name.startswith("checkpoint-") else folder):
        log = place / RUN_LOG
        if log.is_file():
            with log.open(encoding="utf-8") as lines:
                first = json.loads(next(lines, "{}") or "{}")
            return first if first.get("type") == "header" else {}
    return {}
