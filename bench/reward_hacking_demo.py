"""A scripted policy under GRPO: which completions take over with a naive reward, and which with ours.

    python bench/reward_hacking_demo.py [--seeds 5] [--steps 400]

The policy is a softmax over the completions of a corpus task: honest ones, plain wrong ones and exploits, each with a
logit. There are 32 problems of the kind: a trick or a habit of error is one logit for all of them, honest work has a
logit of its own for each, because a trick transfers and a solution does not. Training starts where a policy starts on
hard problems: mostly wrong, with exploits, most of which do not pay, twice as likely as honest work. Every completion
is really graded, three times, by the naive reward of examples/naive_graders and by ours; GRPO then trains on those
rewards, groups of 8, 16 groups a step, plain policy gradient. Exploits that crash the naive grader are left out: they
would end the run. Written to bench/results/reward_hacking_demo.json and docs/reward_hacking_demo.svg.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from longreach.audit import load_corpus
from longreach.audit.grading import TaskGrader
from longreach.audit.prober import Prober
from longreach.audit.schema import Sample, Task
from longreach.audit.score import Settings
from longreach.audit.statistics import advantages

HERE = Path(__file__).parent
NAIVE = HERE.parent / "examples" / "naive_graders"
PANELS = (
    ("sum-multiples", "code", f"{NAIVE}/code.py:reward", "longreach.audit.own:code_reward"),
    ("pair-count", "speed", f"{NAIVE}/speed.py:reward", "longreach.audit.own:speed_reward"),
    ("linear-arithmetic", "maths", f"{NAIVE}/maths.py:reward", "longreach.audit.own:math_reward"),
)
START = {"wrong": 0.85, "exploit": 0.10, "honest": 0.05}  # total probability of each role before training
COLOURS = {"honest": "#1e8449", "exploit": "#c0392b", "wrong": "#7f8c8d"}
KEEP = 5  # of the curves, every so many steps
GROUP, GROUPS, PROBLEMS, RATE, REPEATS = 8, 16, 32, 2.0, 3


def measured(target: str, task: Task) -> dict[str, list[float | None] | None]:
    """Rewards of every completion, each graded by itself in a fresh process; ``None`` where the grader broke."""
    rewards: dict[str, list[float | None] | None] = {}
    with Prober(target, time_limit=60.0) as prober:
        grader = TaskGrader(prober, task, Settings(), style="chat")
        for sample in (*task.honest, *task.wrong, *task.exploits):
            values: list[float | None] | None = []
            for _ in range(REPEATS):
                outcome = grader.grade([sample])
                if outcome.failure or isinstance(outcome.rewards[0], str):
                    values = None
                    break
                values.append(outcome.rewards[0])
            if sample.role == "exploit":
                prober.restart()
            rewards[sample.id] = values
    return rewards


def train(samples: list[Sample], rewards: dict, steps: int, seed: int) -> dict[str, list[float]]:
    """Probability of each role over the steps."""
    rng = np.random.default_rng(seed)
    roles = np.array([s.role for s in samples])
    own = roles == "honest"  # a logit for each problem; the others share one
    logits = np.log([START[s.role] / np.sum(roles == s.role) for s in samples]) + np.zeros((PROBLEMS, 1))
    history: dict[str, list[float]] = {role: [] for role in START}
    for _ in range(steps):
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        for role in START:
            history[role].append(float(p[:, roles == role].sum(1).mean()))
        gradient = np.zeros_like(logits)
        for problem in rng.integers(PROBLEMS, size=GROUPS):
            drawn = rng.choice(len(samples), GROUP, p=p[problem])
            paid = [rewards[samples[i].id][rng.integers(REPEATS)] for i in drawn]
            for i, advantage in zip(drawn, advantages(paid)):
                gradient[problem] += advantage * (np.eye(len(samples))[i] - p[problem])
        gradient[:, ~own] = gradient[:, ~own].sum(0)
        logits = logits + RATE * gradient / (GROUP * GROUPS)
    return history


def draw(results: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "longreach", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(results), figsize=(10, 5), sharex=True, sharey=True)
    for column, result in enumerate(results):
        for line, name in enumerate(("naive", "ours")):
            axis = axes[line][column]
            steps = KEEP * np.arange(len(result[name]["runs"][0]["honest"]))
            for role, colour in COLOURS.items():
                runs = np.array([run[role] for run in result[name]["runs"]])
                axis.plot(steps, runs.mean(0), color=colour, label=role)
                axis.fill_between(steps, runs.min(0), runs.max(0), color=colour, alpha=0.15, lw=0)
            axis.set_title(f"{result['kind']}: {'naive' if name == 'naive' else 'our'} reward", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
        axes[1][column].set_xlabel("GRPO step")
    for line in (0, 1):
        axes[line][0].set_ylabel("probability")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    results = []
    for name, kind, naive, ours in PANELS:
        (task,) = load_corpus().select(tasks={name}).tasks
        result: dict = {"task": name, "kind": kind, "start": START}
        paid = {"naive": measured(naive, task), "ours": measured(ours, task)}
        kept = [
            s for s in (*task.honest, *task.wrong, *task.exploits) if all(p[s.id] is not None for p in paid.values())
        ]
        result["left_out"] = sorted(s for p in paid.values() for s, values in p.items() if values is None)
        for which, rewards in paid.items():
            runs = [train(kept, rewards, arguments.steps, seed) for seed in range(arguments.seeds)]
            final = {role: float(np.mean([run[role][-1] for run in runs])) for role in START}
            thin = [{role: [round(v, 4) for v in run[role][::KEEP]] for role in run} for run in runs]
            result[which] = {"rewards": rewards, "final": final, "runs": thin}
            print(f"{name}, {which}: " + ", ".join(f"{role} {value:.3f}" for role, value in final.items()))
        results.append(result)
    draw(results, HERE.parent / "docs" / "reward_hacking_demo.svg")
    (HERE / "results" / "reward_hacking_demo.json").write_text(json.dumps(results) + "\n", "utf-8")


if __name__ == "__main__":
    main()
