"""Two processes (gloo, DDP) equal one with twice the rows."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.multiprocessing as mp

from . import two_processes
from .two_processes import CASES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every case, trained by two processes that are started once."""
    path = tmp_path_factory.mktemp("two")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(two_processes.worker, args=(2, port, str(path)), nprocs=2)
    return path


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one_with_twice_the_rows(name, folder):
    one = two_processes.result(two_processes.train(name, 1, str(folder)))
    two = torch.load(folder / f"{name}.pt", weights_only=True)
    assert len(one["steps"]) == 3
    for x, y in zip(one["steps"], two["steps"]):
        for key in x:
            assert y[key] == pytest.approx(x[key], rel=1e-5, abs=1e-5), key
    for key, p in one["parameters"].items():
        assert (two["parameters"][key] - p).abs().max() <= 1e-5, key
    if name == "one process skips all":
        assert one["steps"][0]["skipped/rows"] >= 0.5
