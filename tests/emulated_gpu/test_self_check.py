"""The check at the start: every kernel of a model next to torch's operators; a kernel that differs is named."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.emulated_gpu import emulated
from tests.emulated_gpu.engines import started
from tests.emulated_gpu.sample import ALL
from tests.fixtures.checkpoints import checkpoint
from weft.errors import ConfigError
from weft.models.loading import load_model
from weft.runner.reserve import CHECK_S, CudaMeter, Measurement
from weft.tensor import gpu
from weft.tensor.gpu.self_check import KernelCheck
from weft.tensor.op import Op, checked
from weft.tensor.ops.conv import causal_conv
from weft.tensor.ops.delta_rule import delta_rule
from weft.tensor.scratch import scratch

CUDA = torch.device("cuda", 0)


def check_of(family: str, clock: Any = lambda: 0.0) -> KernelCheck:
    """Return the check of a model, after its forward passes."""
    directory = checkpoint(family)
    with emulated(), torch.inference_mode():
        scratch.device = CUDA
        loaded = load_model(directory, device=CUDA)
        measured = Measurement(loaded.model, loaded.spec, "float32", 128, 2, 256, CUDA, CudaMeter(CUDA))
        check = KernelCheck(CHECK_S, clock)
        with checked(check):
            measured.forward_checked()
    return check


def changed(op: Op[Any, Any], change: Any) -> Any:
    """Return a patch of the Triton form of ``op``; ``change(args, out)`` comes after it."""
    triton = op.triton

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out = triton(*args, **kwargs)
        change(args, out)
        return out

    return mock.patch.dict(op.__dict__, triton=wrong)


def in_the_output(args: Any, out: Any) -> None:
    out[-1].add_(out.float().abs().max() * 0.2)


def in_the_state(args: Any, out: Any) -> None:
    args[5][0].mul_(1.2)


def to_nan(args: Any, out: Any) -> None:
    out[0, 0] = float("nan")


@pytest.mark.parametrize("family", ["qwen3_5", *(("lfm2", "bamba", "qwen3_next", "jamba") if ALL else ())])
def test_the_kernels_of_a_model_agree_with_torch(family: str) -> None:
    check = check_of(family)
    assert check.differences == []
    if family == "qwen3_5":
        assert {"delta_rule", "causal_conv", "attention_layer", "rms_norm", "silu_mul"} <= check.checked


@pytest.mark.parametrize(
    ("op", "change"), [(delta_rule, in_the_output), (delta_rule, in_the_state), (causal_conv, to_nan)]
)
def test_a_kernel_that_computes_other_numbers_is_named(op: Op[Any, Any], change: Any) -> None:
    with changed(op, change):
        differences = check_of("qwen3_5").differences
    assert differences[0].startswith(f"{op.torch.__name__} by ")


def test_nothing_is_checked_once_its_seconds_are_over() -> None:
    times = iter([0.0, 1.0, 1.5])
    assert len(check_of("qwen3_5", lambda: next(times, 3.0)).checked) <= 2


def test_a_start_ends_with_the_name_of_the_kernel() -> None:
    checkpoint("qwen3_5")

    def differ(measured: Measurement) -> None:
        raise gpu.KernelsDifferError("delta_rule by 0.3 of its largest number")

    said = r"other numbers than torch's operators.*: delta_rule by 0\.3.*debug\.gpu_kernels torch"
    with (
        emulated() as card,
        mock.patch("tests.emulated_gpu.engines.reserve.check_kernels", differ),
        pytest.raises(ConfigError, match=said),
        started(card, "qwen3_5", quick=False),
    ):
        pass
