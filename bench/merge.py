"""Merge an adapter into a gpt-oss-shaped MXFP4 checkpoint on disk: peak memory, and time against a plain copy of the same bytes.

``python -m bench.merge`` writes a random checkpoint of ``--layers`` layers of gpt-oss-20b's shape (24 is the whole model: 14 GB,
and 42 GB once merged) under ``--folder``, an adapter on attention and experts, exports it, and removes it all again.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench.machine import describe

from longreach.exporting.shards import ShardWriter

RESULT = Path(__file__).parent / "results" / "merge.json"
EXPERTS, HIDDEN, INNER, VOCABULARY, RANK = 32, 2880, 2880, 201_088, 16
HEADS, KV_HEADS, HEAD = 64, 8, 64
BLOCK = 32


def config(layers: int) -> dict[str, object]:
    """gpt-oss-20b's, with fewer layers."""
    kinds = ["sliding_attention", "full_attention"]
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": layers, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_local_experts": EXPERTS, "num_experts_per_tok": 4, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": VOCABULARY, "sliding_window": 128,
        "layer_types": [kinds[i % 2] for i in range(layers)], "max_position_embeddings": 131072, "tie_word_embeddings": False,
        "eos_token_id": 1, "pad_token_id": 0, "dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    }  # fmt: skip


def write_base(folder: Path, layers: int) -> None:
    """Random weights: the time to merge doesn't depend on their values."""
    with ShardWriter(folder) as writer:

        def dense(name: str, *shape: int) -> None:
            rows = (torch.randn(min(4096, shape[0] - i), *shape[1:]) * 0.02 for i in range(0, shape[0], 4096))
            writer.add(name, torch.bfloat16, shape, rows)

        def codes(name: str, *shape: int, low: int = 0, high: int = 256) -> None:
            pieces = (torch.randint(low, high, shape[1:], dtype=torch.uint8)[None] for _ in range(shape[0]))
            writer.add(name, torch.uint8, shape, pieces)

        dense("model.embed_tokens.weight", VOCABULARY, HIDDEN)
        for i in range(layers):
            layer = f"model.layers.{i}"
            for name, rows in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
                dense(f"{layer}.self_attn.{name}_proj.weight", rows, HIDDEN)
                dense(f"{layer}.self_attn.{name}_proj.bias", rows)
            dense(f"{layer}.self_attn.o_proj.weight", HIDDEN, HEADS * HEAD)
            dense(f"{layer}.self_attn.o_proj.bias", HIDDEN)
            dense(f"{layer}.self_attn.sinks", HEADS)
            dense(f"{layer}.mlp.router.weight", EXPERTS, HIDDEN)
            dense(f"{layer}.mlp.router.bias", EXPERTS)
            for name, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
                codes(f"{layer}.mlp.experts.{name}_blocks", EXPERTS, rows, columns // BLOCK, 16)
                codes(f"{layer}.mlp.experts.{name}_scales", EXPERTS, rows, columns // BLOCK, low=118, high=124)
                dense(f"{layer}.mlp.experts.{name}_bias", EXPERTS, rows)
            for name in ("input_layernorm", "post_attention_layernorm"):
                dense(f"{layer}.{name}.weight", HIDDEN)
        dense("model.norm.weight", HIDDEN)
        dense("lm_head.weight", VOCABULARY, HIDDEN)
    (folder / "config.json").write_text(json.dumps(config(layers)))


def write_adapter(folder: Path, base: Path) -> None:
    """Rank 16 on attention and experts, in PEFT's names, by PEFT on a model without weights."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
        lora = LoraConfig(
            r=RANK, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], task_type="CAUSAL_LM",
        )  # fmt: skip
        tuned = get_peft_model(model, lora)
    lora.base_model_name_or_path = str(base)
    lora.save_pretrained(folder)
    names = {n.replace(".default", ""): p.shape for n, p in tuned.named_parameters() if "lora_" in n}
    save_file({n: (torch.randn(s) * 0.01) for n, s in names.items()}, folder / "adapter_model.safetensors")


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


def merge(adapter: Path, out: Path) -> None:
    """The timed part, in a process of its own; prints its figures."""
    import longreach

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    longreach.export(adapter, None, out, verify="off")
    merged = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": merged, "peak_bytes": peak * 1024, "peak_before_bytes": before * 1024}))


def check(adapter: Path, out: Path) -> dict[str, object]:
    """Reading it back: as `verify="weights"` does."""
    from longreach.exporting.from_disk import folder_source
    from longreach.exporting.verify import check_written

    source = folder_source(adapter)
    start = time.perf_counter()
    done = check_written(source, out, source.changes(), torch.bfloat16)
    return {"seconds": time.perf_counter() - start, "faults": done.faults, **done.record["adapter"]}


def plain_copy(folder: Path, out: Path) -> float:
    """Seconds to read the base and write as many bytes as the merged model has, and have them on disk."""
    import os

    start = time.perf_counter()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as data:
            while data.read(1 << 24):
                pass
    chunk = bytes(1 << 24)
    with (out.parent / "copy").open("wb") as target:
        for _ in range(sum(f.stat().st_size for f in out.glob("*.safetensors")) // len(chunk)):
            target.write(chunk)
        target.flush()
        os.fsync(target.fileno())
    seconds = time.perf_counter() - start
    (out.parent / "copy").unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--folder", type=Path, help="where there is room [default: the system's temporary folder]")
    parser.add_argument("--merge", nargs=2, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.merge:
        return merge(*given.merge)
    work = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        base, adapter, out = work / "base", work / "adapter", work / "merged"
        for folder in (base, adapter):
            folder.mkdir()
        write_base(base, given.layers)
        write_tokenizer(base)
        write_adapter(adapter, base)
        done = subprocess.run(
            [sys.executable, "-m", "bench.merge", "--merge", str(adapter), str(out)], stdout=subprocess.PIPE, check=True
        )
        found = json.loads(done.stdout.splitlines()[-1])
        sizes = {
            name: sum(f.stat().st_size for f in p.rglob("*.safetensors"))
            for name, p in {"base": base, "merged": out}.items()
        }
        result = {
            "machine": describe(), "torch": torch.__version__, "threads": torch.get_num_threads(), "layers": given.layers,
            "bytes": sizes, "merge": found, "read_back": check(adapter, out), "plain_copy_seconds": plain_copy(base, out),
        }  # fmt: skip
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(result, indent=1))
    finally:
        shutil.rmtree(work)
    return None


if __name__ == "__main__":
    main()
