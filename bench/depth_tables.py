"""Tables of steps on few layers, carried to the model's full depth, for `make_tables`.

Memory grows by one layer's adapter gradients with each layer where layer inputs wait on the host; time grows by one layer's
time. Both follow from two measurements, so a long context need not run through every layer to be known.
"""

from __future__ import annotations

from typing import Any

from bench.markdown import table

from bench import measure, models
from longreach.context.shape import KNOWN

NAMES = {"longreach": "Longreach", "unsloth": "Unsloth", "transformers": "Transformers"}
GIB = 2**30
Record = dict[str, Any]


def memory(records: list[Record]) -> list[str]:
    """GiB above the loaded model by model and context, from `bench/train_step.py --memory`."""
    found = [
        r
        for r in records
        if r["case"] in ("memory", "sequence") and r.get("above_weights_bytes") and r.get("layer_gradient_bytes")
    ]
    if not found:
        return []
    contexts = {r["context"] for r in found if r["case"] == "memory"}
    found = [r for r in found if r["context"] in contexts]
    columns = sorted({(r["context"], r["offload"] == "keys") for r in found})
    best: dict[tuple[str, tuple[int, bool]], Record] = {}
    for r in found:  # of several depths the deepest
        key = r["model"], (r["context"], r["offload"] == "keys")
        if key not in best or r["layers"] > best[key]["layers"]:
            best[key] = r
    rows = [
        [model, *(_whole(best[model, column]) if (model, column) in best else "" for column in columns)]
        for model in dict.fromkeys(r["model"] for r in found)
    ]
    header = ["model", *(f"{context:,}{', keys streamed' if keys else ''}" for context, keys in columns)]
    depths = ", ".join(
        f"{model} on {'/'.join(str(n) for n in sorted({r['layers'] for r in found if r['model'] == model}))}"
        for model in dict.fromkeys(r["model"] for r in found)
    )
    text = (
        "GiB above the loaded model, bf16 weights, layer inputs on the host. The peak is measured at full depth or on few layers "
        f"of the real widths ({depths}); to the latter the adapter gradients of the other layers are added, which are all that "
        "more layers add. "
        '"Keys streamed": keys, values and their gradients are on the host too.'
    )
    return ["### Memory by model", "", text, "", *table(header, rows)]


def _whole(r: Record) -> str:
    return f"{(r['above_weights_bytes'] + (r['whole_layers'] - r['layers']) * r['layer_gradient_bytes']) / GIB:.2f}"


def seconds(records: list[Record]) -> list[str]:
    """Steps of one context on two depths, and what they say of full depth, engine beside engine."""
    found = [r for r in records if r["case"] == "sequence" and r["step_s"] is not None and r["repeats"]]
    pairs: dict[tuple[Any, ...], list[Record]] = {}
    for r in found:
        how = tuple(r.get(k) for k in ("engine", "model", "context", "chunk", "offload", "save_attention"))
        pairs.setdefault(how, []).append(r)
    rows = []
    for how, runs in sorted(pairs.items(), key=lambda item: (item[0][1], item[0][2], str(item[0]))):
        deepest = max(r["layers"] for r in found if r["model"] == how[1])
        some = sorted((r for r in runs if r["layers"] < deepest), key=lambda r: r["layers"])
        if len(some) < 2:
            continue
        few, more = some[0], some[-1]
        layer = (more["step_s"] - few["step_s"]) / (more["layers"] - few["layers"])
        whole = more["step_s"] + (deepest - more["layers"]) * layer
        measured = next((f"{r['step_s']:.2f} s" for r in runs if r["layers"] == deepest), "")
        place = "" if how[4] != "keys" else ", keys streamed"
        rows.append([
            f"{how[1]}, {how[2]:,}", NAMES[how[0]] + place, f"{few['step_s']:.2f} s on {few['layers']}",
            f"{more['step_s']:.2f} s on {more['layers']}", f"{layer:.3f} s", f"{whole:.1f} s on {deepest}",
            _share(more, deepest, whole), measured,
        ])  # fmt: skip
    if not rows:
        return []
    text = "Long contexts on few layers: a layer's time is the difference between two depths, and full depth follows from it."
    header = [
        "model, context",
        "engine",
        "few layers",
        "more layers",
        "a layer",
        "full depth by arithmetic",
        "of the roofline",
        "measured",
    ]
    return ["### Full depth by arithmetic", "", text, "", *table(header, rows)]


def _share(r: Record, layers: int, whole: float) -> str:
    """Share of the roofline at full depth, of a model whose shape is known."""
    if r["model"].lower() not in KNOWN:
        return ""
    shape = models.shape_of(r["model"], layers, tiny=False)
    return f"{measure.utilization(shape, r['context'], r['completion'], 1, 1, whole):.0%}"
