"""Memory and time of one training step against context length, on a CPU: stock Transformers and chunked layers.

    python bench/context_cpu.py            # 8K, 16K and 32K tokens; about an hour on two cores
    python bench/context_cpu.py --quick    # 2K and 4K tokens; two minutes

A random llama-shaped model of 100M parameters, fp32, all parameters trained. The step is that of policy-gradient
training: a prompt, a completion of 512 tokens, the mean negative log-prob of the completion, backward. Stock runs with
gradient checkpointing, sdpa attention and logits of the completion only, as TRL does it. Every point is measured in a
fresh process: the peak of its resident memory during the step, less what it held before the step (weights, libraries).
Seconds are those that all cores spent on the process, which a machine shared with others changes little.
Written to bench/results/context_cpu.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "context_cpu.json"
LENGTHS = (8192, 16384, 32768)
QUICK_LENGTHS = (2048, 4096)
COMPLETION = 512
CHUNK = 1024
SHAPE = {
    "vocab_size": 64000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 65536,
}
FP32 = 4


def layer_input_bytes(tokens: int) -> int:
    """What exact chunked layers have to keep: the input of each decoder layer, and nothing else that grows with depth."""
    return SHAPE["num_hidden_layers"] * tokens * SHAPE["hidden_size"] * FP32


def one_layer_bytes(tokens: int) -> int:
    """What they hold of one layer at a time: its output or the gradient of it and of its input, K, V, dK and dV."""
    key_width = SHAPE["head_dim"] * SHAPE["num_key_value_heads"]
    return tokens * (2 * SHAPE["hidden_size"] + 4 * key_width) * FP32


def memory_kb(field: str) -> int:
    """A field of /proc/self/status, such as VmRSS or VmHWM (peak), in KiB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def build_model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, bos_token_id=None, eos_token_id=None)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def stock_loss(model: Any, ids: Any) -> Any:
    import torch

    logits = model(ids[None], use_cache=False, logits_to_keep=COMPLETION + 1).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, ids[-COMPLETION:])


def chunked_loss(model: Any, ids: Any) -> Any:
    import longreach

    tree = longreach.TokenTree.from_groups([(ids[:-COMPLETION], [ids[-COMPLETION:]])])
    return -longreach.token_logprobs(model, tree)[0].mean()


def measure(how: str, tokens: int) -> dict[str, Any]:
    """One step in this process: bytes above the level before it, seconds, loss and gradient norm."""
    import torch

    import longreach

    model = build_model()
    if how == "stock":
        model.gradient_checkpointing_enable()
        loss_of = stock_loss
    else:
        longreach.enable(model, chunk=CHUNK, save_attention=False, parity_check=False)
        loss_of = chunked_loss
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(SHAPE["vocab_size"], (count,), generator=generator)

    # Buffers and gradients that any step needs exist before the measured one.
    loss_of(model, draw(COMPLETION + 64)).backward()
    model.zero_grad(set_to_none=False)
    ids = draw(tokens)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # starts a new peak
    before = memory_kb("VmRSS")
    began, cpu_began = time.perf_counter(), time.process_time()
    loss = loss_of(model, ids)
    loss.backward()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return {
        "how": how,
        "tokens": tokens,
        "bytes": (memory_kb("VmHWM") - before) * 1024,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "loss": loss.item(),
        "grad_norm": norm.item(),
    }


def in_fresh_process(how: str, tokens: int, threads: int | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--point", how, str(tokens)]
    if threads:
        command += ["--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{how} at {tokens} tokens failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def show(points: list[dict[str, Any]]) -> None:
    """A table: bytes of both beside what the layer inputs alone come to, and growth per token."""
    by = {(point["how"], point["tokens"]): point for point in points}
    lengths = sorted({point["tokens"] for point in points})
    print(
        f"{'tokens':>7} {'stock':>9} {'ours':>9} {'layer inputs':>13} {'+ one layer':>12} {'stock s':>8} {'ours s':>8}"
    )
    for tokens in lengths:
        stock, ours = by["stock", tokens], by["ours", tokens]
        inputs = layer_input_bytes(tokens)
        print(
            f"{tokens:>7} {stock['bytes'] / 1e9:>6.2f} GB {ours['bytes'] / 1e9:>6.2f} GB {inputs / 1e9:>10.2f} GB "
            f"{(inputs + one_layer_bytes(tokens)) / 1e9:>9.2f} GB {stock['cpu_seconds']:>8.0f} {ours['cpu_seconds']:>8.0f}"
        )
    first, last = lengths[0], lengths[-1]
    for how in ("stock", "ours"):
        growth = (by[how, last]["bytes"] - by[how, first]["bytes"]) / (last - first)
        print(f"{how}: {growth / 1024:.1f} KiB per token from {first} to {last} tokens")
    expected = layer_input_bytes(1), layer_input_bytes(1) + one_layer_bytes(1)
    print(f"layer inputs: {expected[0] / 1024:.1f} KiB per token; with one layer's rows {expected[1] / 1024:.1f} KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2K and 4K tokens only, nothing written")
    parser.add_argument("--threads", type=int, help="threads of torch; the default is torch's own")
    parser.add_argument("--point", nargs=2, metavar=("HOW", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        import torch

        if options.threads:
            torch.set_num_threads(options.threads)
        print(json.dumps(measure(options.point[0], int(options.point[1]))))
        return
    points = []
    for tokens in QUICK_LENGTHS if options.quick else LENGTHS:
        for how in ("ours", "stock"):
            points.append(in_fresh_process(how, tokens, options.threads))
            point = points[-1]
            print(f"{how}, {tokens} tokens: {point['bytes'] / 1e9:.2f} GB, {point['cpu_seconds']:.0f} s", flush=True)
    show(points)
    for ours, stock in zip(points[::2], points[1::2]):
        if abs(ours["grad_norm"] - stock["grad_norm"]) > 1e-4 * stock["grad_norm"]:
            raise SystemExit(
                f"gradients differ at {ours['tokens']} tokens: {ours['grad_norm']} and {stock['grad_norm']}"
            )
    if options.quick:
        return
    from longreach.cli import machine

    RESULT.parent.mkdir(exist_ok=True)
    result = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.device(),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "model": SHAPE,
        "completion": COMPLETION,
        "chunk": CHUNK,
        "points": [
            {
                **point,
                "layer_input_bytes": layer_input_bytes(point["tokens"]),
                "one_layer_bytes": one_layer_bytes(point["tokens"]),
            }
            for point in points
        ],
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {RESULT}")


if __name__ == "__main__":
    main()
