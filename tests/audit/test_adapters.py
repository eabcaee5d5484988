"""Adapters, against objects with the interface of the libraries and, where installed, the libraries."""

import re

import pytest

from longreach.audit import audit, from_inspect, from_verifiers, from_verifiers_task, load_corpus
from longreach.audit.adapters import AdapterError

ROOTS = load_corpus().select(tasks={"roots"})


class Rubric:
    """The interface of verifiers.Rubric 0.1.8: score_rollout(state, score_sem) fills state["reward"]."""

    async def score_rollout(self, state, score_sem):
        async with score_sem:
            content = state["completion"][-1]["content"]
        state["reward"] = float(f"boxed{{{state['answer']}}}" in content)
        state["metrics"] = {"right": state["reward"]}
        state["timing"]["total_ms"] += 1.0


class OldRubric:
    """The interface of earlier versions: named arguments and a returned score."""

    async def score_rollout(self, prompt, completion, answer, state, task="default", info=None, **kwargs):
        class Score:
            reward = 2.0 if f"boxed{{{answer}}}" in completion[-1]["content"] else 0.0

        return Score()


@pytest.mark.parametrize("rubric", [Rubric(), OldRubric()])
def test_a_rubric_yields_a_card(rubric):
    card = audit(from_verifiers(rubric), ROOTS, kinds=["maths"])
    assert card.har.share == 1.0 and card.ear.hits == 0 and card.grader == type(rubric).__name__


def test_wrong_objects_are_refused():
    with pytest.raises(AdapterError, match="rubric: got int"):
        from_verifiers(3)
    with pytest.raises(AdapterError, match="scorer: got int"):
        from_inspect(3)
    with pytest.raises(AdapterError, match="task: got 3"):
        from_verifiers_task(3)


def test_the_real_verifiers_rubric():
    verifiers = pytest.importorskip("verifiers", reason="verifiers is not installed")
    if not hasattr(verifiers, "Rubric"):
        pytest.skip("this version of verifiers has no Rubric (it has tasks instead)")

    def right(completion, answer):
        return float(f"boxed{{{answer}}}" in completion[-1]["content"])

    card = audit(from_verifiers(verifiers.Rubric(funcs=[right], weights=[2.0])), ROOTS, kinds=["maths"])
    assert card.har.share == 1.0 and max(f.control_reward for f in card.findings) == 2.0


def test_the_real_verifiers_task():
    vf = pytest.importorskip("verifiers.v1", reason="no verifiers with tasks (verifiers.v1) is installed")

    class Data(vf.TaskData):
        gold: str

    class Roots(vf.Task[Data]):
        @vf.reward(weight=2.0)
        async def right(self, task, trace) -> float:
            return float(f"boxed{{{task.gold}}}" in trace.last_reply)

    card = audit(from_verifiers_task(Roots, columns={"gold": "answer"}), ROOTS, kinds=["maths"])
    assert card.har.share == 1.0 and max(f.control_reward for f in card.findings) == 2.0


def test_the_real_inspect_scorer():
    scoring = pytest.importorskip("inspect_ai.scorer", reason="inspect_ai is not installed")

    @scoring.scorer(metrics=[scoring.accuracy()])
    def last_box():
        async def score(state, target):
            box = re.findall(r"\\boxed\{(.*?)\}", state.output.completion)[-1:]
            return scoring.Score(value=scoring.CORRECT if box == [target.text] else scoring.INCORRECT)

        return score

    card = audit(from_inspect(last_box()), ROOTS, kinds=["maths"])
    assert card.har.share == 1.0 and card.ear.hits == 0
    included = audit(from_inspect(scoring.includes()), ROOTS, kinds=["maths"])
    assert included.har.share == 1.0
