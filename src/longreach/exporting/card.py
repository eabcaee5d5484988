"""The model card: what the export is, where it comes from, how it was trained and how it was checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .source import Source

FILE = "README.md"
LIBRARY = {"adapter": "peft", "gguf": "gguf", "ollama": "gguf"}
_LICENSE = ("LICENSE", "LICENSE.txt", "LICENSE.md", "USE_POLICY.md")


def write_card(
    folder: Path, source: Source, format: str, quantization: str | None, checks: Iterable[Any], *, verified: bool
) -> None:
    """Write README.md with the front matter that the Hub reads."""
    from huggingface_hub import ModelCard, ModelCardData

    base = _public_name(source.base_name)
    data = ModelCardData(
        base_model=base,
        library_name=LIBRARY.get(format, "transformers"),
        tags=["longreach", *([quantization] if quantization else [])],
        pipeline_tag="text-generation",
        base_model_relation="adapter"
        if format == "adapter"
        else "quantized"
        if format in ("gguf", "ollama")
        else "finetune",
    )
    if base is None:
        data = ModelCardData(**{k: v for k, v in data.to_dict().items() if not k.startswith("base_model")})
    sections = [
        _title(source, base, format, quantization),
        _license(source, base),
        _training(source.run or {}),
        _adapter(source),
        _checks(checks, verified),
        _versions(source.run or {}),
    ]
    text = "\n\n".join(section for section in sections if section)
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n").save(folder / FILE)


def _public_name(name: str) -> str | None:
    """The base model's Hub id; None for a folder, whose path is nobody's business."""
    return (
        name if name and name.count("/") == 1 and not Path(name).is_dir() and not name.startswith((".", "~")) else None
    )


def _title(source: Source, base: str | None, format: str, quantization: str | None) -> str:
    of = f"[{base}](https://huggingface.co/{base})" if base else f"a {source.config.model_type} model"
    what = {"adapter": "A LoRA adapter for", "gguf": "A GGUF file of", "ollama": "An Ollama model of"}.get(
        format, "Merged weights of"
    )
    kind = f", {quantization}" if quantization else ""
    return f"# {folder_title(source)}\n\n{what} {of}{kind}, trained with Longreach."


def folder_title(source: Source) -> str:
    run = (source.run or {}).get("run")
    return str(run or _public_name(source.base_name) or source.config.model_type)


def _license(source: Source, base: str | None) -> str:
    found = next((name for place in source.folders for name in _LICENSE if (place / name).is_file()), None)
    whose = base or "the base model"
    text = f"## License\n\nThe weights are derived from {whose}; its license applies to them."
    return text + (f" The base model's folder holds it as {found}." if found else " See the base model's own card.")


def _training(run: Mapping[str, Any]) -> str:
    config: dict[str, Any] = dict(run.get("config") or {})
    if not run:
        return ""
    lines = [
        f"## Training\n\nMethod: {str(run.get('method', '')).upper()}, run {run.get('run')}, started {run.get('started')}."
    ]
    for key, title in (("data", "Data"), ("reward", "Reward"), ("task", "Task")):
        if config.get(key):
            lines.append(f"{title}: `{config[key]}`")
    shown = {k: v for k, v in config.items() if k not in ("data", "reward", "task", "output_dir", "model")}
    if shown:
        lines.append("```yaml\n" + _yaml(shown) + "```")
    return "\n\n".join(lines)


def _yaml(value: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def _adapter(source: Source) -> str:
    configs = getattr(source.model, "peft_config", {})
    lines = [
        f"- rank {config.r}, alpha {config.lora_alpha}, on {_names(config.target_modules)}"
        + (
            f" and the parameters {_names(config.target_parameters)}"
            if getattr(config, "target_parameters", None)
            else ""
        )
        for name, config in configs.items()
        if name in source.adapters
    ]
    return "## Adapter\n\n" + "\n".join(lines) if lines else ""


def _names(given: Any) -> str:
    return given if isinstance(given, str) else ", ".join(sorted(given or ()))


def _checks(checks: Iterable[Any], verified: bool) -> str:
    if not verified:
        return "## Checks\n\nThis export was not compared with the training model."
    rows = []
    for check in checks:
        found = check.record.get("logits")
        if found:
            numbers = f"{found['relative']:.1e} | {found['largest']:.2g} | {found['agreement']:.1%} | {found['kl']:.1e}"
            rows.append(f"| {check.name} | {numbers} |")
    head = (
        "| loaded back as | relative difference | largest, logits | same top token | KL, nats |\n" + "|---" * 5 + "|\n"
    )
    return (
        "## Checks\n\nLoaded back and compared with the training model on text and random tokens; details in "
        "verification.json.\n\n" + head + "\n".join(rows)
    )


def _versions(run: Mapping[str, Any]) -> str:
    from importlib.metadata import version

    versions = dict(run.get("versions") or {})
    for package in ("longreach", "torch", "transformers", "peft"):
        versions.setdefault(package, version(package))
    return "## Versions\n\n" + ", ".join(f"{name} {number}" for name, number in versions.items())
