"""The strict maths reward: what must be accepted, what must be refused, and how it fails."""

import random
import threading
import time
from fractions import Fraction

import pytest

from longreach.rewards.equivalence import Comparator
from longreach.rewards.math import math_reward, numeric_reward
from longreach.rewards.result import InfrastructureError

REWARD = math_reward()


def pay(text, answer, prompt="What is it?", reward=REWARD):
    return reward(prompts=[prompt], completions=[text], answer=[answer])[0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"Adding up gives \boxed{42}.", "42"),
        (r"So $\boxed{x = 42}$", "42"),
        (r"\boxed{42} ... again, \boxed{42}", "42"),
        (r"<think>maybe \boxed{41}?</think> It is \boxed{42}", 42),
        ("<think>6*7</think><answer>42</answer>", "42"),
        (r"<answer>\boxed{42}</answer>", "42"),
        ("work\n#### 1,234", "1234"),
        (r"\boxed{1{,}234}", "1,234"),
        (r"\boxed{\dfrac{3}{4}}", "0.75"),
        (r"\boxed{-\frac{3}{4}}", r"-\frac34"),
        (r"\boxed{1\frac{1}{2}}", "3/2"),
        (r"\boxed{42\text{ cm}}", "42"),
        (r"\boxed{42^\circ}", "42"),
        (r"\boxed{\$42}", "42"),
        (r"\boxed{50\%}", r"50\%"),
        (r"\boxed{6.02 \times 10^{23}}", "6.02e23"),
        (r"\boxed{x^2+3x+2}", r"(x+1)(x+2)"),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}"),
        (r"\boxed{\{2, 5\}}", "5, 2"),
        (r"\boxed{x=3}", "x=3"),
        (r"\boxed{\left(1, 2\right)}", "(1,2)"),
        (r"\boxed{\text{Tuesday}}", "Tuesday"),
        (r"\boxed{(B)}", "B"),
        (r"\boxed{0.5x}", r"\frac{x}{2}"),
        (r"\boxed{x \le 3}", r"x \leq 3"),
        (r"\boxed{[-2, 7]}", r"x \in [-2,7]"),
        (r"\boxed{x \in [-2, 7]}", r"[-2,7]"),
        (r"\boxed{1\,000\,000}", "1000000"),
        (r"\boxed{10^6}", "1000000"),
        (r"\boxed{\pm 2}", "2, -2"),
        (r"\boxed{2, -2}", r"\pm 2"),
        (r"\boxed{7 \text{ and } 13}", "7, 13"),
        (r"\boxed{24 \text{ cubic meters}}", "24"),
        (r"\boxed{\begin{pmatrix}-7\\16\end{pmatrix}}", r"\begin{pmatrix} -7 \\ 16 \end{pmatrix}"),
        (r"\boxed{(3, 4), (1, -2)}", "(1,-2), (3,4)"),
        (r"\boxed{\frac{1}{\sqrt{3}}}", r"\frac{\sqrt{3}}{3}"),
        (r"\boxed{f(x) = x + 1}", "x+1"),
        (r"\boxed{42}", r"First 6*7, so \boxed{42}"),
        (r"\boxed{42}", "Six times seven\n#### 42"),
    ],
)
def test_right_answers_are_paid(text, answer):
    assert pay(text, answer) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is not 42", "42"),
        ("The answer is 42", "42"),
        (r"The answer is not \boxed{42}", "42"),
        (r"It isn't equal to $\boxed{42}$", "42"),
        (r"x \neq \boxed{42}", "42"),
        (r"\boxed{x=41=42}", "42"),
        (r"\boxed{41=42}", "42"),
        (r"\boxed{42=42}", "42"),
        (r"\boxed{x=x+42-x}", "42"),
        (r"\boxed{41} \boxed{42}", "42"),
        (r"<answer>41</answer> \boxed{42}", "42"),
        (r"\boxed{41 \text{ or } 42}", "42"),
        (r"\boxed{41, 42}", "42"),
        (r"\boxed{\{40, 41, 42\}}", "42"),
        (r"\boxed{[0, 100]}", "42"),
        (r"\boxed{x > 0}", "42"),
        (r"\boxed{\pm 42}", "42"),
        (r"\boxed{42?}", "42"),
        (r"\boxed{\approx 42}", "42"),
        (r"\boxed{6 \times 7}", "42"),
        (r"\boxed{42.0000001}", "42"),
        (r"\boxed{0.333333}", r"\frac{1}{3}"),
        (r"\boxed{0.785398163397}", r"\frac{\pi}{4}"),
        (r"\boxed{42 kg}", r"42\text{ cm}"),
        (r"\boxed{41\boxed{42}}", "42"),
        (r"\boxed{42", "42"),
        (r"\boxed{}", "42"),
        (r"<think>\boxed{42}</think>", "42"),
        (r"<think>it is \boxed{42}", "42"),
        (r"\boxed{x}", "42"),
        (r"\boxed{\text{the correct answer}}", "Tuesday"),
        (r"\boxed{\text{not Tuesday}}", "Tuesday"),
        (r"\boxed{(2, 1)}", "(1, 2)"),
        (r"\boxed{[1, 2]}", "(1, 2)"),
        (r"\boxed{1, 2, 3}", "1, 2"),
        (r"\boxed{9^{999}}", "42"),
        (r"\boxed{x \in \mathbb{R}}", "[-2, 7]"),
        (r"\boxed{1 \pm 2}", "2, -2"),
        (r"\boxed{41 \text{ and } 42}", "42"),
        (r"\boxed{1,00,0}", "1000"),
        (r"\boxed{(1, 2)}", "1, 2"),
        (r"\boxed{x^2=x^2+3x+2}", "x^2+3x+2"),
        (r"\boxed{\sqrt{2} \approx 1.41}", r"\sqrt{2}"),
        (r"\boxed{x=\sqrt{3}=\sqrt{2}}", r"\sqrt{2}"),
        (r"\boxed{x+1\boxed{x+2}}", "x+2"),
        (r"\boxed{0.78539816339744830961566}", r"\frac{\pi}{4}"),
        (r"\boxed{x < 3}", r"x \le 3"),
        (r"\boxed{1e999999999}", "42"),
        (r"\boxed{٤٢}", "42"),
        ("", "42"),
    ],
)
def test_tricks_are_not_paid(text, answer):
    assert pay(text, answer) == 0.0


