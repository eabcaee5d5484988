"""What is exported: a model in memory, or a folder (a run, an adapter, a model) that is read from disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .adapter import Changes, changes_of
from .errors import ExportError
from .weights import BaseWeights, CheckpointWeights, MemoryWeights

RUN_LOG = "log.jsonl"
# Read by programs that don't load Transformers' tokenizer.json, and lost when a tokenizer is saved again.
EXTRA_FILES = ("tokenizer.model",)


@dataclass(frozen=True)
class Source:
    """All that an export is made from.

    Attributes:
        model: the live model, or one without weights that has the same modules (`on_disk`).
        tokenizer: the tokenizer to export.
        config: the model's configuration, of the base weights.
        base: where base weights are read.
        adapters: active adapters by name, the tensors of each as PEFT saves them; empty for a plain model.
        base_name: Hub id or folder of the base model, "" if unknown.
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
    folders: tuple[Path, ...] = ()
    adapter_folder: Path | None = None
    run: Mapping[str, Any] | None = None

    @property
    def on_disk(self) -> bool:
        return self.base.in_checkpoint_names

    def changes(self) -> Changes:
        return changes_of(self.model, self.adapters) if self.adapters else Changes()

    @contextmanager
    def trained(self) -> Iterator[nn.Module]:
        """The model as it was trained, for the time of the block. One on disk is loaded by Transformers and PEFT."""
        model: Any = self.model
        if self.on_disk:
            model = load_trained(self)
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            yield model
        finally:
            for module, mode in modes:
                module.training = mode


# On disk, models up to this many parameters are compared in fp32, where only the export's own rounding shows.
FP32_PARAMETERS = 4e9


def load_trained(source: Source) -> nn.Module:
    """Base model and adapter from disk, by stock Transformers and PEFT."""
    model: Any = load_base(source, _compute_dtype(source))
    if source.adapter_folder is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(source.adapter_folder), autocast_adapter_dtype=False)
    return model


def _compute_dtype(source: Source) -> torch.dtype:
    entries = source.base.entries()
    if sum(torch.Size(e.shape).numel() for e in entries) <= FP32_PARAMETERS:
        return torch.float32
    return next(e.dtype for e in entries if e.dtype in (torch.bfloat16, torch.float16, torch.float32))


def load_base(source: Source, dtype: torch.dtype) -> nn.Module:
    """The base model from its folder or the Hub, without the adapter, in the given dtype."""
    from transformers import AutoModelForCausalLM

    weights: Any = source.base
    place = weights.folder if source.on_disk else source.base_name
    model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **_unpacked(source.config))
    return model.to(dtype)  # unpacked MXFP4 comes in bf16 whatever was asked for


def _unpacked(config: Any) -> dict[str, Any]:
    """Arguments with which Transformers unpacks MXFP4 weights, for which it has no kernel on the CPU."""
    if quant_method(config) != "mxfp4":
        return {}
    from transformers.utils.quantization_config import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def quant_method(config: Any) -> str | None:
    """The method by which a checkpoint's weights are packed; None for plain weights."""
    section = getattr(config, "quantization_config", None)
    if section is None:
        return None
    given = section if isinstance(section, dict) else section.to_dict()
    return str(getattr(given.get("quant_method"), "value", given.get("quant_method")))


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
    folders = tuple(
        p for p in (Path(name), Path(str(getattr(tokenizer, "name_or_path", "")))) if str(p) != "." and p.is_dir()
    )
    return Source(root, tokenizer, config, MemoryWeights(root), adapters, name, folders)


def _check_state(model: Any) -> None:
    for name, module in model.named_modules():
        if getattr(module, "merged_adapters", None):
            raise ExportError(f"the adapter is merged into {name!r} already; call model.unmerge_adapter() first")
        if getattr(module, "disable_adapters", False) is True:
            raise ExportError(
                "the adapter is disabled; the export would hold the base model. Call model.enable_adapter_layers()"
            )


def folder_source(given: str | Path, tokenizer: Any = None) -> Source:
    """A source from a run's folder, an adapter's, a model's, or a model's Hub id. Weights stay on disk until they are needed."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = _local(given)
    adapter = folder if (folder / "adapter_config.json").is_file() else None
    base_name, base_folder = str(folder), folder
    if adapter is not None:
        stated = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8")).get(
            "base_model_name_or_path"
        )
        if not stated:
            raise ExportError(f"{folder}/adapter_config.json: base_model_name_or_path is missing; write it there")
        base_name, base_folder = stated, _local(stated)
    if not (base_folder / "config.json").is_file():
        raise ExportError(
            f"{str(folder)!r} holds no model: no config.json and no adapter_config.json{_checkpoint_hint(folder)}"
        )
    config = AutoConfig.from_pretrained(base_folder)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    adapters: dict[str, dict[str, Tensor]] = {}
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter), low_cpu_mem_usage=True, autocast_adapter_dtype=False)
        adapters["default"] = _adapter_tensors(adapter)
    if tokenizer is None:
        own = folder if (folder / "tokenizer_config.json").is_file() else base_folder
        tokenizer = AutoTokenizer.from_pretrained(own)
    return Source(
        model, tokenizer, config, CheckpointWeights(base_folder), adapters, base_name,
        (folder, base_folder), adapter, _run_header(folder),
    )  # fmt: skip


def _local(given: str | Path) -> Path:
    """The folder itself, or that of a Hub model (downloaded if it is not in the cache yet)."""
    path = Path(given).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ExportError(f"{str(given)!r} is a file; give the folder that `longreach train` wrote, or a model's")
    if path.is_absolute() or str(given).count("/") > 1 or str(given).startswith("."):
        raise ExportError(
            f"{str(given)!r}: no such folder; give the folder of a run, an adapter or a model, or a model's Hub id"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(str(given), allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])
        )
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ExportError(f"{str(given)!r} is no folder, and can't be had from the Hub: {error}") from error


def _adapter_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise ExportError(f"{folder}: holds adapter_config.json but no adapter_model.safetensors")
    return load_file(file)


def _checkpoint_hint(folder: Path) -> str:
    found = sorted(p.name for p in folder.glob("checkpoint-*") if p.is_dir()) if folder.is_dir() else []
    return f"; an interrupted run can be exported from its checkpoint, e.g. {folder / found[-1]}" if found else ""


def _run_header(folder: Path) -> dict[str, Any]:
    """What the run's log says about model, data, reward and versions; of a checkpoint, its run's log."""
    for place in (folder, folder.parent if folder.name.startswith("checkpoint-") else folder):
        log = place / RUN_LOG
        if log.is_file():
            with log.open(encoding="utf-8") as lines:
                first = json.loads(next(lines, "{}") or "{}")
            return first if first.get("type") == "header" else {}
    return {}
