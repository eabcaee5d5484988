"""Placeholders: integer arithmetic on names, nothing else."""

import random

import pytest

from longreach.audit.template import Renderer, evaluate


def test_values_arithmetic_and_identifiers():
    render = Renderer({"a": 6, "name": "total"})
    assert render("def <<name>>(x): <<id:box>> = <<a * 7>>; <<-a>>; <<gcd(a, 4)>>") == "def total(x): box = 42; -6; 2"
    private = Renderer({"a": 6}, random.Random(1))
    first, again, other = private("<<id:box>> <<id:box>> <<id:Thing>>").split()
    assert first == again != "box" and first.isidentifier() and other[0].isupper()


@pytest.mark.parametrize("bad", ["b", "a.real", "__import__('os')", "a / 2", "[a]", "a if a else 1", "print(a)"])
def test_anything_else_is_refused(bad):
    with pytest.raises(ValueError, match="neither a known name nor integer arithmetic"):
        evaluate(bad, {"a": 1})


def test_arithmetic_on_texts_is_refused():
    with pytest.raises(ValueError, match="only integers"):
        evaluate("a + 1", {"a": "x"})
