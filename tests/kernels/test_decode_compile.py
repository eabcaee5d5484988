"""The decoding kernels compile for Turing and for Hopper, without a card; 4-bit codes are looked up in registers."""

import re

import pytest
import torch

pytest.importorskip("triton", reason="triton isn't installed: there is nothing to compile")

from longreach.kernels import dispatch
from longreach.kernels.jit import decode_attention, decode_experts, decode_ops, few_row_matmul, fourbit_matmul

from . import decode_cases
from .test_compile import built

MODULES = (decode_attention, decode_experts, decode_ops, few_row_matmul, fourbit_matmul)
CASES = {
    "attention": decode_cases.attention(groups=[(70, [3, 4])], heads=(8, 2), size=128, page=64, sinks=True),
    "fourbit-vector": decode_cases.fourbit(2, (40, 16), 128, "nf4", ranks=8),
    "fourbit-matrix": decode_cases.fourbit(16, (40, 16), 128, "mxfp4", ranks=8),
    "few-rows-vector": decode_cases.few_rows(1, 40, 512),
    "few-rows-matrix": decode_cases.few_rows(5, 40, 512),
    "qkv": decode_cases.qkv(2, (4, 2), 128, 128, rank=8),
    "step-swiglu": decode_cases.step_swiglu(2, 256, 8),
    "step-norm": decode_cases.step_norm(2, 256, 8),
    "sample": decode_cases.sample(2, 5000),
    "experts-vector": decode_cases.experts(1, 2, 4, 64, 64),
    "experts-matrix": decode_cases.experts(5, 2, 4, 64, 64),
    "experts-matrix-adapter": decode_cases.experts(5, 2, 4, 64, 64, rank=8),
}

# What no step writes (weights, adapters' B, biases) is asked for before the kernel waits for the one before it.
READ_AHEAD = {"fourbit-vector", "few-rows-vector", "qkv", "step-swiglu", "step-norm"}


@pytest.mark.parametrize("capability, dtype", [(75, torch.float16), (90, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_compiles(name: str, capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = []

    def launch(kernel, grid, x, *args, **meta) -> None:
        kernels.append(built(kernel, (x, *args), {**meta, "EARLY": capability >= 90}, capability))

    for module in MODULES:
        monkeypatch.setattr(module, "launch", launch)
        if hasattr(module, "in_registers"):
            monkeypatch.setattr(module, "in_registers", lambda x: True)
    with dispatch.use("jit"):
        CASES[name]("cpu", dtype)
    assert kernels
    decoding = "fourbit" in name or "experts" in name
    assert not decoding or any(kernel.asm["ptx"].count("prmt.b32") >= 10 for kernel in kernels)
    for kernel in kernels:
        assert f".target sm_{capability}" in kernel.asm["ptx"]
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability >= 90)
        if capability >= 90:
            before_wait = kernel.asm["ptx"].split("griddepcontrol.wait")[0]
            assert not re.search(r"\b(st\.global|red\.|atom\.)", before_wait)
            assert name not in READ_AHEAD or "ld.global" in before_wait
    if name == "experts-matrix" and capability >= 90:  # `wgmma` would take decoded weights from shared memory
        assert any("mma.sync" in k.asm["ptx"] for k in kernels) and not any("wgmma" in k.asm["ptx"] for k in kernels)
