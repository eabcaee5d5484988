"""Writing the run log: records from what a trainer reports, one JSON object a line, for ``longreach.report.log``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from longreach.report.log import LOG_NAME, Record

# The trainer's metric -> where it stands in the record.
NAMES: dict[str, tuple[str, ...]] = {
    "loss": ("loss",),
    "grad_norm": ("grad_norm",),
    "learning_rate": ("learning_rate",),
    "reward": ("reward",),
    "reward_std": ("reward_std",),
    "frac_reward_zero_std": ("groups_without_signal",),
    "completions/mean_length": ("length", "mean"),
    "completions/min_length": ("length", "min"),
    "completions/max_length": ("length", "max"),
    "completions/clipped_ratio": ("length", "clipped"),
    "entropy": ("entropy",),
    "kl": ("kl",),
    "num_tokens": ("tokens",),
}
KEPT_HEAD = 400  # characters kept of a long prompt's start
KEPT_TAIL = 800  # and of its end, where the question stands
KEPT_COMPLETION = 4000


class LogWriter:
    """Appends records to the log in a run's folder; each is on disk when the call returns."""

    def __init__(self, folder: Path, *, fresh: bool = True) -> None:
        """Write to the log in ``folder``, made if need be; ``fresh`` starts the log anew, else it goes on."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LOG_NAME
        if fresh:
            self.path.unlink(missing_ok=True)

    def write(self, record: Record) -> None:
        """Append one record. A number that is not finite is written as null: JSON has no word for it."""
        line = json.dumps(_plain(record), ensure_ascii=False, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as log:
            log.write(line + "\n")


def from_metrics(metrics: dict[str, Any], prefix: str = "") -> Record:
    """What a trainer's metrics give of a record, names without ``prefix``; what has no name of ours is ``other``."""
    record: Record = {}
    other: Record = {}
    for key, value in metrics.items():
        name = key.removeprefix(prefix)
        if name in ("epoch", "step_time"):
            continue
        path = NAMES.get(name)
        if name.startswith("rewards/") and name.endswith("/mean"):
            path = ("rewards", name.removeprefix("rewards/").removesuffix("/mean"))
        if path is None:
            other[name] = value
        elif len(path) == 1:
            record[path[0]] = value
        else:
            record.setdefault(path[0], {})[path[1]] = value
    if other:
        record["other"] = other
    return record


def shortened(value: Any, head: int, tail: int) -> Any:
    """A text, or messages, with the middle of every long text replaced by the count of characters left out."""
    if isinstance(value, list):
        return [
            {**m, "content": shortened(m.get("content", ""), head, tail)} if isinstance(m, dict) else m for m in value
        ]
    if not isinstance(value, str) or len(value) <= head + tail + 40:
        return value
    end = value[-tail:] if tail else ""
    return f"{value[:head]} […{len(value) - head - tail:,} characters…] {end}"


def _plain(value: Any) -> Any:
    """As JSON's own kinds: scalars of torch and numpy as numbers, NaN and infinities as None, other objects as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return _plain(value.item())
    return str(value)
