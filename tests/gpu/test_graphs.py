"""Whether the steps of a real model, with the Triton kernels, can be recorded as CUDA graphs.

Without a GPU the recording is a stand-in: it computes once, on PAD rows, and again at every replay, under the
same conditions that a graph sets. No op may read the host's lists (``UnreadableList``), make a tensor of a
Python list, or ask for values of the device; what is computed must follow from the static block alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracle.serving import DEVICE, TOLERANCE, Serving
from weft.request import SamplingParams
from weft.runner import torch_executor
from weft.runner.graph_shapes import GraphShape
from weft.runner.graphs import Capture, CudaCapture, Replay
from weft.runner.step_graphs import StepBlock
from weft.tensor import gpu, native

REFUSED = (
    "aten.lift_fresh",
    "aten.nonzero",
    "aten._local_scalar_dense",
    "aten.masked_select",
    "aten.bincount",
    "aten._unique",
)
"""What waits for the device, or brings something from the host."""
DECODED = 3
MIXED = ("lfm2", "jamba")
"""Families whose steps with prompts are recorded here: they take the interpreter longest. ``test_pad_chunks``
has every op."""
SHAPE = GraphShape(8, 2, 1, 3)


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(REFUSED):
            raise RuntimeError(f"{name} cannot be recorded")
        if name.startswith("aten.index") and any(
            isinstance(one, torch.Tensor) and one.dtype == torch.bool
            for one in (args[1] if isinstance(args[1], list | tuple) else ())
        ):
            raise RuntimeError(f"{name} by a mask cannot be recorded")
        return func(*args, **(kwargs or {}))


class StandIn:
    """Refuses what a graph would; computes at every replay, into the memory of the first time."""

    reads_host = False

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        with Watched():
            made = run()
        return lambda: made.copy_(run())


@pytest.fixture(autouse=True)
def no_native_kernels() -> Iterator[None]:
    """They take tensors of a CPU, which those of this test only are because there is no GPU."""
    native.choose("torch")
    yield
    native.choose("auto")


def capture() -> Capture:
    return CudaCapture(DEVICE) if DEVICE.type == "cuda" else StandIn()


def shapes_of(serving: Serving) -> list[GraphShape]:
    """Filled with those of the recorded steps with prompts, as the engine runs."""
    graphs = serving.executor.graphs
    assert graphs is not None
    shapes: list[GraphShape] = []
    replay = graphs.replay

    def noted(block: StepBlock) -> torch.Tensor:
        if not block.shape.decodes_alone:
            shapes.append(block.shape)
        return replay(block)

    graphs.replay = noted  # type: ignore[method-assign]
    return shapes


@pytest.mark.parametrize("family", ["qwen3_5", "bamba", "lfm2", "jamba"])
def test_decodes_and_steps_with_prompts_can_be_recorded_and_change_no_token(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = family in MIXED
    both = (GraphShape.of_decodes(2), *(SHAPE,) * mixed)
    monkeypatch.setattr(torch_executor, "recorded_shapes", lambda *sizes, **kinds: both)
    prompts = [[7], [300, 20, 411, 5, 123]]
    short = SamplingParams(temperature=0.0, max_tokens=DECODED, ignore_eos=True)
    serving = Serving(family, max_num_seqs=2, max_model_len=128, capture=capture())
    shapes = shapes_of(serving)
    recorded = serving.run(prompts, short, stagger_steps=1)
    assert shapes == [SHAPE] * 2 * mixed, "a prompt alone, then one beside a decode"
    gpu.choose("torch")
    plain = Serving(family, max_num_seqs=2, max_model_len=128).run(prompts, short, stagger_steps=1)
    assert [answer.tokens for answer in recorded] == [answer.tokens for answer in plain]
    for one, other in zip(recorded, plain, strict=True):
        assert torch.allclose(one.logits, other.logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "refused",
    [
        lambda x: x[x > 0],
        lambda x: x.sum().item(),
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: x.nonzero(),
        lambda x: bool(x.any()),
    ],
)
def test_the_control_the_stand_in_refuses_what_a_graph_would(refused: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match="recorded"):
        StandIn().capture(lambda: (refused(torch.ones(3)), torch.ones(3))[1])
    assert StandIn().capture(lambda: torch.ones(3) + 1)().tolist() == [2, 2, 2]
