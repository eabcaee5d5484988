"""What writing weights in a format costs, on models without an adapter: where the limits of export verification come from.

Every architecture as a tiny random model, two of them deeper and wider too, and the embedded model; each GGUF type in libllama,
and 16-bit rounding in Transformers. Runs on a CPU in a few minutes: ``python -m bench.export``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from bench.machine import describe
from tests.exporting.models import CONFIGS, build

from longreach.exporting import gguf_file, libllama
from longreach.exporting.compare import Difference, difference
from longreach.exporting.probe import PROBE_TOKENS, logits_of, probes_for
from longreach.zoo import model_path

RESULT = Path(__file__).parent / "results" / "export.json"
# Rows of 256 are the shortest that the k-quants take; they store shorter ones as another type.
DEEP = ("qwen3", "gemma2")
# With as much noise in the weights as the two-layer models have, 24 layers would be chaotic, unlike a trained model.
SIZE = {"num_hidden_layers": 24, "hidden_size": 256, "intermediate_size": 512, "spread": 0.15}


def costs(folder: Path, work: Path, types: list[str]) -> dict[str, Difference]:
    """The difference that each type makes to one model."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    probes = probes_for(tokenizer, model.get_input_embeddings().weight.shape[0])
    reference = logits_of(model, probes)
    found = {}
    for name, dtype in (("bf16 weights", torch.bfloat16), ("fp16 weights", torch.float16)):
        rounded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        found[f"{name}, computed in {name[:4]}"] = difference(reference, logits_of(rounded, probes))
        found[f"{name}, computed in fp32"] = difference(reference, logits_of(rounded.float(), probes))
    for kind in types:
        file = work / f"{kind}.gguf"
        if kind in gguf_file.CONVERTED:
            gguf_file.convert(folder, file, kind)
        else:
            libllama.quantize(work / "f32.gguf", file, gguf_file.QUANTIZED[kind], threads=1)
        with libllama.GGUFModel(file, context=2 * PROBE_TOKENS) as loaded:
            found[kind] = difference(reference, [loaded.logits(probe.ids) for probe in probes])
        if kind != "f32":
            file.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one model, by its name in the results")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    out, only = given.out, given.only
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    types = [t for t in gguf_file.TYPES if t != "mxfp4"]
    rows: dict[str, dict[str, Any]] = {}
    names = [*CONFIGS, *(f"{name}, 24 layers" for name in DEEP), "embedded model"]
    for name in [only] if only else names:
        with tempfile.TemporaryDirectory() as made:
            folder, work = Path(made) / "model", Path(made)
            base = name.partition(",")[0]
            if name == "embedded model":
                folder = Path(model_path())
            else:
                build(base, folder, dtype=torch.float32, **(SIZE if "," in name else {}))
            wanted = [*types, "mxfp4"] if base == "gpt_oss" else types
            rows[name] = {kind: asdict(d) for kind, d in costs(folder, work, wanted).items()}
        print(name, {k: f"{v['relative']:.1e}" for k, v in rows[name].items()}, flush=True)
    kinds = {kind for row in rows.values() for kind in row}
    worst = {
        kind: {key: max(row[kind][key] for row in rows.values() if kind in row) for key in ("relative", "kl")}
        for kind in sorted(kinds)
    }
    out.write_text(
        json.dumps({"machine": describe(), "worst": worst, "models": rows}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
