"""Follow a variable through a long program: by which variables does it get its value, and what is that value?"""

from __future__ import annotations

import random
from collections.abc import Sequence

from longreach.zoo.task import Link, Task
from longreach.zoo.words import FUNCTIONS, NUMBERS, VARIABLES


def _build_links(rng: random.Random, size: int) -> tuple[list[Link], list[str]]:
    """A third of the variables are numbers, a third are copies of those, a third are copies of copies.

    A variable is defined before the line that copies it, as a program has to.
    """
    names = rng.sample(VARIABLES, 3 * size)
    numbers, copies, second_copies = names[:size], names[size : 2 * size], names[2 * size :]
    placed: list[tuple[float, Link]] = []
    defined: dict[str, float] = {}
    for keys, sources in ((numbers, list(NUMBERS)), (copies, numbers), (second_copies, copies)):
        for key in keys:
            value, wrong = rng.sample(sources, 2)
            defined[key] = rng.uniform(defined.get(value, 0.0), 1.0)
            placed.append((defined[key], Link(key, value, live=True)))
            placed.append((rng.random(), Link(key, wrong, live=False)))
    placed.sort(key=lambda entry: entry[0])
    return [link for _, link in placed], second_copies


def _write_link(link: Link) -> str:
    return f"{'let' if link.live else '# let'} {link.key} = {link.value}"


def _write_filler(rng: random.Random, links: Sequence[Link]) -> str:
    number, other = rng.choice(NUMBERS), rng.choice(NUMBERS)
    function, name = rng.choice(FUNCTIONS), rng.choice(links).key
    return rng.choice(
        (
            f"call {function} ( {number} )",
            f"call {function} ( {number} , {other} )",
            f"call {function} ( {name} )",
            f"# step {number} of {other}",
            f"wait {number} ms",
            f"if ready then {function} ( {number} )",
            f"repeat {number} times {function} ( {other} )",
            "# nothing to do here",
        )
    )


PROGRAM_TRACE = Task(
    name="program_trace",
    description="Follow a variable through the copies of a long program to its number, ignoring what is commented out.",
    intro="Program :",
    question=lambda key: f"Question : name the variables and the number behind {key}",
    build_links=_build_links,
    write_link=_write_link,
    write_filler=_write_filler,
    stamp=lambda share: "",
)
