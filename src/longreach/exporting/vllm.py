"""What vLLM asks of a folder, from its documentation; vLLM itself isn't run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from .source import Source

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # choices of --max-lora-rank


def faults(folder: Path, *, adapter: bool) -> list[str]:
    """What vLLM would stumble over in an exported folder."""
    return _adapter_faults(folder) if adapter else _merged_faults(folder)


def _merged_faults(folder: Path) -> list[str]:
    found = []
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if len(config.get("architectures") or ()) != 1:
        found.append(f"config.json: architectures={config.get('architectures')!r}, one class expected")
    if config.get("quantization_config"):
        found.append("config.json: quantization_config is still there, but the weights are plain")
    if config.get("dtype") not in ("bfloat16", "float16"):
        found.append(f"config.json: dtype={config.get('dtype')!r}, bfloat16 or float16 expected")
    if not (folder / "tokenizer.json").is_file():
        found.append("tokenizer.json is missing")
    return found


def _adapter_faults(folder: Path) -> list[str]:
    found = []
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
    if max(ranks) > RANKS[-1]:
        found.append(f"adapter_config.json: rank {max(ranks)}, vLLM takes up to {RANKS[-1]}")
    if config.get("bias", "none") != "none":
        found.append(
            f"adapter_config.json: bias={config['bias']!r}; vLLM takes adapters without biases (merge instead)"
        )
    if config.get("modules_to_save"):
        found.append(
            f"adapter_config.json: modules_to_save={config['modules_to_save']}; vLLM takes none (merge instead)"
        )
    if config.get("alpha_pattern") or config.get("rank_pattern"):
        found.append("adapter_config.json: rank_pattern or alpha_pattern; vLLM has one rank and scale (merge instead)")
    if config.get("target_parameters"):
        found.append("adapter_config.json: target_parameters (experts); not every vLLM loads these (merge instead)")
    return found


def command(source: Source, target: Path, *, adapter: bool) -> str:
    """The command that serves the export."""
    if not adapter:
        return f"vllm serve {shlex.quote(str(target))}"
    root: Any = source.model
    config = root.peft_config[next(iter(source.adapters))]
    rank = next((r for r in RANKS if r >= config.r), RANKS[-1])
    module = shlex.quote(f"{target.name}={target}")
    return f"vllm serve {shlex.quote(source.base_name)} --enable-lora --max-lora-rank {rank} --lora-modules {module}"
