"""Every kernel compiles for the oldest and the newest card it is meant for, Turing and Hopper, without having one."""

import pytest
import torch

pytest.importorskip("triton", reason="triton isn't installed: there is nothing to compile")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from longreach import kernels
from longreach.kernels import dispatch, jit
from longreach.kernels.jit import dequant, experts, grouped, logprob, merge, norm, rope, swiglu

from . import cases

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}
OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion"}
CASES = {
    "norm": cases.norm(2, 2560, False),
    "rope": cases.rope(2, 128, 128, (32, 8), True),
    "rope-partial": cases.rope(2, 96, 64, (32, 8), False),
    "swiglu": cases.swiglu(2, 9728, "silu"),
    "merge": cases.merge(3, 3, 128, False),
    "experts": cases.experts(2, 2, 4, 2880, kernels.Gating(True, 7.0, 1.702), True),
    "low-rank": cases.low_rank(70, 4, 5760, 32),
    "dequant-nf4": cases.dequant("nf4", (4, 256)),
    "dequant-mxfp4": cases.dequant("mxfp4", (4, 256)),
    "logprob": cases.logprob(2, 20_000, 1.0, 30.0, True),
}


def built(kernel, args, meta: dict, capability: int):
    """`kernel` compiled as a launch with these arguments would do it."""
    signature, constants, aligned = {}, {}, {}
    given = iter(args)
    for parameter in kernel.params:
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = meta[parameter.name]
            continue
        value = next(given)
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            multiple = value.data_ptr() % 16 == 0
        else:
            signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
            multiple = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
        if multiple:
            aligned[(parameter.num,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {name: meta[name] for name in OPTIONS & meta.keys()}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability, dtype", [(75, torch.float16), (90, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_compiles(name: str, capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = []

    def launch(kernel, grid, x, *args, **meta) -> None:
        kernels.append(built(kernel, (x, *args), meta, capability))

    for module in (jit, dequant, experts, grouped, logprob, merge, norm, rope, swiglu):
        monkeypatch.setattr(module, "launch", launch)
    with dispatch.use("jit"):
        CASES[name]("cpu", dtype)
    assert kernels
    for kernel in kernels:
        ptx = kernel.asm["ptx"]
        assert f".target sm_{capability}" in ptx
        # Wide rows move in 16-byte accesses: what memory-bound kernels live on. The join reads a few numbers a row.
        assert ".v4." in ptx or kernel.name == "_join_kernel", kernel.name
