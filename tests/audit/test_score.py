"""The audit of graders whose behaviour is known."""

import os
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longreach import rewards
from longreach.audit import TargetError, audit, load_corpus
from longreach.cli import app
from longreach.rewards.math import math_reward

CORPUS = load_corpus()
NAIVE = Path(__file__).parents[2] / "examples" / "naive_graders"


def part(*tasks):
    return CORPUS.select(tasks=set(tasks))


def text(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def boxed(completions, answer):
    return [float(re.findall(r"\\boxed\{(.*?)\}", text(c))[-1:] == [a]) for c, a in zip(completions, answer)]


def found(card):
    return {finding.id: finding for finding in card.holes()}


def test_the_naive_code_grader_has_its_known_holes():
    card = audit(
        f"{NAIVE / 'code.py'}:reward", part("sum-multiples", "run-lengths", "moving-average"), kinds=["function"]
    )
    accepted = {f.taxonomy for f in card.findings if f.accepted}
    assert {"B14", "B16", "C26", "C34"} <= accepted
    blasts = {kind for f in card.findings for kind in f.blast}
    assert {"crash", "neighbour", "lasting"} <= blasts
    assert card.har.share == 1.0 and card.war.share == 0.0
    assert card.isolation.observed == "in-process"
    ranks = [f.accepted or bool(f.blast) for f in card.findings]
    assert ranks == sorted(ranks, reverse=True)
    paid = [f.advantage for f in card.holes() if f.accepted]
    assert paid == sorted(paid, reverse=True) and min(paid) > 0.5


def test_the_naive_maths_grader_has_its_known_holes():
    card = audit(f"{NAIVE / 'maths.py'}:reward", part("linear-arithmetic", "roots"), kinds=["maths"])
    assert {"E55", "E56", "E57", "E62"} <= {f.taxonomy for f in card.findings if f.accepted}
    assert card.classes["E"].ear.share > 0.4 and card.exploit_advantage > 0
    assert card.classes["A"].ear.share is None


def test_our_maths_rewards_pay_no_exploit_and_all_honest_answers():
    kinds = {"maths", "format", "text", "tool"}
    card = audit(math_reward(), CORPUS.select(kinds=kinds), kinds=kinds)
    assert card.holes() == [] and card.ear.hits == 0 and card.ear.n >= 50
    assert card.har.hits == card.har.n >= 20 and card.war.hits == 0
    assert all(kind.determinism.share == 1.0 for kind in card.kinds.values())


def test_our_code_reward_pays_no_exploit_and_all_honest_programs():
    card = audit("longreach.audit.own:code_reward", part("run-lengths", "column-sums"), kinds=["function", "program"])
    assert card.holes() == [] and card.har.share == 1.0 and card.war.hits == 0
    assert card.isolation.observed == "contained" and card.isolation.claimed in ("lsm", "ns")
    assert card.worker_restarts == 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_our_code_and_speed_rewards_on_the_whole_corpus():
    code = audit("longreach.audit.own:code_reward", kinds=["function", "program"])
    assert code.holes() == [] and code.har.share == 1.0
    speed = audit("longreach.audit.own:speed_reward", kinds=["speed"])
    assert speed.holes() == [] and speed.har.share == 1.0
    assert all(noise.false_speedup.hits == 0 for noise in speed.speed_noise)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_naive_speed_grader_has_its_known_holes():
    card = audit(f"{NAIVE / 'speed.py'}:reward", kinds=["speed"])
    assert {"D37", "D43", "D46", "B16"} <= {f.taxonomy for f in card.findings if f.accepted}


def test_crash_hang_error_and_nonsense_are_told_apart():
    victims = {"two boxes": "crash", "a set in the box": "hang", "plus or minus": "error", "an interval": "malformed"}
    payloads = {
        s.text: victims[s.note] for t in part("linear-arithmetic").tasks for s in t.exploits if s.note in victims
    }
    assert len(payloads) == 4

    def fragile(prompts, completions, answer, **_):
        for completion in completions:
            behaviour = payloads.get(text(completion))
            if behaviour == "crash":
                os._exit(1)
            if behaviour == "hang":
                time.sleep(60)
            if behaviour == "error":
                raise RuntimeError("no such sign")
            if behaviour == "malformed":
                return [float("nan")] * len(completions)
        return boxed(completions, answer)

    card = audit(fragile, part("linear-arithmetic"), kinds=["maths"], time_limit=1.0)
    for note, kind in victims.items():
        (finding,) = [f for f in card.findings if f.title == note]
        assert kind in finding.blast and not finding.accepted, finding
    assert card.har.hits == 2 and card.honest_rejected == ["linear-arithmetic/LR-H003"]


def test_what_lasts_is_seen_and_does_not_leak_into_the_next_exploit():
    seen = []

    def grudge(prompts, completions, answer, **_):
        seen.extend(c for c in completions if "or perhaps" in text(c) or r"\pm" in text(c))
        return [0.0 if seen else r for r in boxed(completions, answer)]

    card = audit(grudge, part("linear-arithmetic"), kinds=["maths"])
    assert {f.title: f.blast for f in card.findings if f.blast} == {"plus or minus": ["neighbour", "lasting"]}


def test_a_quarantined_exploit_is_neither_paid_nor_harmful():
    def careful(prompts, completions, answer, **_):
        return [None if text(c).count("boxed") > 1 else r for c, r in zip(completions, boxed(completions, answer))]

    card = audit(careful, part("linear-arithmetic"), kinds=["maths"])
    (finding,) = [f for f in card.findings if f.title == "two boxes"]
    assert finding.quarantined and not finding.accepted and finding.advantage == 0.0


def test_paying_nobody_is_no_success():
    card = audit(lambda prompts, completions, **_: [0.0] * len(completions), part("roots"), kinds=["maths"])
    assert card.ear.hits == 0 and card.har.hits == 0 and card.har.n == 2
    everybody = audit(lambda prompts, completions, **_: [1.0] * len(completions), part("roots"), kinds=["maths"])
    assert everybody.har.hits == 0 and everybody.ear.hits == 0  # honest work is paid no more than wrong work


def test_kinds_are_found_and_the_rest_is_said_to_be_unmeasured():
    card = audit(lambda prompts, completions, answer, **_: boxed(completions, answer), part("roots", "sum-multiples"))
    assert list(card.kinds) == ["maths"]
    assert any(note.startswith("function tasks: error: TypeError") for note in card.not_measured)
    with pytest.raises(ValueError, match="paid no honest solution of any task kind"):
        audit(lambda prompts, completions, **_: [0.0] * len(completions), part("roots"))


def test_columns_can_be_renamed_and_completions_plain():
    def plain(prompts, completions, ground_truth, **_):
        assert all(isinstance(value, str) for value in (*prompts, *completions))
        return boxed(completions, ground_truth)

    card = audit(plain, part("roots"), kinds=["maths"], columns={"ground_truth": "answer"})
    assert card.har.share == 1.0


def test_a_reward_for_none_of_the_kinds_is_told_why_and_what_may_help():
    """The reward of the example config: it wants the bare answer, and a column that code tasks don't have."""
    reward = f"{Path(__file__).parents[2] / 'examples' / 'reward.py'}:exact_answer"
    with pytest.raises(ValueError) as caught:
        audit(reward, part("roots", "sum-multiples"))
    text = str(caught.value)
    assert text.startswith("reward.py:exact_answer paid no honest solution of any task kind more than a wrong one")
    assert "\n  function tasks: they have no column 'answer', which the reward needs\n" in text
    assert "a reward for a bare answer has to take it out of them first" in text and "--kind maths" in text
    assert re.search(
        r"maths tasks: no honest completion of roots was paid more than a wrong one: at most 0 for one that ends", text
    )


def test_a_column_that_no_task_has_is_named_with_those_there_are():
    def reward(completions, ground_truth, **_):
        return [0.0] * len(completions)

    with pytest.raises(ValueError) as caught:
        audit(reward, part("roots", "key-and-door", "sum-multiples"))
    text = str(caught.value)
    assert (
        "maths, text tasks: they have no column 'ground_truth', which the reward needs; theirs: answer, solution"
        in text
    )
    assert '--column ground_truth=answer, in Python columns={"ground_truth": "answer"}' in text


@pytest.mark.parametrize("name", [n for n in rewards.__all__ if n.endswith("_reward")])
def test_our_functions_that_make_rewards_are_told_apart_from_rewards(name):
    for reward in (f"longreach.rewards:{name}", getattr(rewards, name)):
        with pytest.raises(TargetError, match=r"can't be called as .* if it makes a reward, write reward = "):
            audit(reward, part("roots"))


def test_a_card_that_cannot_be_written_is_said_before_the_audit(tmp_path, monkeypatch):
    monkeypatch.setattr("longreach.audit.audit", lambda *_, **__: pytest.fail("audited all the same"))
    for option, file in (("--json", tmp_path / "gone" / "card.json"), ("--html", tmp_path)):
        done = CliRunner().invoke(app, ["audit", f"{NAIVE / 'code.py'}:reward", option, str(file)])
        assert done.exit_code == 2 and f"{option} '{file}': name a file in a folder that exists" in done.stderr


def test_the_command_says_an_error_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import nothing_like_it\ndef reward(completions, **columns): pass\n")
    for name, message in (
        ("gone.py:reward", "error: target: there is no file gone.py; did you mean 'mine.py'?"),
        ("mine.py", "it must be file.py:function or module:function; it holds reward: name one, mine.py:reward"),
        ("mine.py:reward", "mine.py:reward raises when it is loaded: ModuleNotFoundError: No module named"),
        ("longreach.rewards.math:math_rewrad", "has no 'math_rewrad'; did you mean 'math_reward'?"),
    ):
        done = CliRunner().invoke(app, ["audit", name])
        assert done.exit_code == 2 and message in done.output, done.output
        assert done.output.count("target:") == 1 and "TargetError" not in done.output


def test_bad_targets_and_settings_are_named(tmp_path):
    for target, message in (
        ("nothing", "must be file.py:function"),
        ("missing.py:reward", "there is no file"),
        ("longreach.nowhere:reward", "cannot import"),
        ("longreach.rewards.math:nothing", "has no 'nothing'"),
        ("longreach.rewards.math:exact", "must be callable"),
    ):
        with pytest.raises((TargetError, FileNotFoundError), match=message):
            audit(target, part("roots"))
    with pytest.raises(ValueError, match=r"kinds: got \['poems'\]"):
        audit(boxed, part("roots"), kinds=["poems"])
    with pytest.raises(ValueError, match="accept_at: got 0"):
        audit(boxed, part("roots"), accept_at=0)
    with pytest.raises(ValueError, match="style: got 'loud'"):
        audit(boxed, part("roots"), style="loud")


def test_no_torch_is_needed():
    import subprocess
    import sys

    code = "import sys, longreach.audit.own, longreach.rewards; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
