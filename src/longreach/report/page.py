"""One HTML file that tells a run: plots, numbers, alarms, completions, settings. It opens offline and loads nothing."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from longreach.report.log import PAGE_NAME, Record, RunLog, read_log
from longreach.report.plots import plots, series

MAX_COMPLETIONS = 48  # training completions shown, spread evenly over the run
MAX_HELD_OUT = 8  # per evaluation, of the first and the last
MAX_ALARMS = 50


def write_page(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of ``run`` (its folder or its log) and return where: ``out``, or report.html beside the log.

    Raises ``LogError`` if the log is absent or unreadable.
    """
    log = read_log(run)
    path = Path(out) if out is not None else log.path.parent / PAGE_NAME
    path.write_text(render(log), encoding="utf-8")
    return path


def render(log: RunLog) -> str:
    """Return the page as HTML. Everything from the run (prompts, completions, names, settings) is escaped."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["number"] = number
    environment.filters["show"] = _show
    template = environment.from_string(files("longreach.report").joinpath("page.html").read_text(encoding="utf-8"))
    header, drawn = log.header, plots(log)
    return template.render(
        run=header.get("run", log.path.parent.name),
        header=header,
        status=log.status,
        footer=log.footer or {},
        subtitle=_subtitle(log),
        tiles=_tiles(log),
        plots=drawn,
        alarms=log.alarms[:MAX_ALARMS],
        more_alarms=max(0, len(log.alarms) - MAX_ALARMS),
        completions=spread(_sample(log.steps), MAX_COMPLETIONS),
        held_out=_held_out(log.evals),
        settings=_flat(header.get("config", {})),
        versions={**header.get("versions", {}), "commit": header.get("commit") or "not in a repository"},
        device=_flat(header.get("device", {})),
        written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        plotly=Markup(get_plotlyjs()),
        figures=_script_json({plot.name: json.loads(plot.figure) for plot in drawn}),
    )


def _script_json(value: Any) -> Any:
    """JSON that is safe inside <script>: no '<' can end the element or open a comment."""
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    return Markup(text)


def number(value: Any) -> str:
    """A number for reading: 0.81, 1,234, 3.2e-05; anything else as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """2 h 03 min, 4 min 10 s or 9 s."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def _subtitle(log: RunLog) -> str:
    header, last = log.header, log.steps[-1] if log.steps else {}
    parts = [str(header.get("method", "")).upper(), str(header.get("model", ""))]
    total = last.get("total_steps")
    parts.append(f"{last.get('step', 0):,} of {total:,} steps" if total else f"{last.get('step', 0):,} steps")
    ending = log.footer or last
    if "seconds" in ending:
        parts.append(duration(ending["seconds"]))
    parts.append(str(header.get("started", ""))[:16].replace("T", " "))
    return " · ".join(part for part in parts if part)


def _tiles(log: RunLog) -> list[tuple[str, str, str]]:
    """(label, value, small print) of the headline numbers that the run has."""
    tiles = []
    steps, held = series(log.evals, "reward")
    if held:
        change = f"{number(held[0])} at step {steps[0]:,.0f}" if len(held) > 1 else "one evaluation"
        tiles.append(("Held-out reward", number(held[-1]), change))
    _, rewards = series(log.steps, "reward")
    if rewards:
        tail = rewards[-10:]
        tiles.append(("Training reward", number(sum(tail) / len(tail)), f"mean of the last {len(tail)} steps"))
    _, losses = series(log.steps, "loss")
    if losses and not rewards:
        tiles.append(("Loss", number(losses[-1]), f"{number(losses[0])} at the first step"))
    _, lengths = series(log.steps, "length", "mean")
    if lengths:
        tiles.append(("Completion", number(lengths[-1]), "tokens, mean of the last step"))
    _, speed = series(log.steps, "tokens_per_second")
    if speed:
        tiles.append(("Speed", number(sorted(speed)[len(speed) // 2]), "tokens/s, median step"))
    _, tokens = series(log.steps, "tokens")
    if tokens:
        tiles.append(("Tokens", f"{tokens[-1] / 1e6:.2f} M", "prompts and completions"))
    for key, name in (("device", "GPU memory"), ("host", "Memory")):
        _, memory = series(log.steps, "memory", key)
        if memory:
            tiles.append((name, f"{max(memory) / 1e9:.2f} GB", "peak"))
            break
    return tiles


def _sample(rows: Sequence[Record]) -> list[Record]:
    return [{"step": row["step"], **item} for row in rows for item in row.get("completions", ())]


def spread(items: Sequence[Record], limit: int) -> list[Record]:
    """At most ``limit`` items, evenly spaced, the first and the last among them."""
    if len(items) <= limit:
        return list(items)
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def _held_out(evals: Sequence[Record]) -> list[Record]:
    """Held-out completions of the first and the last evaluation."""
    ends = evals if len(evals) < 2 else (evals[0], evals[-1])
    return [item for row in ends for item in spread(_sample([row]), MAX_HELD_OUT)]


def _show(value: Any) -> str:
    """A prompt or completion as text: a text or a single message as it is, several messages with their roles."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        return _show(value[0].get("content", ""))
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return "\n".join(f"[{message.get('role', '?')}] {_show(message.get('content', ''))}" for message in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names with their values as text."""
    out: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            out.update(_flat(item, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
    return out
