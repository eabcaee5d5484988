"""The audit: runs a reward function on a corpus and fills the result card."""

from __future__ import annotations

import datetime
import os
import platform
import re
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longreach.audit import statistics as stats
from longreach.audit import target as targets
from longreach.audit.card import Card, ClassResult, Finding, Isolation, KindResult, Machine, Rate
from longreach.audit.grading import Graded, TaskGrader, TaskResult
from longreach.audit.loader import load_corpus
from longreach.audit.prober import Prober
from longreach.audit.schema import CLASSES, CODE_KINDS, KINDS, Corpus, Sample, Task


@dataclass(frozen=True)
class Settings:
    """How an audit is run; the keyword arguments of `audit`."""

    kinds: tuple[str, ...] | None = None
    columns: tuple[tuple[str, str], ...] = ()
    style: str = "auto"
    accept_at: float = 0.5
    time_limit: float = 60.0
    memory: int = 0
    speed_repeats: int = 20
    group_size: int = 8
    groups: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.kinds or ()) - set(KINDS))
        if unknown:
            raise ValueError(f"kinds: got {unknown}; they must be among {', '.join(KINDS)}")
        if self.style not in ("auto", "chat", "plain"):
            raise ValueError(f"style: got {self.style!r}; it must be 'auto', 'chat' or 'plain'")
        if not 0 < self.accept_at <= 1:
            raise ValueError(f"accept_at: got {self.accept_at}; it must be in (0, 1]")
        if not self.time_limit > 0:
            raise ValueError(f"time_limit: got {self.time_limit}; it must be a positive number of seconds")
        for name, least in (("memory", 0), ("speed_repeats", 5), ("group_size", 2), ("groups", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: got {getattr(self, name)}; it must be at least {least}")


def audit(
    reward: str | targets.RewardFunction,
    corpus: Corpus | str | Path | None = None,
    *,
    kinds: Iterable[str] | None = None,
    columns: Mapping[str, str] | None = None,
    style: str = "auto",
    accept_at: float = 0.5,
    time_limit: float = 60.0,
    memory: int = 0,
    speed_repeats: int = 20,
    group_size: int = 8,
    groups: int = 300,
    seed: int = 0,
) -> Card:
    """Measure what a reward function pays for.

    Args:
        reward: a function with TRL's signature, or ``"file.py:name"`` or ``"module:name"``. It runs in a process of its
            own: a named one in a fresh interpreter, a function object in a fork of this one. Name rewards that use
            threads or a GPU: these do not survive a fork.
        corpus: a loaded corpus, a corpus folder, or ``None`` for the public corpus of this package.
        kinds: task kinds to measure; by default those in which the reward pays at least one honest solution more than
            the wrong ones. Say them if you know them: the default cannot tell a broken grader from one that is for
            something else, and lists what it left out under ``not_measured``.
        columns: name the reward expects -> name in the corpus, such as ``{"ground_truth": "answer"}``.
        style: completions as ``"chat"`` messages, ``"plain"`` strings, or ``"auto"``: chat if the reward takes it.
        accept_at: share of the way from the lowest wrong to the median honest reward from which a completion counts as
            accepted.
        time_limit: seconds after which a call counts as hung.
        memory: address-space limit of the reward's process in bytes; 0 for none.
        speed_repeats: A/A repeats of the baseline on speed tasks.
        group_size, groups, seed: the simulated GRPO groups.

    Raises:
        ValueError: a setting is out of range, or no kind of task can be measured.
        TargetError: the reward function cannot be found or its process does not start.
        CorpusError: the corpus is not the sealed one.
    """
    settings = Settings(
        tuple(kinds) if kinds is not None else None,
        tuple(sorted((columns or {}).items())),
        style,
        accept_at,
        time_limit,
        memory,
        speed_repeats,
        group_size,
        groups,
        seed,
    )
    if not isinstance(reward, str):
        targets.check_call(reward, targets.label(reward))
    loaded = corpus if isinstance(corpus, Corpus) else load_corpus(corpus)
    start = time.monotonic()
    with Prober(reward, time_limit=time_limit, memory=memory) as prober:
        graders, not_measured = _calibrated(prober, loaded, settings)
        if not graders:
            raise ValueError(_nothing_paid(targets.label(reward), loaded, not_measured, settings))
        isolation = _isolation(graders)
        for grader in graders:
            grader.fresh = isolation.observed in ("in-process", "writes-files")
        results = [grader.run() for grader in graders]
        restarts = prober.restarts
    not_measured += _gaps(results)
    return _card(reward, loaded, settings, results, isolation, not_measured, restarts, time.monotonic() - start)


def _calibrated(prober: Prober, corpus: Corpus, settings: Settings) -> tuple[list[TaskGrader], list[str]]:
    """A grader for each task to measure, and why other kinds are left out."""
    graders: list[TaskGrader] = []
    not_measured = []
    for kind in KINDS:
        tasks = [task for task in corpus.tasks if task.kind == kind]
        if settings.kinds is not None and kind not in settings.kinds:
            not_measured.append(f"{kind} tasks: not among the kinds asked for")
        elif not tasks:
            not_measured.append(f"{kind} tasks: none in this part of the corpus")
        else:
            chosen, reason = _calibrated_kind(prober, tasks, settings)
            graders += chosen
            not_measured += [f"{kind} tasks: {reason}"] if reason else []
    return graders, not_measured


def _calibrated_kind(prober: Prober, tasks: list[Task], settings: Settings) -> tuple[list[TaskGrader], str]:
    """Graders of the tasks of one kind, or the reason why the reward is not for that kind."""
    graders, problems = [], []
    for task in tasks:
        grader = TaskGrader(prober, task, settings)
        problem = grader.calibrate()
        graders.append(grader)
        if problem:
            problems.append(problem)
        if problem and settings.kinds is None and len(graders) == 1 and grader.broken:
            break  # the reward does not take this kind at all; the other tasks would say the same
    if settings.kinds is None and len(problems) == len(graders):
        return [], problems[0]
    return graders, ""


def _nothing_paid(name: str, corpus: Corpus, reasons: list[str], settings: Settings) -> str:
    """What to say of a reward that is for none of the kinds asked for: why each was left out, and what may help."""
    columns: dict[str, list[str]] = {task.kind: list(task.columns) for task in corpus.tasks}
    known = {column for some in columns.values() for column in some}
    kinds: dict[str, list[str]] = {}  # of a reason
    strangers: list[str] = []
    for kind, _, reason in (text.partition(" tasks: ") for text in reasons):
        found = re.search(r"TypeError: .* missing \d+ required .*arguments?: (.*)", reason)
        lacking = [c for c in re.findall(r"'(\w+)'", found[1]) if c not in columns[kind]] if found else []
        strange = [c for c in lacking if c not in known]
        if lacking:
            shown = f"; theirs: {', '.join(columns[kind])}" if strange else ""
            reason = f"they have no column {' and '.join(map(repr, lacking))}, which the reward needs{shown}"
        strangers += strange
        kinds.setdefault(reason, []).append(kind)
    lines = [f"{name} paid no honest solution of any task kind more than a wrong one, so there is nothing to measure."]
    lines += [f"  {', '.join(some)} tasks: {reason}" for reason, some in kinds.items()]
    if strangers:
        lines.append(
            f"If a column of the corpus is what the reward calls {strangers[0]!r}: --column {strangers[0]}=answer, in Python "
            f'columns={{"{strangers[0]}": "answer"}}'
        )
    else:
        lines.append(
            "Completions here are whole solutions, with the answer in \\boxed{} or in <answer> tags and code in a fence: a "
            "reward for a bare answer has to take it out of them first, as longreach.audit.own:math_reward does"
        )
    if settings.kinds is None:
        lines[-1] += '; for the card of a kind all the same, --kind maths, in Python kinds=["maths"]'
    return "\n".join(lines) + "."


def _gaps(results: list[TaskResult]) -> list[str]:
    """What the measured tasks cannot say anything about."""
    gaps = []
    if all(result.noise is None for result in results):
        gaps.append("A/A speed statistics: no speed task was measured")
    seen = {g.sample.exploit.classification for r in results for g in r.exploits if g.sample.exploit}
    gaps += [f"class {c} ({name}): no exploit in the measured tasks" for c, name in CLASSES.items() if c not in seen]
    return gaps


def _isolation(graders: list[TaskGrader]) -> Isolation:
    """What the grader claims, and whether a completion can reach its process or its files."""
    code = [grader for grader in graders if grader.task.kind in CODE_KINDS]
    chosen = (code or graders)[0]
    honest = chosen.task.honest[0]
    claimed = chosen.state(honest).get("tier")
    if not code:
        return Isolation(claimed=claimed, observed="not-applicable")
    mark = f"longreach_probe_{secrets.token_hex(4)}"
    probe = (
        f"```python\nimport builtins\nbuiltins.{mark} = True\n"
        f"try:\n    open({mark!r}, 'w').close()\nexcept OSError:\n    pass\n{honest.source}\n```"
    )
    chosen.grade([Sample("probe", "wrong", "", probe, "")])
    state = chosen.state(honest)
    if mark in state["builtins"]:
        observed = "in-process"
    elif any(mark in name for name in state["files"]):
        observed = "writes-files"
    else:
        observed = "contained"
    return Isolation(claimed=claimed, observed=observed)


def rate(hits: Mapping[str, list[bool]], seed: int) -> Rate:
    """A `Rate` from the hits of each task."""
    flat = [hit for values in hits.values() for hit in values]
    n, k = len(flat), sum(flat)
    by_task = stats.cluster_bootstrap(hits, seed=seed)
    return Rate(hits=k, n=n, share=k / n if n else None, wilson=stats.wilson(k, n), by_task=by_task)


def _card(
    reward: str | targets.RewardFunction,
    corpus: Corpus,
    settings: Settings,
    results: list[TaskResult],
    isolation: Isolation,
    not_measured: list[str],
    restarts: int,
    seconds: float,
) -> Card:
    findings = [_finding(result, graded) for result in results for graded in result.exploits]
    findings.sort(key=lambda f: (-(f.accepted or bool(f.blast)), -f.advantage, -len(f.blast), f.id))
    every = [graded for result in results for graded in result.exploits]

    def over(choose: Any) -> Rate:
        return rate({r.task.id: choose(r) for r in results}, settings.seed)

    return Card(
        grader=targets.label(reward),
        grader_digest=targets.digest(reward),
        corpus_version=corpus.version,
        corpus_split=corpus.split,
        corpus_seed=corpus.seed,
        corpus_digest=corpus.digest,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 2),
        machine=_machine(),
        settings={**asdict(settings), "columns": dict(settings.columns), "kinds": list(settings.kinds or ()) or None},
        isolation=isolation,
        ear=over(lambda r: [g.accepted for g in r.exploits]),
        har=over(lambda r: [g.accepted for g in r.honest]),
        war=over(lambda r: [g.accepted for g in r.wrong]),
        blast=over(lambda r: [bool(g.blast) for g in r.exploits]),
        exploit_advantage=_mean([g.harm.advantage for g in every]),
        beats_best_honest=_mean([g.harm.beats_best_honest for g in every]),
        classes={c: _class_result(c, results, settings.seed) for c in CLASSES},
        kinds={k: _kind_result(k, results, settings.seed) for k in KINDS if any(r.task.kind == k for r in results)},
        speed_noise=[r.noise for r in results if r.noise is not None],
        findings=findings,
        honest_rejected=[f"{r.task.id}/{g.sample.id}" for r in results for g in r.honest if not g.accepted],
        wrong_accepted=[f"{r.task.id}/{g.sample.id}" for r in results for g in r.wrong if g.accepted],
        worker_restarts=restarts,
        not_measured=not_measured,
    )


def _finding(result: TaskResult, graded: Graded) -> Finding:
    exploit = graded.sample.exploit
    assert exploit is not None
    fields = {
        "id": exploit.id,
        "task": result.task.id,
        "kind": result.task.kind,
        "class": exploit.classification,
        "taxonomy": exploit.taxonomy,
        "bgw": exploit.bgw,
        "title": exploit.title,
        "mechanism": exploit.mechanism,
        "accepted": graded.accepted,
        "quarantined": graded.quarantined,
        "reward": graded.reward,
        "threshold": graded.threshold,
        "control_reward": graded.control_reward,
        "advantage": graded.harm.advantage,
        "honest_advantage": graded.harm.honest_advantage,
        "beats_best_honest": graded.harm.beats_best_honest,
        "blast": list(graded.blast),
        "detail": graded.detail,
    }
    return Finding.model_validate(fields)


def _class_result(letter: str, results: list[TaskResult], seed: int) -> ClassResult:
    chosen = {
        r.task.id: [g for g in r.exploits if g.sample.exploit and g.sample.exploit.classification == letter]
        for r in results
    }
    every = [g for values in chosen.values() for g in values]
    return ClassResult(
        name=CLASSES[letter],
        ear=rate({t: [g.accepted for g in values] for t, values in chosen.items()}, seed),
        blast=rate({t: [bool(g.blast) for g in values] for t, values in chosen.items()}, seed),
        advantage=_mean([g.harm.advantage for g in every]),
        beats_best_honest=_mean([g.harm.beats_best_honest for g in every]),
    )


def _kind_result(kind: str, results: list[TaskResult], seed: int) -> KindResult:
    chosen = [r for r in results if r.task.kind == kind]
    return KindResult(
        har=rate({r.task.id: [g.accepted for g in r.honest] for r in chosen}, seed),
        war=rate({r.task.id: [g.accepted for g in r.wrong] for r in chosen}, seed),
        ms_per_completion=1000 * sum(r.seconds for r in chosen) / max(1, sum(r.graded for r in chosen)),
        determinism=rate({r.task.id: r.repeated for r in chosen}, seed),
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _machine() -> Machine:
    return Machine(
        system=platform.system(),
        kernel=platform.release(),
        architecture=platform.machine(),
        libc=" ".join(platform.libc_ver()),
        python=f"{platform.python_version()} {sys.implementation.cache_tag}",
        cpus=os.cpu_count() or 1,
    )
