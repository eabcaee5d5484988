"""The plots of a run, as Plotly figures without colours: the page gives them those of its light or dark theme."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from longreach.report.log import Record, RunLog

MAX_POINTS = 1500  # per line; a longer run is shown as means over equal stretches of steps


@dataclass(frozen=True)
class Plot:
    """One plot: ``figure`` is JSON for Plotly; ``wide`` spans the page; ``note`` is a plain-text caption."""

    name: str
    title: str
    note: str
    figure: str
    wide: bool = False


@dataclass(frozen=True)
class _Line:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    role: int  # index into the page's palette
    mode: str = "lines"
    faint: bool = False
    dash: str = "solid"


def plots(log: RunLog) -> list[Plot]:
    """Return the plots that the log has numbers for, most telling first."""
    makers: Iterable[Callable[[RunLog], Plot | None]] = (
        _reward,
        _components,
        _length,
        _loss,
        _grad_norm,
        _signal,
        _divergence,
        _speed,
        _memory,
        _learning_rate,
    )
    return [plot for plot in (make(log) for make in makers) if plot is not None]


def series(rows: Iterable[Record], *keys: str) -> tuple[list[float], list[float]]:
    """Steps and values of the nested field ``keys`` over ``rows``, leaving out rows without a finite number there."""
    xs: list[float] = []
    ys: list[float] = []
    for row in rows:
        value: Any = row
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            xs.append(row["step"])
            ys.append(value)
    return xs, ys


def running_mean(ys: Sequence[float]) -> list[float]:
    """Exponential running mean over about a sixteenth of the run, at least three steps.

    The bias of its start is removed as Adam does (Kingma and Ba 2015, section 3): mean_t / (1 - (1 - w)^t).
    """
    weight = 2 / (max(3.0, len(ys) / 16) + 1)
    out: list[float] = []
    mean = 0.0
    for t, y in enumerate(ys, 1):
        mean += weight * (y - mean)
        out.append(mean / (1 - (1 - weight) ** t))
    return out


def thin(xs: Sequence[float], ys: Sequence[float], limit: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """At most ``limit`` points: means over equal stretches. Shorter series come back unchanged."""
    if len(xs) <= limit:
        return list(xs), list(ys)
    bounds = [round(i * len(xs) / limit) for i in range(limit + 1)]
    pairs = [(xs[a:b], ys[a:b]) for a, b in itertools.pairwise(bounds)]
    return [sum(x) / len(x) for x, _ in pairs], [sum(y) / len(y) for _, y in pairs]


def _significant(value: float) -> float:
    return float(f"{value:.6g}")


def _figure(
    lines: Sequence[_Line],
    *,
    y_title: str,
    y_range: list[float] | None = None,
    suffix: str = "",
    from_zero: bool = False,
) -> str:
    figure = go.Figure()
    for line in lines:
        xs, ys = thin(line.x, line.y)
        figure.add_trace(
            go.Scatter(
                x=xs,
                y=[_significant(y) for y in ys],
                name=html.escape(line.name),
                # A line of one point would not be seen.
                mode="lines+markers" if len(xs) == 1 and line.mode == "lines" else line.mode,
                opacity=0.45 if line.faint else 1.0,
                line={"width": 1.2 if line.faint else 2.4, "dash": line.dash},
                marker={"size": 8},
                cliponaxis=False,
                meta={"role": line.role},
                hovertemplate=f"%{{y:.4~g}}{suffix}<extra>{html.escape(line.name)}</extra>",
            )
        )
    figure.update_layout(
        template="none",
        showlegend=len(lines) > 1,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        margin={"l": 56, "r": 14, "t": 34 if len(lines) > 1 else 10, "b": 40},
        hovermode="x unified",
        xaxis={"title": {"text": "step"}, "rangemode": "tozero", "zeroline": False},
        yaxis={
            "title": {"text": y_title},
            "zeroline": False,
            "range": y_range,
            "rangemode": "tozero" if from_zero else "normal",
            "exponentformat": "e",
        },
    )
    return figure.to_json()


def _noisy(name: str, xs: list[float], ys: list[float], role: int) -> list[_Line]:
    """A per-step line, faint, under its running mean; only the line itself where there are too few steps for a mean."""
    if len(xs) < 8:
        return [_Line(name, xs, ys, role, mode="lines+markers")]
    return [_Line(f"{name}, each step", xs, ys, role, faint=True), _Line(name, xs, running_mean(ys), role)]


def _reward(log: RunLog) -> Plot | None:
    xs, ys = series(log.steps, "reward")
    held_x, held_y = series(log.evals, "reward")
    if not xs and not held_x:
        return None
    lines = _noisy("training", xs, ys, 0) if xs else []
    if held_x:
        lines.append(_Line("held-out", held_x, held_y, 1, mode="lines+markers"))
    inside = all(0 <= y <= 1 for y in ys + held_y)
    figure = _figure(lines, y_title="mean reward", y_range=[-0.03, 1.03] if inside else None)
    return Plot(
        "reward", "Reward", "Mean over the completions of a step; the bold line is a running mean.", figure, True
    )


def _components(log: RunLog) -> Plot | None:
    names = list(dict.fromkeys(name for row in log.steps for name in row.get("rewards", {})))
    if len(names) < 2:
        return None
    lines = []
    for role, name in enumerate(names):
        xs, ys = series(log.steps, "rewards", name)
        if xs:
            lines.append(_Line(name, xs, running_mean(ys), role))
    figure = _figure(lines, y_title="mean reward")
    return Plot("components", "Reward components", "Running mean of each reward function, unweighted.", figure)


def _length(log: RunLog) -> Plot | None:
    xs, ys = series(log.steps, "length", "mean")
    if not xs:
        return None
    lines = [_Line("mean", xs, ys, 0)]
    for name in ("min", "max"):
        other_x, other_y = series(log.steps, "length", name)
        if other_x:
            lines.append(_Line(name, other_x, other_y, 2, faint=True))
    figure = _figure(lines, y_title="tokens", suffix=" tokens", from_zero=True)
    return Plot("length", "Completion length", "Shortest, mean and longest completion of each step.", figure)


def _loss(log: RunLog) -> Plot | None:
    xs, ys = series(log.steps, "loss")
    if not xs:
        return None
    sft = log.header.get("method") == "sft"
    lines = _noisy("training", xs, ys, 0)
    held_x, held_y = series(log.evals, "loss") if sft else ([], [])
    if held_x:
        lines.append(_Line("held-out", held_x, held_y, 1, mode="lines+markers"))
    note = "The policy-gradient loss hovers near zero by design: watch the reward."
    if sft:
        note = "Cross-entropy per label, nats."
    return Plot("loss", "Loss", note, _figure(lines, y_title="loss"), sft)


def _grad_norm(log: RunLog) -> Plot | None:
    xs, ys = series(log.steps, "grad_norm")
    if not xs:
        return None
    return Plot("grad_norm", "Gradient norm", "Before clipping.", _figure(_noisy("norm", xs, ys, 0), y_title="2-norm"))


def _signal(log: RunLog) -> Plot | None:
    xs, ys = series(log.steps, "groups_without_signal")
    clip_x, clip_y = series(log.steps, "length", "clipped")
    if not xs:
        return None
    lines = [_Line("groups without signal", xs, running_mean(ys), 0)]
    if clip_x:
        lines.append(_Line("completions cut at the limit", clip_x, running_mean(clip_y), 3))
    figure = _figure(lines, y_title="fraction", y_range=[-0.03, 1.03])
    note = "Groups whose completions all earned the same reward teach nothing and are skipped. Running means."
    return Plot("signal", "Groups without signal", note, figure)


def _divergence(log: RunLog) -> Plot | None:
    lines = []
    for role, (key, name) in enumerate((("entropy", "entropy"), ("kl", "KL to the reference"))):
        xs, ys = series(log.steps, key)
        if xs:
            lines.append(_Line(name, xs, ys, role))
    if not lines:
        return None
    return Plot(
        "entropy", "Entropy" if len(lines) == 1 else "Entropy and KL", "", _figure(lines, y_title="nats per token")
    )


def _speed(log: RunLog) -> Plot | None:
    xs, ys = series(log.steps, "tokens_per_second")
    if not xs:
        return None
    figure = _figure(_noisy("speed", xs, ys, 0), y_title="tokens/s", suffix=" tokens/s")
    return Plot("speed", "Speed", "Prompt and completion tokens over the whole step: rollout, rewards, update.", figure)


def _memory(log: RunLog) -> Plot | None:
    lines = []
    for role, (key, name) in enumerate((("device", "device, peak of the step"), ("host", "host, resident"))):
        xs, ys = series(log.steps, "memory", key)
        if xs:
            lines.append(_Line(name, xs, [y / 1e9 for y in ys], role))
    if not lines:
        return None
    return Plot("memory", "Memory", "", _figure(lines, y_title="GB (10⁹ bytes)", suffix=" GB", from_zero=True))


def _learning_rate(log: RunLog) -> Plot | None:
    xs, ys = series(log.steps, "learning_rate")
    if not xs:
        return None
    return Plot(
        "learning_rate", "Learning rate", "", _figure([_Line("rate", xs, ys, 0)], y_title="rate", from_zero=True)
    )
