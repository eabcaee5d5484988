"""`longreach.export`: write, load back, compare, and only then put in place."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import gguf_file, libllama, ollama, vllm
from .adapter import Changes
from .card import write_card
from .errors import ExportError, MismatchError
from .folder import write_adapter, write_merged
from .from_disk import folder_source, load_adapted, onto_original
from .probe import Reference, measure
from .source import Source, check_tokenizer, live_source
from .staging import REPORT, staged
from .verify import Check, check_adapter, check_gguf, check_merged, check_written
from .vocabulary import stop_ids

FORMATS = ("adapter", "merged", "vllm", "gguf", "ollama")
MERGED_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
VERIFY = ("full", "weights", "off")
MERGE_ONTO = ("trained", "original")


@dataclass(frozen=True)
class Exported:
    """A finished export: where it is, what was compared, and remarks that belong to it."""

    path: Path
    format: str
    quantization: str | None
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    uploaded: str | None = None


@dataclass(frozen=True)
class Options:
    """What is asked for, checked. See `export` for the fields."""

    format: str = "merged"
    quantization: str | None = None
    verify: str = "full"
    force: bool = False
    as_adapter: bool = False
    upload: str | None = None
    private: bool = True
    dry_run: bool = False
    say: Callable[[str], None] = field(default=lambda line: None, repr=False)

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ExportError(f"format={self.format!r}: choose one of {', '.join(FORMATS)}")
        if self.verify not in VERIFY:
            raise ExportError(f"verify={self.verify!r}: choose one of {', '.join(VERIFY)}")
        if self.verify == "weights" and (self.is_gguf or self.is_adapter):
            raise ExportError(
                f"verify='weights' is for merged weights; with format={self.format!r} choose 'full' or 'off'"
            )
        allowed = self.allowed_quantizations
        if self.quantization is not None and self.quantization not in allowed:
            choice = f"choose one of {', '.join(allowed)}" if allowed else "leave it out"
            raise ExportError(f"quantization={self.quantization!r} with format={self.format!r}: {choice}")
        if self.as_adapter and self.format != "vllm":
            raise ExportError(f"as_adapter=True is for format='vllm'; for format={self.format!r} leave it out")
        if self.dry_run and self.upload is None:
            raise ExportError("dry_run=True is about an upload: give upload='user/name' too")
        if self.upload is not None and self.upload.count("/") != 1:
            raise ExportError(f"upload={self.upload!r}: give a repository of the Hub as 'user/name'")

    @property
    def allowed_quantizations(self) -> tuple[str, ...]:
        if self.format in ("gguf", "ollama"):
            return gguf_file.TYPES
        return () if self.is_adapter else tuple(MERGED_DTYPES)

    @property
    def is_adapter(self) -> bool:
        return self.format == "adapter" or self.as_adapter

    @property
    def is_gguf(self) -> bool:
        return self.format in ("gguf", "ollama")

    @property
    def dtype(self) -> torch.dtype:
        """Of merged weights; GGUF files are made from bf16, f16 ones from fp16."""
        if self.is_gguf:
            return torch.float16 if self.quantization == "f16" else torch.bfloat16
        return MERGED_DTYPES[self.quantization or "bf16"]


def export(
    model: nn.Module | str | Path,
    tokenizer: Any,
    path: str | Path,
    *,
    format: str = "merged",
    quantization: str | None = None,
    verify: str = "full",
    force: bool = False,
    weights: str | None = None,
    merge_onto: str = "trained",
    as_adapter: bool = False,
    upload: str | None = None,
    private: bool = True,
    dry_run: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Exported:
    """Export a trained model, and prove it by loading it back.

    Args:
        model: a Transformers model or PeftModel, or a folder: of a run, of an adapter, of a model. From a folder, weights are
            read and merged one tensor at a time.
        tokenizer: its tokenizer; None takes the one in the folder.
        path: the folder to write. For "gguf" a path that ends in ``.gguf`` is written as a single file.
        format: "merged" (16-bit safetensors for Transformers), "adapter" (PEFT), "vllm" (merged, and checked for vLLM), "gguf"
            (llama.cpp) or "ollama" (GGUF and Modelfile).
        quantization: "bf16" (default) or "fp16" of merged weights; for GGUF "f16", "bf16", "q8_0" (default), "q4_k_m", ...
        verify: "full" loads the export back and compares logits, weights, chat template and stop tokens with the training
            model; "weights" reads merged weights back from disk and needs memory for a part of one tensor only; "off".
        force: replace what is at `path`, in one step.
        weights: of a model given as a folder: what the adapter was trained on, "nf4" or "mxfp4"; None takes what the run's log
            says, and without a log what the checkpoint stores.
        merge_onto: "trained", the weights that were trained against; or "original", the 16-bit weights from which these 4-bit
            weights were made, and say how far the result is from the model that trained.
        as_adapter: for "vllm", the adapter instead of merged weights.
        upload: also upload to this Hub repository, "user/name"; `private` if it has to be created.
        dry_run: with `upload`, only list what would be uploaded.
        say: called with a line of text at each step.

    Returns:
        What was written and compared. A report is in ``verification.json`` beside the model.

    Raises:
        ExportError: wrong arguments, a model that the format can't hold, another model's tokenizer, an existing `path`, a full
            disk. Nothing is left behind.
        MismatchError: the export does not compute what the model computes; it was kept as ``path.bad`` for a look.
    """
    options = Options(format, quantization, verify, force, as_adapter, upload, private, dry_run, say)
    if isinstance(model, (str, Path)):
        source = folder_source(model, tokenizer, weights=weights)
    elif weights is not None:
        raise ExportError(
            f"weights={weights!r} is for a model given as a folder; one in memory is merged onto its own weights"
        )
    else:
        source = live_source(model, tokenizer)
    if merge_onto not in MERGE_ONTO:
        raise ExportError(f"merge_onto={merge_onto!r}: choose one of {', '.join(MERGE_ONTO)}")
    if merge_onto == "original":
        source = onto_original(source)
    return _Export(source, Path(path).expanduser().resolve(), options).run()


class _Export:
    """One export under way."""

    def __init__(self, source: Source, target: Path, options: Options) -> None:
        self.source, self.target, self.options = source, target, options
        self.changes: Changes = source.changes()
        self.checks: list[Check] = []
        self.notes: list[str] = []
        self.reference: Reference | None = None
        self.single_file = options.format == "gguf" and target.suffix == ".gguf"
        self.kind = options.quantization or (gguf_file.DEFAULT_TYPE if options.is_gguf else None)
        _refuse_what_cannot_work(source, options)
        self.notes += check_tokenizer(source.tokenizer, source.base_model.get_input_embeddings().weight.shape[0])
        for place in source.folders:
            if target == place.resolve() or target in place.resolve().parents:
                raise ExportError(f"path={str(target)!r} would replace the model that is exported; choose another path")

    def run(self) -> Exported:
        options = self.options
        with staged(
            self.target, force=options.force, needed_bytes=self._needed_bytes(), single_file=self.single_file
        ) as folder:
            if options.verify == "full":
                options.say("measuring the training model")
                with self.source.trained() as trained:
                    self.reference = measure(trained, self.source.tokenizer, self.changes)
                    self.device = next(trained.parameters()).device
            write: dict[str, Callable[[Path], None]] = {
                "adapter": self._adapter, "merged": self._merged, "vllm": self._vllm, "gguf": self._gguf, "ollama": self._ollama,
            }  # fmt: skip
            write[options.format](folder)
            self._report(folder)
        if options.format == "ollama":
            name = ollama.create(self.target)
            self.notes.append(f"run it with: ollama run {name}" if name else f"{ollama.how_to_create(self.target)}")
        made = Exported(self.target, options.format, self.kind, tuple(self.checks), tuple(dict.fromkeys(self.notes)))
        return self._upload(made)

    def _needed_bytes(self) -> int:
        """The most that is on disk at once: for GGUF, merged weights, a 16-bit file and a quantized one."""
        if self.options.is_adapter:
            return sum(t.nbytes for tensors in self.source.adapters.values() for t in tensors.values())
        merged = sum(2 * torch.Size(e.shape).numel() for e in self.source.base.entries())
        return merged * 3 if self.options.is_gguf else merged

    def _adapter(self, folder: Path) -> None:
        self.options.say("writing the adapter")
        write_adapter(self.source, folder)
        if self.reference is not None:
            self.options.say("loading it back on the base model, in PEFT")
            loaded = load_adapted(self.source, folder, self.reference.dtype).to(self.device)
            self._add(check_adapter(self.reference, self.source, folder, loaded))

    def _merged(self, folder: Path) -> None:
        self._write_and_check_merged(folder, self.options.dtype)

    def _write_and_check_merged(self, folder: Path, dtype: torch.dtype, *, keep_packed: bool = False) -> None:
        self.options.say(f"writing merged weights, {str(dtype).removeprefix('torch.')}")
        write_merged(self.source, folder, dtype, self.changes, keep_packed=keep_packed)
        if self.reference is not None:
            self.options.say("loading them back in Transformers")
            self._add(check_merged(self.reference, self.source, folder, dtype, self.device))
        if self.options.verify == "weights" or (self.source.original and self.options.verify != "off"):
            self.options.say("reading them back")
            self._add(check_written(self.source, folder, self.changes, dtype))

    def _vllm(self, folder: Path) -> None:
        if self.options.as_adapter:
            self._adapter(folder)
        else:
            self._merged(folder)
        check = Check("what vLLM asks for")
        check.faults += vllm.faults(folder, adapter=self.options.as_adapter)
        check.record["class"] = type(self.source.base_model).__name__
        self._add(check)
        self.notes.append(f"serve it with: {vllm.command(self.source, self.target, adapter=self.options.as_adapter)}")

    def _gguf(self, folder: Path) -> None:
        assert self.kind is not None
        self._write_gguf(folder / f"{_file_stem(self.target)}-{self.kind}.gguf")

    def _ollama(self, folder: Path) -> None:
        assert self.kind is not None
        file = folder / f"model-{self.kind}.gguf"
        stops = self._write_gguf(file)
        generation = getattr(self.source.base_model, "generation_config", None)
        text, template_faults = ollama.modelfile(self.source.tokenizer, file.name, stops, generation)
        (folder / ollama.FILE).write_text(text, encoding="utf-8")
        check = Check("Ollama's Modelfile")
        check.faults += template_faults
        self._add(check)

    def _write_gguf(self, out: Path) -> list[int]:
        """Merged weights in a folder of their own, from there to GGUF. Returns the stop tokens."""
        assert self.kind is not None
        with tempfile.TemporaryDirectory(prefix=".merged-", dir=out.parent) as made:
            merged = Path(made)
            keep = self.kind == "mxfp4"
            self._write_and_check_merged(merged, self.options.dtype, keep_packed=keep)
            stops = stop_ids(merged)
            direct = self.kind in gguf_file.CONVERTED
            plain = out if direct else merged / "plain.gguf"
            self.options.say("converting with llama.cpp's converter")
            gguf_file.convert(merged, plain, self.kind if direct else "bf16", name=self.target.stem)
            if not direct:
                self._check_gguf(plain, "bf16", stops)
                self._quantize(plain, out)
            self._check_gguf(out, self.kind, stops)
        return stops

    def _quantize(self, plain: Path, out: Path) -> None:
        assert self.kind is not None
        self.options.say(f"quantizing to {self.kind} with llama.cpp's quantizer")
        packed = gguf_file.mixed_types(plain).get("mxfp4", 0)
        if self.kind == "mxfp4":
            touched = sum(1 for e in self.source.base.entries() if e.packed and self.changes.touches(e.name))
            if packed and not touched:
                self.notes.append("expert weights are the base model's own MXFP4, bit for bit: no adapter touches them")
                shutil.move(plain, out)
                return
            self.notes.append(
                "the adapter changes expert weights, so these were quantized to MXFP4 again; rounding to four bits can be larger "
                "than the adapter's change. For the exact model choose q8_0 or bf16."
            )
        libllama.quantize(plain, out, gguf_file.QUANTIZED[self.kind], threads=os.cpu_count() or 1)

    def _check_gguf(self, file: Path, kind: str, stops: list[int]) -> None:
        if self.reference is not None:
            self.options.say(f"loading the {kind} file back in libllama")
            self._add(check_gguf(self.reference, self.source, file, kind, stops))

    def _add(self, check: Check) -> None:
        self.checks.append(check)
        self.notes += check.notes

    def _report(self, folder: Path) -> None:
        """Write verification.json and the card; raise if anything did not match."""
        faults = [f"{check.name}: {fault}" for check in self.checks for fault in check.faults]
        record = {
            "passed": not faults if self.options.verify != "off" else None,
            "format": self.options.format,
            "quantization": self.kind,
            "checks": [asdict(check) for check in self.checks],
        }
        (folder / REPORT).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        write_card(
            folder, self.source, self.options.format, self.kind, self.checks, verified=self.options.verify != "off"
        )
        if faults:
            listed = "\n  ".join(faults[:8])
            raise MismatchError(
                f"the export does not match the training model; it was kept as {str(self.target) + '.bad'!r}:\n  {listed}"
            )

    def _upload(self, made: Exported) -> Exported:
        options = self.options
        if options.upload is None:
            return made
        from .upload import upload

        place = upload(self.target, options.upload, private=options.private, dry_run=options.dry_run, say=options.say)
        return Exported(made.path, made.format, made.quantization, made.checks, made.notes, place)


def _refuse_what_cannot_work(source: Source, options: Options) -> None:
    if options.verify == "weights" and not source.base.in_checkpoint_names:
        raise ExportError(
            "verify='weights' is for base weights that are read from a checkpoint on disk; choose 'full' or 'off'"
        )
    if options.is_adapter and not source.adapters:
        raise ExportError(f"format={options.format!r}: the model has no adapter; choose format='merged'")
    if options.is_adapter and len(source.adapters) > 1:
        raise ExportError(
            f"format={options.format!r}: {len(source.adapters)} adapters are active; set one with set_adapter"
        )
    if options.is_gguf and source.original:
        raise ExportError(
            f"merge_onto='original' with format={options.format!r}: export with format='merged' first, then that folder"
        )
    if options.is_gguf:
        gguf_file.check_architecture(source.config)
        gguf_file.require_packages()
    if options.quantization == "mxfp4" and source.config.model_type != "gpt_oss":
        raise ExportError("quantization='mxfp4' is for gpt_oss, whose experts have that format; choose q4_k_m")


def _file_stem(target: Path) -> str:
    return target.stem if target.suffix == ".gguf" else target.name
