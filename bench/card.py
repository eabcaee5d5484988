"""All figures of a card in one go: the runs of card.toml, those that only need memory side by side, then the timed ones.

    python -m bench.card --list
    python -m bench.card training                          # a group of runs: training, four-bit, rollout, tests
    python -m bench.card peers stream --out /tmp/figures   # single runs; results go there instead of bench/results

Prepare first: this package, peft and flash-attn-4 importable, and Unsloth for the runs named in it (they fail without). Runs that
are timed have the card to themselves. Of a run with several commands, engines that are compared, each loads its model and
compiles while the others do, and then waits for its turn to be timed. A run that fails or is out of time doesn't end the others.
Results join the JSON files; each run leaves a log beside them; a table comes last.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from bench import measure

RUNS = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Run:
    """Of card.toml."""

    name: str
    group: str
    commands: list[str]  # of `python -m`, or of pytest where they begin with it
    into: str = ""  # file of the results, of --out
    seconds: int = 60  # limit
    timed: bool = False
    gpu: float = 10.0  # GB
    host: float = 4.0  # GB, pinned memory included

    @property
    def waits(self) -> bool:
        """Whether its commands are timed in turns."""
        return len(self.commands) > 1


@dataclass
class Active:
    """A run under way: its processes, and the files that let them go on."""

    run: Run
    log: Path
    processes: list[subprocess.Popen[bytes]]
    turns: list[Path]
    began: float = field(default_factory=time.monotonic)
    turn: int = 0

    def step(self) -> int | None:
        """Let the next command have its turn; the exit status once all have ended, 124 where the limit did it."""
        if time.monotonic() - self.began > self.run.seconds:
            for process in self.processes:
                _kill(process)
            return 124
        running = [p for p in self.processes if p.poll() is None]
        if not running:
            return max((abs(p.returncode) for p in self.processes), default=0)
        if self.run.waits and self.all_ready():
            while self.turn < len(self.processes) and self.processes[self.turn].poll() is not None:
                self.turn += 1
            self.turns[self.turn].touch()
        return None

    def all_ready(self) -> bool:
        """Whether each command has loaded, or ended."""
        logs = [_log(self.log, i) for i in range(len(self.processes))]
        return all(
            p.poll() is not None or measure.READY in log.read_text(encoding="utf-8", errors="replace")
            for p, log in zip(self.processes, logs)
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="groups or runs of card.toml (default: all)")
    parser.add_argument("--list", action="store_true", help="print the runs and stop")
    parser.add_argument("--out", type=Path, default=measure.RESULTS, help="folder of results (default: bench/results)")
    parser.add_argument("--commit", default=None, help="commit to note where git is not at hand")
    parser.add_argument("--together", type=int, default=8, help="runs side by side at most (default: 8)")
    parser.add_argument("--gpu", type=float, default=130.0, help="GB that runs may take together (default: 130)")
    parser.add_argument("--host", type=float, default=110.0, help="GB of host memory likewise (default: 110)")
    parser.add_argument("--runs", type=Path, default=RUNS, help="another list of runs")
    options = parser.parse_args(argv)
    runs = chosen(read(options.runs), options.names)
    if options.list:
        print("\n".join(f"{r.group:10} {r.name:24} {r.seconds:4} s  {'timed' if r.timed else ''}" for r in runs))
        return
    if options.out != measure.RESULTS:
        shutil.copytree(measure.RESULTS, options.out, dirs_exist_ok=True)
    done = Campaign(options).all(runs)
    for name, status, seconds, last in done:
        print(f"{name:24} {'ok' if status == 0 else f'failed ({status})':12} {seconds:6.1f} s  {last}")
    sys.exit(any(status for _, status, *_ in done))


def read(path: Path) -> list[Run]:
    return [Run(name=name, **rest) for name, rest in tomllib.loads(path.read_text(encoding="utf-8")).items()]


def chosen(runs: list[Run], names: list[str]) -> list[Run]:
    known = {r.name for r in runs} | {r.group for r in runs}
    if unknown := [n for n in names if n not in known]:
        raise SystemExit(f"no run or group {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return [r for r in runs if not names or r.name in names or r.group in names]


class Campaign:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.logs = options.out / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.done: list[tuple[str, int, float, str]] = []

    def all(self, runs: list[Run]) -> list[tuple[str, int, float, str]]:
        """Name, exit status, seconds and last line of each."""
        self.side_by_side([r for r in runs if not r.timed], self.options.together)
        self.side_by_side([r for r in runs if r.timed], 1)
        return self.done

    def side_by_side(self, waiting: list[Run], most: int) -> None:
        active: list[Active] = []
        try:
            while waiting or active:
                for run in [r for r in waiting if self.fits(r, [a.run for a in active], most)][:1]:
                    waiting.remove(run)
                    active.append(self.start(run))
                for one in list(active):
                    status = one.step()
                    if status is not None:
                        active.remove(one)
                        self.end(one, status)
                time.sleep(0.05)
        finally:
            for one in active:
                for process in one.processes:
                    _kill(process)

    def fits(self, run: Run, active: list[Run], most: int) -> bool:
        """A run that is larger than all there is still has its try, alone."""
        if not active:
            return True
        gpu, host = (sum(getattr(r, kind) for r in [*active, run]) for kind in ("gpu", "host"))
        return len(active) < most and gpu <= self.options.gpu and host <= self.options.host

    def start(self, run: Run) -> Active:
        log = self.logs / f"{run.name}.log"
        folder = Path(tempfile.mkdtemp(prefix=f"{run.name}-"))
        turns = [folder / f"turn{i}" for i in range(len(run.commands))]
        processes = []
        for i, command in enumerate(run.commands):
            asked = [sys.executable, "-m", *shlex.split(command)]
            if not command.startswith("pytest"):
                asked += ["--out", str(self.options.out / run.into)]
                asked += ["--commit", self.options.commit] if self.options.commit else []
                asked += ["--after", str(turns[i])] if run.waits else []
            with _log(log, i).open("wb") as file:
                environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
                processes.append(
                    subprocess.Popen(
                        asked, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                    )
                )
        return Active(run, log, processes, turns)

    def end(self, one: Active, status: int) -> None:
        lines = _log(one.log, len(one.processes) - 1).read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        self.done.append((one.run.name, status, time.monotonic() - one.began, last[-140:]))
        print(f"== {one.run.name} ended with {status} after {self.done[-1][2]:.1f} s", flush=True)


def _log(path: Path, command: int) -> Path:
    return path.with_suffix(f".{command}.log") if command else path


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
