"""Reading a run's log: what counts, what is dropped, what is refused."""

import json
from pathlib import Path

import pytest

from longreach.report import LogError, read_log

HEADER = {"type": "header", "format": 1, "run": "r", "method": "grpo"}


def write(folder: Path, *records: dict, tail: str = "") -> Path:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail, encoding="utf-8")
    return path


def test_reads_a_folder_or_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER, {"type": "step", "step": 1, "loss": 0.5}, {"type": "footer", "status": "finished"})
    assert read_log(tmp_path).steps == read_log(path).steps == ({"type": "step", "step": 1, "loss": 0.5},)
    assert read_log(path).status == "finished"


def test_a_half_written_last_line_is_dropped(tmp_path: Path) -> None:
    log = read_log(write(tmp_path, HEADER, {"type": "step", "step": 1}, tail='{"type": "step", "st'))
    assert [row["step"] for row in log.steps] == [1] and log.status == "running"


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    first = [{"type": "step", "step": s, "loss": 1.0} for s in (1, 2, 3)]
    again = [{"type": "step", "step": s, "loss": 2.0} for s in (3, 4)]
    evals = {"type": "eval", "step": 3, "reward": 0.1}
    log = read_log(
        write(
            tmp_path,
            HEADER,
            *first,
            evals,
            {"type": "footer", "status": "failed"},
            {**HEADER, "resumed_from": 2},
            *again,
        )
    )
    assert [(row["step"], row["loss"]) for row in log.steps] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert log.evals == () and log.status == "running" and len(log.starts) == 2


def test_alarms_are_gathered_in_order(tmp_path: Path) -> None:
    alarm = {"step": 2, "kind": "length", "message": "m", "value": 1.0}
    log = read_log(write(tmp_path, HEADER, {"type": "step", "step": 1}, {"type": "step", "step": 2, "alarms": [alarm]}))
    assert log.alarms == (alarm,)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("nonsense\n" + json.dumps(HEADER) + "\n", r"log\.jsonl:1: not JSON"),
        (json.dumps({**HEADER, "format": 9}) + "\n", r"format=9; this version reads format 1"),
        (json.dumps(HEADER) + "\n" + json.dumps({"type": "stp"}) + "\n", r"log\.jsonl:2: type='stp' is none of"),
        (
            json.dumps(HEADER) + "\n" + json.dumps({"type": "step", "step": "1"}) + "\n",
            r"step='1' is not a whole number",
        ),
        (json.dumps({"type": "step", "step": 1}) + "\n", "no header record"),
        ("", "no header record"),
    ],
)
def test_what_is_not_a_log_is_refused(tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "log.jsonl").write_text(lines, encoding="utf-8")
    with pytest.raises(LogError, match=message):
        read_log(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(LogError, match=r"log\.jsonl: not the log of a run: 'utf-8'"):
        read_log(tmp_path)


def test_a_missing_run_names_those_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "demo-1").mkdir()
    write(tmp_path / "demo-1", HEADER)
    with pytest.raises(LogError, match=r"RUN='.*demo-2': no log\.jsonl there.*runs there: demo-1"):
        read_log(tmp_path / "demo-2")