def test_an_echo_of_the_prompt_is_no_answer():
    assert pay(r"\boxed{(x+1)(x+2)}", "x^2+3x+2", prompt="Expand $(x+1)(x+2)$.") == 0.0
    assert pay(r"\boxed{(x+1)(x+2)}", "x^2+3x+2", prompt="Which polynomial has the roots -1 and -2?") == 1.0
    assert pay(r"\boxed{2^{10}}", "1024", prompt="What is $2^{10}$?") == 0.0
    assert pay(r"\boxed{2^{10}}", "1024", prompt="How many subsets has a set of ten?") == 1.0


def test_the_answer_is_the_assistants_last_message():
    chat = [
        {"role": "tool", "content": r"\boxed{42}"},
        {"role": "assistant", "content": r"\boxed{41}"},
    ]
    assert pay(chat, "42") == 0.0
    assert pay([{"role": "assistant", "content": r"\boxed{42}"}], "42") == 1.0


@pytest.mark.parametrize("tower", ["9^{9^{9^{9}}}", "9^9^9^9", "10000000!!", r"\sum_{k=1}^{10^{12}} k^k"])
def test_bombs_cost_their_own_answer_only(tower):
    reward = math_reward(seconds=1.0)
    pay(r"\boxed{\sqrt{2}}", r"\sqrt{2}+0", reward=reward)  # starts the process
    start = time.monotonic()
    assert pay(rf"\boxed{{{tower}}}", r"\sqrt{2}", reward=reward) == 0.0
    assert time.monotonic() - start < 10
    assert pay(r"\boxed{\sqrt{8}}", r"2\sqrt{2}", reward=reward) == 1.0


def test_works_off_the_main_thread():
    paid = []
    thread = threading.Thread(target=lambda: paid.append(pay(r"\boxed{\sqrt{12}}", r"2\sqrt{3}")))
    thread.start()
    thread.join(60)
    assert paid == [1.0]


