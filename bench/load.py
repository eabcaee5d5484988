"""Loading a 4-bit checkpoint: seconds beside reading its bytes, and peak host memory.

    python -m bench.load --model gpt-oss-20b --weights mxfp4 --folder DIR      # 13 GB there, random
    python -m bench.load --device cpu --tiny --folder DIR                      # tests the script

A random checkpoint of the model's shape is written as it is published (gpt-oss: experts in MXFP4; dense models: all linear
layers in NF4 as bitsandbytes stores them), in files of 4 GB, and then read three ways, each with the files out of the page
cache and again with them in it: plain reads of all bytes by one thread and by four; `longreach.load` onto the device. Host
memory is the largest resident set during the load, file pages included, over that before it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import longreach
from bench import measure, models
from longreach.quant.checkpoint import to_bitsandbytes
from longreach.quant.experts import FourBitExperts, is_experts
from longreach.quant.formats import FORMATS, Packed
from longreach.quant.linear import FourBitLinear
from longreach.quant.quantizer import FourBitConfig, default_skips

SHARD = 4 * 10**9
READ = 64 * 2**20  # bytes a plain read asks for at once
READERS = 4


def main(argv: list[str] | None = None) -> None:
    parser = measure.arguments(__doc__ or "")
    parser.set_defaults(model="gpt-oss-20b", out=measure.RESULTS / "load.json")
    parser.add_argument("--weights", default="mxfp4", choices=tuple(FORMATS))
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint goes; overwritten")
    options = measure.parse(parser, argv)
    size = write(options)
    files = sorted(options.folder.glob("*.safetensors"))
    print(f"{size / 1e9:.2f} GB in {len(files)} files", flush=True)
    found: dict[str, Any] = {"model": options.model, "weights": options.weights, "bytes": size}
    for state, ready in (("cold", drop), ("warm", lambda files: None)):
        for name, readers in (("read_1", 1), (f"read_{READERS}", READERS)):
            ready(files)
            found[f"{state}_{name}_s"] = timed(lambda n=readers: read(files, n))
        ready(files)
        found[f"{state}_load_s"], found[f"{state}_host_bytes"] = load(options)
        print({k: round(v, 3) for k, v in found.items() if k.startswith(state)}, flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found | measure.provenance(options.commit), indent=1) + "\n", encoding="utf-8")


# ---- the checkpoint


def write(options: argparse.Namespace) -> int:
    """A random checkpoint; returns its bytes."""
    options.folder.mkdir(parents=True, exist_ok=True)
    for old in options.folder.glob("*.safetensors"):
        old.unlink()
    shape = models.shape_of(options.model, options.layers, options.tiny)
    config = models.config_of(shape, 4096)
    config.dtype = "bfloat16"
    config.architectures = [type(empty(config)).__name__]
    names: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    size, number = 0, 0

    def flush() -> None:
        nonlocal shard, number
        number += 1
        file = f"model-{number:05d}.safetensors"
        save_file(shard, options.folder / file, metadata={"format": "pt"})
        names.update(dict.fromkeys(shard, file))
        shard = {}

    entry, tensors = stored(config, options)
    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD:
            flush()
        shard[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    flush()
    index = {"metadata": {"total_size": size}, "weight_map": names}
    (options.folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config.save_pretrained(options.folder)
    saved = json.loads((options.folder / "config.json").read_text(encoding="utf-8"))
    saved["quantization_config"] = entry
    (options.folder / "config.json").write_text(json.dumps(saved), encoding="utf-8")
    tokenizer(options.folder)
    return size


def empty(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def stored(config: Any, options: argparse.Namespace) -> tuple[dict[str, Any], Iterator[tuple[str, torch.Tensor]]]:
    """The entry of config.json and the tensors, made one after the other."""
    format, model = FORMATS[options.weights], empty(config)
    quantization = FourBitConfig(options.weights, default_skips(model))
    published = config.model_type == "gpt_oss" and options.weights == "mxfp4"
    small: dict[str, Any] = {}
    for name, module in list(model.named_modules()):
        if is_experts(module):
            small[name] = FourBitExperts.empty(module, format, stored=True)
        elif type(module) is torch.nn.Linear and name not in default_skips(model) and not published:
            small[name] = FourBitLinear(module.in_features, module.out_features, False, format=format, device="meta")
            small[name].bias = module.bias
    for name, module in small.items():
        model.set_submodule(name, module)
    quantization.stored_as = "gpt-oss" if published else "bitsandbytes" if options.weights == "nf4" else "longreach"
    if published:
        quantization.modules_to_not_convert = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    return quantization.to_dict(), tensors_of(model, options)


def tensors_of(model: Any, options: argparse.Namespace) -> Iterator[tuple[str, torch.Tensor]]:
    done = set()
    for name, module in model.named_modules():
        if isinstance(module, FourBitLinear) and options.weights == "nf4":
            weight = torch.randn(module.out_features, module.in_features, device=options.device) * 0.02
            packed: Packed = module.format.quantize(weight)
            for suffix, tensor in to_bitsandbytes(packed, torch.bfloat16).items():
                yield f"{name}.weight.{suffix}".rstrip("."), tensor
            done |= {f"{name}.{part}" for part in ("weight", *packed.tensors)}
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name in done | tied:
            continue
        if tensor.dtype == torch.uint8:
            low, high = (110, 125) if name.endswith("scales") else (0, 256)
            yield name, torch.randint(low, high, tensor.shape, dtype=torch.uint8, device=options.device)
        else:
            yield name, (torch.randn(tensor.shape, device=options.device) * 0.02).to(tensor.dtype)


def tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(kinds.WordLevel({"<unk>": 0, "<pad>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>").save_pretrained(folder)


# ---- reading it


def drop(files: list[Path]) -> None:
    """Take files out of the page cache."""
    for path in files:
        with path.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: list[Path], readers: int) -> None:
    """All bytes, each part of the files by one reader."""

    def part(index: int) -> None:
        buffer = bytearray(READ)
        for path in files:
            size = path.stat().st_size
            with path.open("rb", buffering=0) as f:
                for at in range(index * READ, size, readers * READ):
                    f.seek(at)
                    f.readinto(buffer)

    with concurrent.futures.ThreadPoolExecutor(readers) as pool:
        list(pool.map(part, range(readers)))


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def load(options: argparse.Namespace) -> tuple[float, int]:
    """Seconds of `longreach.load`, and what it adds to the resident set at most."""
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # noqa: E731
    gc.collect()
    before, peak, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    measure.synchronize(options.device)
    start = time.perf_counter()
    try:
        model, _ = longreach.load(str(options.folder), device=options.device, parity_check=False)
        measure.synchronize(options.device)
        seconds = time.perf_counter() - start
    finally:
        done.set()
        thread.join()
    del model
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return seconds, peak - before


if __name__ == "__main__":
    main()
