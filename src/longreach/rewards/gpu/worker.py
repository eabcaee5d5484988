"""One kernel's process: load a source, run it on inputs drawn from seeds, send outputs back. Started by path; needs torch.

Two kinds run the same file: one holds the candidate, and nothing that it says is believed; the other holds the baseline and the
truth, and judges the candidate's bytes. The protocol is the sandbox's: nonces, lengths, restricted JSON with raw blobs.
"""

from __future__ import annotations

import gc
import os
import sys
import types
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "sandbox"))
import torch
from child import codec  # type: ignore[import-not-found]
from child.wire import FAILED, HEADER, LENGTH, NONCE_BYTES, OK, read_exactly, write_all

sys.path.pop(0)
CPU_FLUSH_BYTES = 1 << 20  # the CPU is for trying things out
MIX_ELEMENTS = 1 << 18


def load(source: str, name: str) -> types.ModuleType:
    """Run a source as a module that has a file, because Triton reads the source of its kernels from there."""
    import importlib.util

    path = os.path.join(os.getcwd(), f"{name}.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def mix(outputs: list[torch.Tensor], seed: int) -> torch.Tensor:
    """Many outputs as one small tensor (float32): secret-weighted sums of a nonlinear function of every element.

    Summed over the outputs, then over stretches of `MIX_ELEMENTS`, so that sending it takes little beside computing it. The
    nonlinearity is there so that no algebra yields the mix without yielding every element of every output.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(len(outputs), generator=generator).tolist()
    total = torch.zeros_like(outputs[0], dtype=torch.float32)
    for weight, output in zip(weights, outputs, strict=True):
        total.add_(torch.tanh(output.to(torch.float32)), alpha=weight)
    if total.numel() <= MIX_ELEMENTS:
        return total
    flat = total.reshape(-1)
    rows = torch.nn.functional.pad(flat, (0, -len(flat) % MIX_ELEMENTS)).view(-1, MIX_ELEMENTS)
    return (torch.randn(len(rows), 1, generator=generator).to(rows.device) * rows).sum(0)


class Worker:
    """Holds the recipe's functions by role: ``candidate`` or ``baseline``, ``truth``, ``idle``."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.functions: dict[str, Any] = {}
        self.make_inputs: Any = None
        size = CPU_FLUSH_BYTES
        if self.device.type == "cuda":
            size = 2 * torch.cuda.get_device_properties(self.device).L2_cache_size
        self.flush = torch.empty(size, dtype=torch.uint8, device=self.device)

    def setup(self, inputs: str) -> None:
        self.make_inputs = load(inputs, "recipe_inputs").make_inputs

    def add(self, role: str, source: str, function: str) -> None:
        found = getattr(load(source, f"kernel_{role}"), function)
        if not callable(found):
            raise TypeError(f"{function} is not callable")
        self.functions[role] = found

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def inputs(self, seed: int, sizes: dict[str, int]) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator(self.device).manual_seed(seed)
        return tuple(self.make_inputs(generator, self.device, **sizes))

    def poison(self, like: torch.Tensor | None) -> None:
        """Fill the memory that the next allocation will get, so that what is not written shows; and empty the cache."""
        if like is not None and like.is_floating_point():
            torch.full_like(like, float("nan"))
        self.flush.fill_(1)

    def run(self, role: str, seeds: list[int], sizes: dict[str, int], mix_seed: int) -> torch.Tensor:
        """The output for one seed, or the mix of the outputs for several, in the CPU's memory."""
        function = self.functions[role]
        outputs: list[torch.Tensor] = []
        for seed in seeds:
            args = self.inputs(seed, sizes)
            self.poison(outputs[-1] if outputs else None)
            output = function(*args)
            outputs.append(output.float() if role == "truth" and len(seeds) > 1 else output)  # all wait for the mix
        self.synchronize()
        result = outputs[0] if len(outputs) == 1 else mix(outputs, mix_seed)
        return result.detach().cpu().contiguous()

    def judge(self, said: dict[str, Any], seeds: list[int], sizes: dict[str, int], mix_seed: int) -> dict[str, Any]:
        """Errors against the truth, of the candidate's bytes and of the baseline: (rms, max), and what else is wrong."""
        baseline = self.run("baseline", seeds, sizes, mix_seed)
        if said["dtype"] != str(baseline.dtype) or list(said["shape"]) != list(baseline.shape):
            wanted = f"{baseline.dtype} {list(baseline.shape)}"
            return {"problem": f"the output is {said['dtype']} {list(said['shape'])}; it must be {wanted}"}
        data = said["data"]
        if len(data) != baseline.numel() * baseline.element_size():
            return {"problem": "the output has another number of bytes than it says"}
        got = torch.frombuffer(bytearray(data), dtype=baseline.dtype).reshape(baseline.shape) if data else baseline
        if not bool(torch.isfinite(got.float()).all()):
            return {"problem": "the output is not finite everywhere (memory that was never written is poisoned)"}
        truth = self.run("truth", seeds, sizes, mix_seed).double()
        errors = {}
        for name, value in (("candidate", got), ("baseline", baseline)):
            difference = (value.double() - truth).abs()
            rms = difference.square().mean().sqrt() if difference.numel() else difference.sum()
            errors[name] = [float(rms), float(difference.max()) if difference.numel() else 0.0]
        scale = float(truth.abs().max()) if truth.numel() else 0.0
        return {"problem": "", "scale": scale, "epsilon": float(torch.finfo(baseline.dtype).eps), **errors}


def _describe(tensor: torch.Tensor) -> dict[str, Any]:
    raw = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "data": raw.numpy()}


def answer(worker: Worker, request: dict[str, Any]) -> Any:
    operation = request["op"]
    if operation == "setup":
        return worker.setup(request["inputs"])
    if operation == "add":
        return worker.add(request["role"], request["source"], request["function"])
    batch = (request["seeds"], request["sizes"], request["mix_seed"])
    if operation == "run":
        tensor = worker.run(request["role"], *batch)
        if type(tensor) is not torch.Tensor:
            raise TypeError(f"the kernel returned a {type(tensor).__name__}; it must return a torch.Tensor")
        return _describe(tensor)
    said = request["said"]
    data = said["data"]
    return worker.judge({**said, "data": data.tobytes() if hasattr(data, "tobytes") else b""}, *batch)


def main() -> None:
    """``worker.py FD DEVICE``: serve requests until the socket closes."""
    fd = int(sys.argv[1])
    torch.set_num_threads(1)
    worker = Worker(sys.argv[2])
    worker.synchronize()
    gc.freeze()  # torch's own objects are many: a collection in the middle of a batch would count as the kernel's time
    while True:
        try:
            nonce = bytes(read_exactly(fd, NONCE_BYTES))
            (length,) = LENGTH.unpack(read_exactly(fd, LENGTH.size))
            payload = read_exactly(fd, length)
        except EOFError:
            return
        try:
            body, status = codec.encode(answer(worker, codec.decode(payload))), OK
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"[:500]
            body, status = codec.encode({"error": text}), FAILED
        write_all(fd, HEADER.pack(nonce, status, len(body)) + body)


if __name__ == "__main__":
    main()
