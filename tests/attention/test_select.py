"""Which backend a call gets, and what is said about those passed over; GPUs are faked, no kernel runs."""

from __future__ import annotations

import sys

import pytest
import torch

from longreach.attention import explain, select
from longreach.attention.boundaries import deterministic_kernels, longest, on_device

SELECT = sys.modules["longreach.attention.select"]  # the package also holds a function of this name
NAMES = ["flash-attn-4", "aten-cudnn", "aten-flash", "aten-efficient", "reference"]


@pytest.fixture
def gpu(monkeypatch):
    """A function that makes the card one of a given compute capability, with flash-attn-4 installed or not."""
    from longreach.attention import aten_cuda, flash4

    def choose(capability, installed=True):
        reason = None if installed else "is not installed (pip install 'longreach[gpu]')"
        for module in (aten_cuda, flash4):
            monkeypatch.setattr(module, "capability", lambda device: capability)
        monkeypatch.setattr(flash4, "_kernels", lambda: (object(), reason))
        monkeypatch.setattr(SELECT, "_chosen", {})
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        return torch.device("cuda", 0)

    return choose


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    "capability, installed, dtype, size, features, expected",
    [
        ((9, 0), True, BF16, 128, {}, "flash-attn-4"),
        ((9, 0), True, BF16, 256, {"windowed": True, "softcap": 30.0}, "flash-attn-4"),
        ((9, 0), True, BF16, 192, {"value_dim": 128}, "flash-attn-4"),
        ((9, 0), True, FP32, 128, {}, "aten-efficient"),
        ((9, 0), True, torch.float64, 128, {}, "reference"),
        ((9, 0), False, BF16, 128, {}, "aten-cudnn"),
        ((9, 0), False, BF16, 128, {"windowed": True}, "aten-flash"),
        ((9, 0), False, BF16, 128, {"varlen": True}, "aten-flash"),
        ((9, 0), False, BF16, 256, {}, "aten-flash"),
        ((9, 0), False, BF16, 128, {"softcap": 30.0}, "reference"),
        ((10, 0), True, BF16, 160, {}, "aten-flash"),
        ((10, 0), True, BF16, 256, {}, "flash-attn-4"),
        ((12, 0), True, BF16, 128, {}, "aten-flash"),
        ((8, 9), True, FP16, 128, {}, "aten-flash"),
        ((8, 0), True, BF16, 288, {}, "aten-efficient"),
        ((7, 5), True, FP16, 128, {"windowed": True}, "aten-efficient"),
        ((7, 5), True, BF16, 128, {}, "reference"),
        ((6, 1), True, FP16, 128, {}, "reference"),
    ],
)
def test_the_choice(gpu, capability, installed, dtype, size, features, expected):
    device = gpu(capability, installed)
    assert select(device, dtype, size, **features).name == expected
    told = explain(device, dtype, size, **features)
    assert [name for name, _ in told] == NAMES
    assert next(name for name, reason in told if reason is None) == expected


def test_reasons_are_sentences_about_the_backend(gpu):
    device = gpu((9, 0), installed=False)
    told = dict(explain(device, BF16, 128, windowed=True))
    assert told["flash-attn-4"] == "is not installed (pip install 'longreach[gpu]')"
    assert told["aten-cudnn"] == "has no sliding window"
    told = dict(explain(gpu((7, 5)), BF16, 128))
    assert told["aten-efficient"] == "needs compute capability 8.0 for bfloat16, this GPU has 7.5: use float16"


def test_deterministic_algorithms_are_heeded(gpu):
    device = gpu((9, 0), installed=False)
    assert select(device, BF16, 128).name == "aten-cudnn"
    torch.use_deterministic_algorithms(True)
    try:
        assert select(device, BF16, 128).name == "aten-flash"
    finally:
        torch.use_deterministic_algorithms(False)
    assert select(device, BF16, 128).name == "aten-cudnn"


def test_the_slow_reference_is_announced_once(gpu, caplog):
    device = gpu((7, 5))
    select(device, BF16, 128), select(device, BF16, 128)
    (record,) = caplog.records
    assert "aten-flash needs compute capability 8.0, this GPU has 7.5" in record.getMessage()


def test_other_devices_get_the_reference():
    assert explain(torch.device("meta"), FP32, 64) == [("reference", None)]


def test_a_missing_flash_attn_4_is_said_by_name():
    from longreach.attention import flash4

    kernels, reason = flash4._kernels()
    assert (kernels is None) == (reason is not None)
    if reason is not None:
        with pytest.raises(ImportError, match="flash-attn-4 "):
            flash4._loaded()


def test_boundaries():
    cu = (0, 3, 4, 11)
    assert longest(cu) == 7
    there = on_device(cu, torch.device("cpu"))
    assert there.dtype == torch.int32 and there.tolist() == [0, 3, 4, 11]
    assert on_device((0, 3, 4, 11), torch.device("cpu")) is there


@pytest.mark.parametrize("mode, warn_only", [(False, False), (True, True), (True, False)])
def test_the_deterministic_flag_is_put_back(mode, warn_only):
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    try:
        with pytest.raises(RuntimeError, match="kernel"), deterministic_kernels(True):
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            raise RuntimeError("kernel")
        assert torch.are_deterministic_algorithms_enabled() == mode
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
        assert torch.utils.deterministic.fill_uninitialized_memory == before
        with deterministic_kernels(False):
            assert torch.are_deterministic_algorithms_enabled() == mode
    finally:
        torch.use_deterministic_algorithms(False)
