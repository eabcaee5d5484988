"""The PTX that makes bf16 weights of MXFP4 codes, step by step: Triton's interpreter has no PTX."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="triton isn't installed: there are no kernels")

from longreach.kernels.jit.fourbit_codes import E2M1_TIMES_SCALE
from longreach.kernels.reference import E2M1_VALUES

WORD = 0xFFFFFFFF


def permute(low: int, high: int, selector: int) -> int:
    """`prmt`: a nibble of the selector picks a byte, or with its high bit the byte's sign."""
    picked = (low | high << 32).to_bytes(8, "little")
    nibbles = [selector >> 4 * i & 15 for i in range(4)]
    return int.from_bytes(bytes((picked[n & 7] >> 7) * 255 if n & 8 else picked[n] for n in nibbles), "little")


def bf16(bits: int) -> torch.Tensor:
    return torch.tensor(bits - (bits >> 15 << 16), dtype=torch.int16).view(torch.bfloat16)


def products(x: int, y: int) -> int:
    """`mul.rn.bf16x2`."""
    halves = [bf16(x >> h & 0xFFFF) * bf16(y >> h & 0xFFFF) for h in (0, 16)]
    low, high = (int(p.view(torch.int16)) & 0xFFFF for p in halves)
    return low | high << 16


OPERATIONS: dict[str, Callable[..., int]] = {
    "prmt.b32": permute,
    "mul.rn.bf16x2": products,
    "and.b32": lambda x, y: x & y,
    "or.b32": lambda x, y: x | y,
    "xor.b32": lambda x, y: x ^ y,
    "shl.b32": lambda x, n: x << n & WORD,
    "shr.u32": lambda x, n: x >> n,
    "mov.b32": lambda x: x,
    "mov.u32": lambda x: x,
}


def run(word: int, scale: int, lanes: int) -> list[float]:
    """The eight results, in a thread whose lanes below are `lanes`."""
    registers, results = {"$8": word, "$9": scale, "%lanemask_lt": lanes}, {}
    for line in re.sub(r"^\{ \.reg[^;]*;|\}$", "", E2M1_TIMES_SCALE.value).split(";"):
        operation, *operands = re.findall(r"[^\s,{}]+", line) or [""]
        if line.strip().startswith("mov.b32 {"):
            low, high, source = operands
            results[low], results[high] = registers[source] & 0xFFFF, registers[source] >> 16
        elif operation:
            values = [registers[o] if o in registers else int(o, 0) for o in operands[1:]]
            registers[operands[0]] = OPERATIONS[operation](*values)
    return [float(bf16(results[f"${i}"])) for i in range(8)]


@pytest.mark.parametrize("exponent", [0, 1, 5, 118, 127, 130, 254])
def test_codes_become_weights(exponent: int) -> None:
    draw = random.Random(exponent)
    pair = max(exponent * 0x00800080, 0x00400040)  # as `code_tile` makes it
    for word in [0x76543210, 0xFEDCBA98, *(draw.getrandbits(32) for _ in range(40))]:
        exact = [E2M1_VALUES[word >> 4 * i & 15] * 2.0 ** (exponent - 127) for i in range(8)]
        assert run(word, pair, lanes=draw.getrandbits(31)) == [float(torch.tensor(x).bfloat16()) for x in exact]
