"""``--device`` and the memory of a GPU, with what torch would say of machines that are not here."""

from __future__ import annotations

import pytest
import torch

from weft.assemble import assemble, gpu_room
from weft.cli.main import main
from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.memory.frames.plan import plan_arena
from weft.runner.reserve import measure_reserve
from weft.spec import ModelSpec, attention, short_conv
from weft.tensor.device import choose_device, describe, use
from weft.tensor.inputs import LayerCache, StepInputs
from weft.units import PAD

GIB = 1 << 30


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0) -> None:
    for name, value in (("is_available", count > 0), ("device_count", count), ("current_device", current),
                        ("init", None), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


def test_auto_is_a_gpu_where_torch_has_one_and_the_cpu_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    assert describe(choose_device("auto")) == "cpu"
    gpus(monkeypatch, 2, current=1)
    assert choose_device("auto") == torch.device("cuda", 1)
    assert choose_device("cuda") == torch.device("cuda", 1)
    assert choose_device("cuda:0") == torch.device("cuda", 0)
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(("asked", "count", "words"), [
    ("tpu", 1, "'tpu'"), ("cuda:x", 1, "'cuda:x'"), ("cuda:2", 2, "cuda:1"), ("cuda", 0, "it sees no GPU")])
def test_a_device_that_is_not_there_is_refused_by_name(
        monkeypatch: pytest.MonkeyPatch, asked: str, count: int, words: str) -> None:
    gpus(monkeypatch, count)
    with pytest.raises(ConfigError, match=words) as refused:
        choose_device(asked)
    assert refused.value.param == "--device"


def test_a_gpu_becomes_the_current_one_of_the_thread_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made_current: list[torch.device] = []
    gpus(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    for device in ("cpu", "cuda", "cuda:1"):
        use(torch.device(device))
    assert made_current == [torch.device("cuda", 1)]


def test_torch_is_quoted_on_why_it_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    gpus(monkeypatch, 0)
    monkeypatch.setattr(torch.cuda, "init", refuses)
    with pytest.raises(ConfigError, match=r"not compiled with CUDA enabled; install .* --device cpu"):
        choose_device("cuda")


@pytest.mark.parametrize(("flags", "words"), [
    (["--device", "tpu"], "--device is 'tpu'"),
    (["--gpu-memory-fraction", "1.5"], "--gpu-memory-fraction is 1.5"),
    (["--cuda-graphs", "on"], "--cuda-graphs"),
    (["--gpu-kernels", "cuda"], "--gpu-kernels")])
def test_the_command_line_says_what_is_wrong_in_one_line(
        capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    assert main(["generate", "x", *flags]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()[-1:]
    assert words in line


def test_the_engine_says_which_device_it_is_on() -> None:
    made = assemble(EngineConfig(memory="64MiB", device="cpu", max_model_len=256))
    assert made.info.device == "cpu"
    assert made.core.executor.graphs is None, "graphs are for GPUs"  # type: ignore[attr-defined]
    made.core.close()


def test_the_arena_is_a_share_of_what_weights_and_a_step_leave() -> None:
    room = gpu_room(EngineConfig(gpu_memory_fraction=0.5), 60 * GIB, 4 * GIB, "all of it for prompts")
    assert room.most_bytes == room.usual_bytes == 28 * GIB
    assert "--gpu-memory-fraction is 0.5" in room.why
    with pytest.raises(ConfigError, match=r"nothing is left.*--max-num-batched-tokens") as refused:
        gpu_room(EngineConfig(), 3 * GIB, 4 * GIB, "all of it for prompts")
    assert refused.value.param == "--max-num-batched-tokens"


class Greedy:
    """Holds memory by the token, and more for rows of logits; writes what a prompt may write."""

    def __init__(self, meter: FakeMeter) -> None:
        self.spec = ModelSpec("greedy", 64, 16, 500, "float32", (attention(1, 16), short_conv(32, 3)))
        self.meter = meter
        self.shown: list[StepInputs] = []

    def forward(self, inputs: StepInputs, caches: list[LayerCache]) -> torch.Tensor:
        self.shown.append(inputs)
        assert caches[0].k is not None
        assert int(inputs.runs.page_table_RP.max()) < len(caches[0].k)
        self.meter.held = 10 * len(inputs.tokens_T)
        return inputs.tokens_T[:, None].float()

    def logits(self, hidden_XD: torch.Tensor, out_XV: torch.Tensor | None = None) -> torch.Tensor:
        self.meter.held += 1000 * len(hidden_XD)
        return hidden_XD


class FakeMeter:
    held = 0

    def begin(self) -> None:
        self.held = 0

    def peak_bytes(self) -> int:
        return self.held


def test_a_step_is_measured_with_one_long_prompt_and_with_all_rows_of_pad() -> None:
    meter = FakeMeter()
    model = Greedy(meter)
    reserve = measure_reserve(model, model.spec, "float32", step_tokens=1000, rows=7, model_len=400,
                              device=torch.device("cpu"), meter=meter)
    assert reserve.prompt_bytes == 10 * 500 + 7000, "no longer than the model's positions"
    assert reserve.decode_bytes == 10 * 7 + 7000
    assert reserve.total_bytes == 12_000 + 7_070
    prompt, idle = model.shown[0], model.shown[-1]
    assert (prompt.runs.decode_count, idle.runs.decode_count) == (0, 7)
    assert (idle.positions_T == PAD).all()
    assert idle.runs.page_table_RP.shape[1] == 25, "as wide as a graph's"
    plan = plan_arena(model.spec, 1 << 20)
    assert int(prompt.runs.page_table_RP.min()) >= plan.pages_per_frame, "its pages are not its slot's frame"
