"""Time and memory of a training step, and the JSON record of it: what was run, on which card, from which commit and versions."""

from __future__ import annotations

import argparse
import fcntl
import gc
import importlib.metadata
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "peft", "trl", "triton", "flash-attn-4", "longreach", "unsloth", "unsloth_zoo")
GEMM, ATTENTION = 790e12, 620e12  # FLOP per second of an H200 in bf16, as measured: what utilization is a share of
READY = "ready, waiting for"  # what an engine says that has loaded, before the file's name
REPLAYS = 15  # of a CUDA graph whose time is taken
KEY = (
    "engine",
    "case",
    "model",
    "layers",
    "context",
    "completion",
    "group",
    "prompts",
    "chunk",
    "offload",
    "save_attention",
    "keep_every",
    "weights",
    "embedding",
    "rank",
)


def arguments(description: str) -> argparse.ArgumentParser:
    """Options that every engine's script shares."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-4B", help="a shape by name (default: Qwen3-4B)")
    parser.add_argument("--layers", type=int, default=None, help="only so many layers of it")
    parser.add_argument("--lengths", type=numbers, default=[16384, 32768], help="contexts, e.g. 16384,32768,131072")
    parser.add_argument("--completion", type=int, default=1024, help="tokens with a loss at the end (default: 1024)")
    parser.add_argument("--everyday", action="store_true", help="also 8 prompts x 8 completions of 256 + 1,024 tokens")
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed steps after the first (default: 3); 0 times the first"
    )
    parser.add_argument("--budget", type=float, default=1e9, help="seconds per case after which no further step starts")
    parser.add_argument(
        "--shallow",
        type=depths,
        default=[],
        metavar="CONTEXT@LAYERS",
        help="after the others, contexts on few layers only",
    )
    parser.add_argument(
        "--after", type=Path, default=None, metavar="FILE",
        help="load the model, then wait for this file: several engines load at once and are timed one after the other",
    )  # fmt: skip
    parser.add_argument(
        "--warm",
        action="store_true",
        help="make first steps before --after's wait (the first model's, if there are several); they aren't timed",
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--tiny", action="store_true", help="two small layers and 1/64 of all lengths: a test of the script"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "train_step.json", help="JSON file that records join")
    parser.add_argument("--commit", default=None, help="commit to note where git is not at hand")
    return parser


def peer_arguments(description: str) -> argparse.ArgumentParser:
    """Options of an engine that takes padded rows."""
    parser = arguments(description)
    parser.add_argument(
        "--everyday-batches",
        type=int,
        default=8,
        help="run so many of the everyday case's 8 equal batches and scale up",
    )
    return parser


def longest(options: argparse.Namespace) -> int:
    """Positions that the model needs."""
    return max([*options.lengths, *(context for context, _ in options.shallow), 2048])


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device; use --device cpu --tiny to test the script")
    if options.tiny:
        options.lengths = [max(length // 64, 16) for length in options.lengths]
        options.shallow = [(max(length // 64, 16), min(layers, 2)) for length, layers in options.shallow]
        options.completion = max(options.completion // 64, 4)
    return options


def numbers(text: str) -> list[int]:
    """Whole numbers, from "16384,32768"."""
    return [int(part) for part in text.split(",") if part]


def depths(text: str) -> list[tuple[int, int]]:
    """Pairs of a context and a number of layers, from "131072@2,131072@6"."""
    pairs = [part.split("@") for part in text.split(",") if part]
    if any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}: give each context its number of layers, such as 131072@6")
    return [(int(context), int(layers)) for context, layers in pairs]


def wait_for(path: Path | None) -> None:
    """Say "ready" and return once the file is there; what the allocator holds unused goes back to the card first."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if path is not None:
        print(READY, path, flush=True)
    while path is not None and not path.exists():
        time.sleep(0.05)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(
    step: Callable[[], tuple[float, float]],
    model: Any,
    *,
    loaded: int | None,
    device: str,
    repeats: int,
    budget: float,
    warmed: bool = False,
) -> dict[str, Any]:
    """First step alone, then medians; a step returns (forward, backward) seconds and leaves gradients, which are dropped.

    `loaded`: bytes allocated when the model stood there and nothing had run yet (`loaded_bytes`). `warmed`: a first step has
    been made before, so that each one counts.
    """
    trained = [p for p in model.parameters() if p.requires_grad]

    def once() -> tuple[float, float, int | None]:
        for p in trained:
            p.grad = None
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        forward, backward = step()
        return forward, backward, torch.cuda.max_memory_allocated() if device == "cuda" else None

    began = time.perf_counter()
    first = None if warmed else once()
    timed: list[tuple[float, float, int | None]] = []
    while len(timed) < repeats and (not timed or time.perf_counter() - began < budget):
        timed.append(once())
    peaks = [peak for *_, peak in [*([first] if first else []), *timed] if peak is not None]
    repeats, timed = len(timed), timed or [first or once()]
    forward, backward = (statistics.median(t[i] for t in timed) for i in (0, 1))
    return {
        "first_step_s": first[0] + first[1] if first else None,
        "forward_s": forward,
        "backward_s": backward,
        "step_s": statistics.median(t[0] + t[1] for t in timed),
        "repeats": repeats,
        "loaded_bytes": loaded,
        "peak_bytes": max(peaks) if peaks else None,
        "above_weights_bytes": max(peaks) - (loaded or 0) if peaks else None,
    }


