"""The tasks: the same on every machine, split apart, as long as asked, and with one decidable answer."""

import re

import pytest

from longreach import zoo
from longreach.zoo.task import pair_split

TASKS = zoo.tasks()
LENGTHS = (192, 256, 1000, 2048, 8192)
LIVE = {
    "log_facts": re.compile(r"^\d\d:\d\d (\w+) (?:joined|opened) (\w+)$", re.M),
    "program_trace": re.compile(r"^let (\w+) = (\w+)$", re.M),
}


def text_of(row):
    return row["prompt"][0]["content"]


def solve(task, row):
    """The answer from the text alone, by another way than the generator's: a reader with a regular expression."""
    found = LIVE[task.name].findall(text_of(row))
    facts = dict(found)
    assert len(facts) == len(found), "a key has two live facts"
    stops, key = [], text_of(row).split()[-1]
    while key in facts:
        key = facts[key]
        stops.append(key)
    return " ".join(stops)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("length", LENGTHS)
def test_answer_follows_from_the_text_alone(task, split, length):
    for index in range(8):
        row = task.row(split, length, seed=3, index=index)
        assert solve(task, row) == row["answer"]
        assert re.fullmatch(r"([a-z]+ )+\d\d", row["answer"])


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_program_defines_a_variable_before_it_is_copied(task):
    if task.name != "program_trace":
        pytest.skip("a log has no order to keep")
    for index in range(20):
        defined = set()
        for key, value in LIVE[task.name].findall(text_of(task.row("train", 1024, 0, index))):
            assert value.isdigit() or value in defined, f"{key} copies {value} before it exists"
            defined.add(key)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_each_question_has_a_decoy_for_every_stop(task):
    import random

    document = task.document(random.Random(1), 2048, "train")
    assert document.keys
    assert document.live.keys() == document.decoy.keys()
    for key in document.live:
        assert document.live[key] != document.decoy[key]
        assert document.trace(key) != document.trace(key, lambda: False)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_same_arguments_same_rows(task):
    rows = task.dataset("train", size=6, length=512, seed=5)
    assert rows.to_list() == task.dataset("train", size=6, length=512, seed=5).to_list()
    assert rows.to_list()[:3] == task.dataset("train", size=3, length=512, seed=5).to_list()
    prompts = [text_of(row) for row in rows]
    assert len(set(prompts)) == len(prompts)
    assert set(prompts).isdisjoint(text_of(row) for row in task.dataset("train", size=6, length=512, seed=6))
    assert rows.column_names == ["prompt", "answer", "key", "task"]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_no_fact_is_asked_in_both_splits(task):
    asked = {}
    for split in ("train", "heldout"):
        rows = [task.row(split, 320, seed, index) for seed in range(3) for index in range(200)]
        asked[split] = {(row["key"], row["answer"].split()[0]) for row in rows}
        assert all(pair_split(*pair) == split for pair in asked[split])
    assert asked["train"].isdisjoint(asked["heldout"])
    assert len(asked["heldout"]) > 100 and len(asked["train"]) > 100


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_length_may_be_counted_by_another_tokenizer(task):
    for length in (1024, 4096):
        row = task.row("train", length, 0, 0, count=lambda text: (len(text) + 1) // 2)
        assert abs(len(text_of(row)) / 2 - length) <= 0.05 * length


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(split="test"), "split='test': unknown split; choose one of train, heldout"),
        (dict(size=0), "size=0: a dataset needs at least 1 row"),
        (dict(length=100), "length=100: a prompt needs at least 192 tokens"),
        (dict(seed=-1), "seed=-1: must be 0 or more"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        TASKS[0].dataset(**arguments)


def test_unknown_task_is_named_with_the_known_ones():
    assert zoo.task("log_facts").name == "log_facts"
    with pytest.raises(ValueError, match="name='maze': unknown task; choose one of log_facts, program_trace"):
        zoo.task("maze")


ANSWER = "amber birch 17"


@pytest.mark.parametrize("completion", [ANSWER, f" {ANSWER}", f"{ANSWER} "])
def test_reward_accepts_the_answer(completion):
    reward = TASKS[0].reward
    assert reward(["p"], [completion], [ANSWER]) == [1.0]
    assert reward(["p"], [[{"role": "assistant", "content": completion}]], answer=[ANSWER], task=["x"]) == [1.0]


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "17",
        "amber 17",
        "birch amber 17",
        "amber birch 71",
        "amber birch 17 17",
        "Amber birch 17",
        "amber  birch 17",
        "amber, birch, 17",
        "amber birch 17.",
        "amber birch 17\n",
        "\namber birch 17",
        "Answer : amber birch 17",
        "amber birch 1",
        "amber birch 17 amber birch 17",
    ],
)
def test_reward_rejects_near_misses(completion):
    assert TASKS[0].reward(["p"], [completion], [ANSWER]) == [0.0]


def test_reward_goes_by_the_row():
    assert TASKS[1].reward(["p"] * 3, ["a 11", "b 12", "a 11"], ["a 11", "a 11", "b 12"]) == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="answer has 1 values for 2 completions"):
        TASKS[1].reward(["p"] * 2, ["a", "b"], ["a"])
