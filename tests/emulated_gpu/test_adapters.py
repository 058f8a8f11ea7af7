"""Adapters on a GPU: the tokens that a CPU computes, by graphs that were recorded once, and no report."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from tests.emulated_gpu import emulated
from tests.emulated_gpu.engines import GREEDY, answered, started
from tests.fixtures.adapters import factors, written
from tests.fixtures.checkpoints import checkpoint
from weft.adapters import Adapter, read_adapter
from weft.api import Engine
from weft.engine.engine import EngineCore
from weft.engine.sleeper import Sleeper
from weft.request import Request
from weft.runner.torch_executor import GRAPH, TorchExecutor

PROMPTS = [[7, 9], [300, 20, 411, 5, 123], list(range(3, 22)), [11, 12, 13]]


def adapters(home: Path, model: object) -> list[Adapter]:
    made = []
    for at, rank in enumerate((4, 7, 2)):
        tensors = {}
        for seed, name in enumerate(sorted(model.targets.stored)):  # type: ignore[attr-defined]
            target = model.targets.find(name)  # type: ignore[attr-defined]
            if target.kind == "product" and name.startswith("layers.") and (seed + at) % 3:
                tensors |= factors(f"model.{name}", *target.whole_shape, rank=rank, seed=100 * at + seed)
                if at == 0:
                    tensors[f"model.{name}.lora_magnitude_vector"] = torch.rand(target.whole_shape[0]) + 0.5
        made.append(read_adapter(f"a{at}", written(home / str(at), tensors, r=rank, lora_alpha=rank / 2)))
    return made


def answers(core: EngineCore, whose: list[Adapter | None], name: str) -> list[list[int]]:
    return answered(
        core,
        [
            Request(request_id=f"{name}{at}", prompt_tokens=prompt, sampling=GREEDY, adapter=adapter)
            for at, (adapter, prompt) in enumerate(zip(whose, PROMPTS, strict=False))
        ],
    )


@pytest.mark.parametrize("family", ["qwen3_5"])
def test_rows_of_adapters_replay_graphs_with_the_tokens_of_a_cpu(family: str, tmp_path: Path) -> None:
    with Engine(str(checkpoint(family)), memory="16MiB", dtype="float32", speculate="off") as engine:
        executor = cast(TorchExecutor, engine._core.executor)
        [a, b, c] = adapters(tmp_path, executor.model)
        for one in (a, b, c):
            engine._core.adapters.load(one)
        orders: list[list[Adapter | None]] = [[a, None, b, a], [b, b, None, a], [c, a, b, None]]
        want = [answers(engine._core, order, f"cpu{at}") for at, order in enumerate(orders)]
        plain = answers(engine._core, [None] * 4, "plain")
    with emulated() as card, started(card, family, prefix_cache=False, lora_memory="8MiB") as gpu:
        core, executor = gpu.core, cast(TorchExecutor, gpu.core.executor)
        recorded: list[object] = []
        assert executor.graphs is not None
        record = executor.graphs.record
        executor.graphs.record = lambda *all: (recorded.append(all), record(*all))  # type: ignore[method-assign,assign]
        card.serving = False  # one of them is DoRA, which reads the weights
        for one in (a, b):
            core.adapters.load(one)
        card.begin_serving()
        assert answers(core, orders[0], "gpu0") == want[0]
        replays = card.replays
        assert answers(core, orders[1], "gpu1") == want[1]
        assert card.replays >= replays + GREEDY.max_tokens - 1, "decodes with adapters replay graphs"
        core.adapters.load(c)  # while serving: its copies keep nobody waiting
        assert answers(core, orders[2], "gpu2") == want[2]
        assert answers(core, [None] * 4, "base") == plain != want[0]
        assert not recorded, "adapters come while it serves, and nothing is recorded"
        card.serving = False
        sleeper = Sleeper(core)
        sleeper.sleep(1)
        sleeper.wake_up()
        assert answers(core, orders[2], "woken") == want[2], "factors are read where they lie now"
        assert executor.batches.adapted_shapes == executor.batches.shapes
        assert {form for form, count in executor.steps_by_form.items() if count} == {GRAPH}, "prompts too"
    assert not card.reports, [str(report) for report in card.reports]