def loaded_bytes(device: str) -> int | None:
    """What the loaded model takes; to be asked before the first step, which leaves workspaces and gradients behind."""
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else None


def attempt(step: Callable[[], tuple[float, float]], model: Any, **how: Any) -> dict[str, Any]:
    """`measure`, or what went wrong where the card's memory did not suffice."""
    try:
        return measure(step, model, **how)
    except torch.OutOfMemoryError as error:
        text = str(error).split(". ")[0]
    gc.collect()
    torch.cuda.empty_cache()
    return {"step_s": None, "error": text}


def timed_step(loss_of: Callable[[], torch.Tensor], device: str) -> tuple[float, float]:
    """Seconds of the forward and of the backward."""
    synchronize(device)
    start = time.perf_counter()
    loss = loss_of()
    synchronize(device)
    middle = time.perf_counter()
    loss.backward()
    synchronize(device)
    return middle - start, time.perf_counter() - middle


def utilization(shape: Any, context: int, completion: int, group: int, prompts: int, seconds: float) -> float:
    """Time that the model's own FLOP (no recomputation) would take at the card's measured rates, over the time taken."""
    from longreach.context.policy import Policy
    from longreach.context.speed import step_flop
    from longreach.context.work import Work

    ranks = dict.fromkeys(shape.linears, 32)
    flop = step_flop(Work(shape, context, completion, group, "bf16", ranks), Policy(8192, "none"))
    attention = flop.attention_backward / 2.5 * 3.5
    return prompts * ((flop.model - attention) / GEMM + attention / ATTENTION) / seconds


def record(path: Path, entry: dict[str, Any], commit: str | None) -> None:
    """Print an entry and put it into the file in place of an older one of the same case."""
    entry = put(path, entry, commit, KEY)
    above = entry.get("above_weights_bytes")
    memory = "" if above is None else f", {above / 2**30:.2f} GiB above the loaded model"
    step = entry.get("step_s")
    what = " ".join(str(entry[k]) for k in ("engine", "case", "model", "context"))
    time_taken = "its memory" if step is None else f"{step:.3f} s"
    print(what, f"failed: {entry['error']}" if "error" in entry else time_taken + memory, flush=True)


def difference(a: list[torch.Tensor], b: list[torch.Tensor], unit: list[torch.Tensor] | None = None) -> float:
    """Norm of the difference of all gradients, relative to that of `unit`, or of the second."""
    top = sum(float((x.double() - y.double()).square().sum()) for x, y in zip(a, b, strict=True))
    return (top / sum(float(x.double().square().sum()) for x in unit or b)) ** 0.5


def replayed_microseconds(runs: list[Callable[[], Any]], repeats: int) -> float:
    """Median time of one call, of a CUDA graph that holds all of them so many times over."""
    for each in runs:
        each()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for each in runs:
                each()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (repeats * len(runs)))
    return statistics.median(times)


def put(path: Path, entry: dict[str, Any], commit: str | None, key: tuple[str, ...]) -> dict[str, Any]:
    """Write an entry with its provenance into the file, in place of an older one with the same values of `key`.

    Processes that run side by side may write into one file.
    """
    entry = {**entry, **provenance(commit)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        held = json.loads(file.read() or "[]")
        held = [old for old in held if any(old.get(k) != entry.get(k) for k in key)]
        file.truncate(0)
        file.write(json.dumps([*held, entry], indent=1) + "\n")
    return entry


def provenance(commit: str | None) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "card": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
        "commit": commit or _commit(),
        "versions": {k: v for k, v in versions.items() if v}
        | {"python": platform.python_version(), "cuda": torch.version.cuda},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
