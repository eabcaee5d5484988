"""The README's picture: reward against steps, from the log of a real demo run.

    longreach demo --out runs/figure && python bench/readme_figure.py runs/figure

Writes docs/demo.svg, which follows the reader's light or dark theme, with the run's versions and commit inside.
"""

from __future__ import annotations

import argparse
import html
from pathlib import Path

from longreach.report import RunLog, read_log
from longreach.report.plots import running_mean, series

OUT = Path(__file__).parents[1] / "docs" / "demo.svg"
WIDTH, HEIGHT = 860, 340
LEFT, RIGHT, TOP, BOTTOM = 62, 28, 66, 50

STYLE = """<style>
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: #5d6675; }
  .title { font-size: 16px; font-weight: 650; fill: #1b1f27; }
  .number { font-size: 14px; font-weight: 650; fill: #d9480f; }
  .page { fill: #ffffff; } .grid { stroke: #e3e7ed; }
  .faint, .mean { stroke: #2563eb; fill: none; stroke-linejoin: round; } .faint { stroke-width: 1.2; opacity: 0.4; }
  .mean { stroke-width: 2.6; } .held { stroke: #d9480f; stroke-width: 2.6; fill: none; } .dot { fill: #d9480f; }
  @media (prefers-color-scheme: dark) {
    text { fill: #9aa4b2; } .title { fill: #e7eaf0; } .number { fill: #ff9457; } .page { fill: #12151b; }
    .grid { stroke: #2a303b; } .faint, .mean { stroke: #6ea8fe; } .held { stroke: #ff9457; } .dot { fill: #ff9457; }
  }
</style>"""


def draw(log: RunLog) -> str:
    """The picture as SVG. Raises ValueError for a run without two held-out evaluations."""
    steps, rewards = series(log.steps, "reward")
    held_steps, held = series(log.evals, "reward")
    if len(held) < 2 or log.status != "finished":
        raise ValueError(f"{log.path}: needs a finished run with a held-out evaluation before and after")
    last = max(steps[-1], held_steps[-1])

    def at(step: float, reward: float) -> tuple[float, float]:
        x = LEFT + step / last * (WIDTH - LEFT - RIGHT)
        return round(x, 1), round(TOP + (1 - reward) * (HEIGHT - TOP - BOTTOM), 1)

    def line(kind: str, xs: list[float], ys: list[float]) -> str:
        points = " ".join(f"{x},{y}" for x, y in map(at, xs, ys))
        return f'<polyline class="{kind}" points="{points}"/>'

    config = log.header["config"]
    title = f"GRPO on prompts of {config['length']:,} tokens: held-out reward {held[0]:.2f} → {held[-1]:.2f} in {last:.0f} steps"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
        f"<!-- {html.escape(_provenance(log)).replace('--', '- -')} -->",
        STYLE,
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        f'<text class="title" x="{LEFT}" y="30">{title}</text>',
        f'<text x="{LEFT}" y="50">blue: training, each step and running mean · orange: questions never trained on</text>',
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = at(0, tick)
        out.append(f'<line class="grid" x1="{x}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        out.append(f'<text x="{x - 10}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for tick in range(0, int(last) + 1, max(1, round(last / 8))):
        out.append(f'<text x="{at(tick, 0)[0]}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{tick}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">optimizer step</text>')
    out += [line("faint", steps, rewards), line("mean", steps, running_mean(rewards)), line("held", held_steps, held)]
    for step, reward in zip(held_steps, held):
        x, y = at(step, reward)
        anchor = "start" if step == 0 else "end" if step == last else "middle"
        out.append(f'<circle class="dot" cx="{x}" cy="{y}" r="4.5"/>')
        out.append(
            f'<text class="number" x="{x + (8 if step == 0 else 0)}" y="{y - 11}" text-anchor="{anchor}">{reward:.2f}</text>'
        )
    return "\n".join([*out, "</svg>", ""])


def _provenance(log: RunLog) -> str:
    header = log.header
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    return f"{header['run']}, {header['started']}, commit {header['commit']}, {header['device']['cpu']}; {versions}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a demo run")
    OUT.write_text(draw(read_log(parser.parse_args().run)), encoding="utf-8")
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