def test_a_killed_comparison_process_is_replaced():
    comparator = Comparator()
    assert comparator.compare("x+y", "y+x").verdict == "equal"
    comparator._process.stdout.close()  # a reply that cannot be read, from a process that still runs
    assert comparator.compare("x+y+z", "y+z+x").verdict == "equal"
    comparator._process.kill()
    comparator._process.wait()
    assert comparator.compare("x+z", "z+x").verdict == "equal"
    comparator.close()


def test_a_process_that_cannot_start_is_an_infrastructure_error(monkeypatch, tmp_path):
    broken = tmp_path / "worker.py"
    broken.write_text("raise SystemExit(3)")
    monkeypatch.setattr("longreach.rewards.equivalence._WORKER", broken)
    with pytest.raises(InfrastructureError, match="failed twice"):
        Comparator().compare("x", "y")


def test_numeric_reward_is_exact_or_within_an_exact_tolerance():
    exact, loose = numeric_reward(), numeric_reward(relative_tolerance="0.01")
    assert pay(r"\boxed{0.1}", "1/10", reward=exact) == 1.0
    assert pay(r"\boxed{0.3333}", Fraction(1, 3), reward=exact) == 0.0
    assert pay(r"\boxed{101}", "100", reward=loose) == 1.0
    assert pay(r"\boxed{101.0001}", "100", reward=loose) == 0.0
    with pytest.raises(ValueError, match="number literal"):
        pay(r"\boxed{x}", "x+1", reward=exact)


def test_errors_name_the_column_and_what_is_needed():
    with pytest.raises(ValueError, match="solution: the dataset has no such column"):
        math_reward(answer="solution")(prompts=[""], completions=[""], answer=["1"])
    with pytest.raises(ValueError, match="2 values for 1 completions"):
        REWARD(prompts=[""], completions=[""], answer=["1", "2"])
    with pytest.raises(ValueError, match="answer: got None"):
        pay(r"\boxed{1}", None)
    with pytest.raises(ValueError, match="no single final answer"):
        pay(r"\boxed{1}", r"\boxed{1} or \boxed{2}")
    with pytest.raises(ValueError, match="must pay more"):
        math_reward(right=0.0)
    with pytest.raises(ValueError, match="slot: got 'last'"):
        math_reward(slot="last")


def test_results_say_why():
    (result,) = REWARD.grade(prompts=["?"], completions=[r"\boxed{1} \boxed{2}"], answer=["2"])
    assert (result.status, result.reason) == ("wrong", "2 different final answers")


@pytest.mark.parametrize(
    "text",
    [
        "#### 4" + " " * 300_000 + "x",
        r"\boxed{42}" * 30_000,
        r"\boxed{" * 100_000,
        r"\boxed" + " " * 300_000,
        "<answer>" * 100_000,
        "not " * 100_000 + r"\boxed{41}",
        r"\boxed{" + "1e" * 190 + "}",
        r"\boxed{" + "(" * 390 + "}",
        "<think>" * 50_000 + "</think>" * 50_000,
    ],
)
def test_long_completions_take_no_long_time(text):
    start = time.monotonic()
    paid = pay(text, "42"), pay(text, "x+y")
    assert time.monotonic() - start < 15
    assert paid[0] == (1.0 if text.startswith(r"\boxed{42}") else 0.0)


def test_random_completions_never_raise():
    rng = random.Random(0)
    tokens = [
        *[
            r"\boxed{",
            r"}",
            r"{",
            r"\frac",
            r"{",
            r"}",
            r"1",
            r"2",
            r"42",
            r"=",
            r",",
            r"(",
            r")",
            r"[",
            r"]",
            r"\{",
            r"\}",
            r"^",
            r"_",
            r"x",
            r"y",
            r"\pm",
            r"\text{",
            r"or",
            r"}",
            r".",
            r"-",
            r"+",
            r"/",
            r"\sqrt",
            r"<",
            r">",
            r"$",
            r"\%",
            r"\in",
            r"\\",
        ]
    ]
    for i in range(400):
        text = r"\boxed{" + " ".join(rng.choices(tokens, k=rng.randint(1, 12))) + "}" * rng.randint(0, 2)
        assert pay(text, "1237" if i % 20 else r"\sqrt{1237}+x") == 0.0, text
