"""All figures of a card in one go: each command is one that its script takes; turns, limits and failures."""

import argparse
import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench import card, measure

RUNS = card.read(card.RUNS)
PRETEND = """
import argparse, json, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("--seconds", type=float, default=0.3)
parser.add_argument("--fail", action="store_true")
parser.add_argument("--out", type=pathlib.Path)
parser.add_argument("--commit")
parser.add_argument("--after", type=pathlib.Path)
options = parser.parse_args()
if options.fail:
    sys.exit("it broke")
if options.after:
    print(READY, options.after, flush=True)
    while not options.after.exists():
        time.sleep(0.05)
began = time.time()
time.sleep(options.seconds)
options.out.with_name(options.name + ".found").write_text(json.dumps({"began": began, "ended": time.time()}))
print("done", options.name)
"""


class Parsed(Exception):
    """The script has read its options."""


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_each_command_is_one_that_its_script_takes(run, monkeypatch, tmp_path):
    parse = argparse.ArgumentParser.parse_args

    def stop(self, argv):
        parse(self, argv)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    for command in run.commands:
        module, *given = shlex.split(command)
        if module == "pytest":
            assert Path(given[0]).is_dir()
            continue
        assert (measure.RESULTS / run.into).suffix == ".json"
        turn = ["--after", "turn"] if run.waits else []
        with pytest.raises(Parsed):
            importlib.import_module(module).main([*given, "--out", str(tmp_path), "--commit", "abc", *turn])


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """Runs a list of pretended runs; the table's lines and the records."""
    (tmp_path / "pretend.py").write_text(PRETEND.replace("READY", repr(measure.READY)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()

    def campaign(runs: str, *names: str, code: int = 0):
        (tmp_path / "runs.toml").write_text(runs)
        out = tmp_path / "out"
        with pytest.raises(SystemExit) as left:
            card.main([*names, "--runs", str(tmp_path / "runs.toml"), "--out", str(out), "--commit", "abc"])
        assert bool(left.value.code) == bool(code)
        return {path.stem: json.loads(path.read_text()) for path in out.glob("*.found")}

    return campaign


def run(name: str, *commands: str, **more: object) -> str:
    listed = ", ".join(f'"pretend {c}"' for c in commands)
    rest = "\n".join(f"{k} = {json.dumps(v)}" for k, v in more.items())
    return f'[{name}]\ngroup = "g"\ninto = "found.json"\ncommands = [{listed}]\n{rest}\n'


def apart(a: dict, b: dict) -> bool:
    return a["ended"] <= b["began"] or b["ended"] <= a["began"]


def test_engines_that_are_compared_take_turns(pretended):
    found = pretended(run("peers", "ours", "theirs", "others", timed=True))
    assert found["ours"]["ended"] <= found["theirs"]["began"] and found["theirs"]["ended"] <= found["others"]["began"]


def test_timed_runs_are_alone_and_the_others_side_by_side(pretended):
    timed = run("t1", "t1", timed=True) + run("t2", "t2", timed=True)
    found = pretended(run("a", "a --seconds 2") + timed + run("b", "b --seconds 2"))
    assert not apart(found["a"], found["b"])
    assert all(apart(found["t1"], found[other]) for other in ("a", "b", "t2"))


def test_runs_that_do_not_fit_wait(pretended):
    found = pretended(run("a", "a", gpu=100.0) + run("b", "b", gpu=100.0))
    assert apart(found["a"], found["b"])


def test_a_failure_or_a_time_out_ends_no_other(pretended, capsys):
    runs = run("broken", "x --fail") + run("slow", "slow --seconds 60", seconds=1)
    found = pretended(runs + run("peers", "ours --fail", "theirs", timed=True), code=1)
    assert set(found) == {"theirs"}
    table = capsys.readouterr().out
    assert "failed (1)" in table and "it broke" in table and "failed (124)" in table and "done theirs" in table


def test_names_choose_runs_and_unknown_ones_are_refused(pretended):
    assert set(pretended(run("a", "a") + run("b", "b"), "b")) == {"b"}
    with pytest.raises(SystemExit, match="no run or group c; there are a, b, g"):
        card.chosen([card.Run("a", "g", []), card.Run("b", "g", [])], ["c"])


def test_records_of_processes_that_write_at_once_are_all_kept(tmp_path):
    code = (
        "import sys, pathlib; from bench import measure\n"
        "for i in range(20): measure.put(pathlib.Path(sys.argv[1]), {'name': f'{sys.argv[2]}{i}'}, 'abc', ('name',))"
    )
    path = tmp_path / "all.json"
    root = Path(__file__).parents[2]
    each = [subprocess.Popen([sys.executable, "-c", code, str(path), name], cwd=root) for name in "ab"]
    assert [p.wait() for p in each] == [0, 0]
    assert len(json.loads(path.read_text())) == 40
