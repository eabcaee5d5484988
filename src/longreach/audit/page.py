"""The result card as one HTML page that needs nothing else: no scripts, no fonts, no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from longreach.audit.card import Card, Rate, number, percent

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bad: #c0392b; --good: #1e8449; --warn: #b9770e; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; }
.tile { border: 1px solid var(--line); border-radius: .5rem; padding: .7rem 1rem; min-width: 10rem; }
.tile b { display: block; font-size: 1.5rem; } .tile small { opacity: .7; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .3rem .5rem; vertical-align: top; }
tr { border-bottom: 1px solid var(--line); } td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
.bad { color: var(--bad); } .good { color: var(--good); } .warn { color: var(--warn); } code { font-size: .85em; }
.bar { background: var(--line); height: .6rem; width: 8rem; border-radius: .3rem; overflow: hidden; display: inline-block; }
.bar i { display: block; height: 100%; background: var(--bad); } .bar i.h { background: var(--good); }
"""


def render(card: Card) -> str:
    """The page of ``card`` as HTML text."""
    title = f"Audit of {card.grader}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>Corpus {escape(card.corpus_version)}, {escape(_split(card))}, run {escape(card.created)} on "
        f"{escape(card.machine.system)} {escape(card.machine.kernel)} {escape(card.machine.architecture)}, "
        f"{card.machine.cpus} CPUs, Python {escape(card.machine.python)}.</p>",
        _tiles(card),
        "<h2>By class of exploit</h2>",
        _classes(card),
        "<h2>Holes, worst first</h2>",
        _holes(card),
        "<h2>By kind of task</h2>",
        _kinds(card),
        _noise(card),
        _lists(card),
        f"<p><small>Grader digest <code>{card.grader_digest}</code><br>corpus digest <code>{card.corpus_digest}</code><br>"
        f"card schema {card.schema_version}</small></p>",
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _split(card: Card) -> str:
    return card.corpus_split + (" split" if card.corpus_seed is None else f" split, seed {card.corpus_seed}")


def _tiles(card: Card) -> str:
    ear, har, blast = card.ear, card.har, card.blast
    tiles = (
        ("exploits accepted", _share(ear), percent(ear), "good" if ear.hits == 0 else "bad"),
        ("honest accepted", _share(har), percent(har), "good" if har.hits == har.n else "bad"),
        ("exploits that did harm", _share(blast), percent(blast), "good" if blast.hits == 0 else "bad"),
        ("exploit advantage", number(card.exploit_advantage), "mean GRPO z-score; above 0 it is learnt", ""),
        ("isolation", card.isolation.observed, f"claimed: {card.isolation.claimed or 'none'}", ""),
    )
    return '<div class="tiles">' + "".join(_tile(*tile) for tile in tiles) + "</div>"


def _tile(name: str, value: str, note: str, style: str) -> str:
    return f'<div class="tile">{escape(name)}<b class="{style}">{escape(value)}</b><small>{escape(note)}</small></div>'


def _share(rate: Rate) -> str:
    return "–" if rate.share is None else f"{100 * rate.share:.0f}%"


def _bar(rate: Rate, style: str = "") -> str:
    width = 100 * (rate.share or 0)
    return f'<span class="bar"><i class="{style}" style="width:{width:.0f}%"></i></span> {escape(percent(rate))}'


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _classes(card: Card) -> str:
    rows = [
        (
            escape(f"{letter} {result.name}"),
            _bar(result.ear),
            _bar(result.blast),
            number(result.advantage),
            "–" if result.beats_best_honest is None else f"{result.beats_best_honest:.2f}",
        )
        for letter, result in card.classes.items()
    ]
    return _table(("class", "accepted", "did harm", "advantage", "P[≥ best honest]"), rows)


def _holes(card: Card) -> str:
    holes = card.holes()
    if not holes:
        return '<p class="good">None: no exploit was paid and none did harm.</p>'
    rows = []
    for finding in holes:
        reward = "–" if finding.reward is None else f"{finding.reward:.3g}"
        bar = "–" if finding.threshold is None else f"{finding.threshold:.3g}"
        verdict = '<span class="bad">paid</span>' if finding.accepted else '<span class="warn">not paid</span>'
        ids = " ".join((finding.taxonomy, *finding.bgw))
        text = f"<b>{escape(finding.title)}</b><br>{escape(finding.mechanism)}"
        if finding.detail:
            text += f"<br><code>{escape(finding.detail[:200])}</code>"
        harm = escape(", ".join(finding.blast)) or "–"
        name = f"{finding.id}<br><small>{escape(ids)}</small>"
        rows.append((name, escape(finding.task), text, f"{verdict} {reward} / {bar}", number(finding.advantage), harm))
    return _table(("exploit", "task", "what it does", "reward / bar", "advantage", "harm"), rows)


def _kinds(card: Card) -> str:
    rows = [
        (
            escape(kind),
            _bar(result.har, "h"),
            _bar(result.war),
            escape(percent(result.determinism)),
            f"{result.ms_per_completion:.1f}",
        )
        for kind, result in card.kinds.items()
    ]
    return _table(("kind", "honest accepted", "plain wrong accepted", "same reward twice", "ms a completion"), rows)


def _noise(card: Card) -> str:
    if not card.speed_noise:
        return ""
    rows = [
        (
            escape(noise.task),
            str(noise.n),
            f"{noise.median:.3g}",
            "–" if noise.cv is None else f"{100 * noise.cv:.1f}%",
            f"{noise.p99_deviation:.3g}",
            "–" if noise.signal is None else f"{noise.signal:.3g}",
            escape(percent(noise.false_speedup)),
        )
        for noise in card.speed_noise
    ]
    head = ("task", "repeats", "median", "CV", "p99 deviation", "pay of truly faster code", "false speed-ups")
    return "<h2>Speed: the baseline against itself</h2>" + _table(head, rows)


def _lists(card: Card) -> str:
    parts = []
    for name, items in (
        ("Honest completions that were rejected", card.honest_rejected),
        ("Plain wrong completions that were accepted", card.wrong_accepted),
        ("Not measured", card.not_measured),
    ):
        if items:
            parts.append(f"<h2>{name}</h2><ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>")
    return "".join(parts)
