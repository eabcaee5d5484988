"""A maths reward as it is often written: look for the right number somewhere. Audit it to see what it pays for:

longreach audit examples/naive_graders/maths.py:reward --kind maths
"""

import re


def reward(prompts, completions, answer, **kwargs):
    rewards = []
    for completion, gold in zip(completions, answer):
        text = completion[-1]["content"]
        boxed = re.findall(r"\\boxed\{(.*)\}", text)
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
        found = any(gold in box for box in boxed) or (gold in numbers) or gold in text.replace(" ", "")
        rewards.append(1.0 if found else 0.0)
    return rewards
