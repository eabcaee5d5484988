"""Format, length and text rewards pay only with a right answer."""

import pickle

import pytest

from longreach.rewards.math import math_reward, numeric_reward
from longreach.rewards.text import format_reward, length_reward, text_reward

RIGHT = "<think>6*7 is 42</think><answer>42</answer>"
WRONG = "<think>6*7 is 41</think><answer>41</answer>"


def pay(reward, *completions, **columns):
    return reward(prompts=["6*7?"] * len(completions), completions=list(completions), **columns)


def test_format_pays_only_with_the_right_answer():
    reward = format_reward(math_reward())
    no_tags, empty_work = r"\boxed{42}", "<think> </think><answer>42</answer>"
    twice, after = RIGHT + RIGHT, RIGHT + "P.S."
    paid = pay(reward, RIGHT, WRONG, no_tags, empty_work, twice, after, answer=["42"] * 6)
    assert paid == [0.2, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_format_styles():
    assert pay(format_reward(style="boxed"), r"\boxed{42}", r"\boxed{42} \boxed{42}", answer=["42"] * 2) == [0.2, 0.0]
    think = format_reward(style="think", min_work_chars=5)
    assert pay(think, "<think>a+b+c</think>\n\\boxed{42}", "<think>a</think>\n\\boxed{42}", answer=["42"] * 2) == [
        0.2,
        0,
    ]


def test_length_pays_only_with_the_right_answer():
    reward = length_reward(full_until=10, zero_from=30, unit="chars")
    texts = [r"\boxed{42}", r"\boxed{41}", "x" * 10 + r"\boxed{42}", "x" * 90 + r"\boxed{42}"]
    assert pay(reward, *texts, answer=["42"] * 4) == pytest.approx([0.2, 0.0, 0.1, 0.0])
    tokens = length_reward(full_until=10, zero_from=30)
    assert pay(tokens, texts[0], answer=["42"], completion_ids=[[1] * 20]) == pytest.approx([0.1])
    with pytest.raises(ValueError, match="completion_ids: not given"):
        pay(tokens, texts[0], answer=["42"])


def test_a_quarantined_gate_stays_quarantined_and_errors_pass():
    assert pay(format_reward(lambda **_: [None]), RIGHT) == [None]

    def broken(**_):
        raise RuntimeError("no judge")

    with pytest.raises(RuntimeError, match="no judge"):
        pay(format_reward(broken), RIGHT)
    with pytest.raises(ValueError, match="returned 0 rewards for 1"):
        pay(format_reward(lambda **_: []), RIGHT)


def test_text_reward_wants_the_reference_and_nothing_else():
    reward = text_reward()
    texts = [r"\boxed{Paris}", "<answer>the  PARIS</answer>", "Paris", r"\boxed{Paris or London}", r"\boxed{Not Paris}"]
    answers = ["Paris", ["Lutetia", "The Paris"], "Paris", "Paris", "Paris"]
    assert pay(reward, *texts, answer=answers) == [1.0, 1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="answer: got 3"):
        pay(reward, r"\boxed{3}", answer=[3])


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="style: got 'xml'"):
        format_reward(style="xml")
    with pytest.raises(ValueError, match="zero_from: got 5"):
        length_reward(full_until=10, zero_from=5)
    with pytest.raises(ValueError, match="pays: got 0"):
        format_reward(pays=0)
    with pytest.raises(ValueError, match="gate: got 3"):
        format_reward(3)


def test_rewards_have_the_names_they_are_logged_under():
    made = [math_reward(), numeric_reward(), text_reward(), format_reward(), length_reward(full_until=1, zero_from=2)]
    names = ["math_reward", "numeric_reward", "text_reward", "format_reward", "length_reward"]
    assert [reward.__name__ for reward in made] == names
    assert pay(pickle.loads(pickle.dumps(math_reward())), r"\boxed{42}", answer=["42"]) == [1.0]
