"""Find and combine facts scattered through a long log: the host a service joined, and the port that host opened.

The decoys are a host the service left and a port the host closed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from longreach.zoo.task import Link, Task
from longreach.zoo.words import HOSTS, NUMBERS, SERVICES, USERS


def _build_links(rng: random.Random, size: int) -> tuple[list[Link], list[str]]:
    services = rng.sample(SERVICES, size)
    hosts = rng.sample(HOSTS, 2 * size)
    links = []
    for place, service in enumerate(services):
        links.append(Link(service, hosts[2 * place], live=True))
        links.append(Link(service, hosts[2 * place + 1], live=False))
    for host in hosts:
        opened, closed = rng.sample(NUMBERS, 2)
        links.append(Link(host, opened, live=True))
        links.append(Link(host, closed, live=False))
    rng.shuffle(links)
    return links, services


def _write_link(link: Link) -> str:
    if link.value in NUMBERS:
        return f" {link.key} {'opened' if link.live else 'closed'} {link.value}"
    return f" {link.key} {'joined' if link.live else 'left'} {link.value}"


def _write_filler(rng: random.Random, links: Sequence[Link]) -> str:
    number, other = rng.choice(NUMBERS), rng.choice(NUMBERS)
    user, name = rng.choice(USERS), rng.choice(links).key
    return rng.choice(
        (
            f" user {user} read page {number}",
            f" user {user} saved file {number} in {other} ms",
            f" warning : queue has {number} jobs",
            f" cache missed {number} of {other} keys",
            f" backup finished in {number} seconds",
            f" garbage collected , {number} mb free",
            f" request from {user} took {number} ms",
            f" {name} is healthy",
            f" disk check passed after {number} seconds",
        )
    )


def _stamp(share: float) -> str:
    minute = int(share * 24 * 60)
    return f"{minute // 60:02d}:{minute % 60:02d}"


LOG_FACTS = Task(
    name="log_facts",
    description="Find the host a service joined and the port that host opened, two facts far apart in a long log.",
    intro="Log of one day :",
    question=lambda key: f"Question : name the host joined and the port opened for {key}",
    build_links=_build_links,
    write_link=_write_link,
    write_filler=_write_filler,
    stamp=_stamp,
)
