"""``--device`` and the memory of a GPU, with what torch would say of machines that are not here."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fixtures.checkpoints import checkpoint
from tests.support.graph_steps import EagerCapture
from weft.assemble import assemble
from weft.assemble.assembly import with_step_tokens
from weft.assemble.prefix_store import layout_of
from weft.assemble.room import ArenaRoom, gpu_room, measured_gpu_room, mixed_tokens_max, plan_memory, within_share
from weft.cli.main import main
from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.host import GPU_CONTEXT_BYTES
from weft.memory.frames.plan import ArenaPlan, plan_arena
from weft.models.loading import load_model
from weft.request import LOGPROBS_MAX, SamplingParams
from weft.runner import reserve as reserve_module
from weft.runner.arena import MOVES_ROOM_BYTES
from weft.runner.reserve import Reserve, measure_reserve
from weft.spec import CacheDTypeName, ModelSpec, attention, short_conv
from weft.tensor import device as device_module
from weft.tensor import gpu
from weft.tensor.device import choose_device, describe, use
from weft.tensor.inputs import LayerCache, StepInputs
from weft.units import PAD

GIB = 1 << 30


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0) -> None:
    for name, value in (
        ("is_available", count > 0),
        ("device_count", count),
        ("current_device", current),
        ("init", None),
        ("set_device", None),
    ):
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


@pytest.mark.parametrize(
    ("asked", "count", "words"),
    [("tpu", 1, "'tpu'"), ("cuda:x", 1, "'cuda:x'"), ("cuda:2", 2, "cuda:1"), ("cuda", 0, "it sees no GPU")],
)
def test_a_device_that_is_not_there_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, asked: str, count: int, words: str
) -> None:
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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "tpu"], "--device is 'tpu'"),
        (["--gpu-memory-fraction", "1.5"], "--gpu-memory-fraction is 1.5"),
        (["--cuda-graphs", "off"], "--cuda-graphs is not a flag: it is debug.cuda_graphs of the --config file"),
    ],
)
def test_the_command_line_says_what_is_wrong_in_one_line(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["generate", "x", *flags]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()[-1:]
    assert words in line


@pytest.mark.parametrize(("variable", "value"), [("CUDA_GRAPHS", "on"), ("GPU_KERNELS", "cuda")])
def test_a_variable_of_a_debug_switch_with_a_wrong_value_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(f"WEFT_{variable}", value)
    assert main(["generate", "x"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()[-1:]
    assert f"debug.{variable.lower()}" in line
    assert f"WEFT_{variable}" in line


def test_a_step_has_more_tokens_on_a_gpu_unless_a_number_is_asked_for() -> None:
    for name, asked, tokens in (("cpu", None, 1024), ("cuda:1", None, 8192), ("cuda", 300, 300)):
        config = with_step_tokens(EngineConfig(max_num_batched_tokens=asked), torch.device(name))
        assert config.max_num_batched_tokens == tokens


def test_the_engine_says_which_device_it_is_on() -> None:
    made = assemble(EngineConfig(memory="64MiB", device="cpu", max_model_len=256))
    assert made.info.device == "cpu"
    assert made.core.executor.graphs is None, "graphs are for GPUs"  # type: ignore[attr-defined]
    made.core.close()


def test_the_arena_is_a_share_of_what_weights_and_a_step_leave() -> None:
    room = gpu_room(EngineConfig(gpu_memory_fraction=0.5), 60 * GIB, 4 * GIB, "all of it for prompts", str)
    assert room.most_bytes == room.usual_bytes == 28 * GIB
    assert "--gpu-memory-fraction is 0.5" in room.why
    with pytest.raises(ConfigError, match=r"leaves nothing.*1.0 GiB too many. Lower it") as refused:
        gpu_room(EngineConfig(), 3 * GIB, 4 * GIB, "all of it for prompts", lambda: "Lower it")
    assert refused.value.param == "--max-num-batched-tokens"


def test_a_share_of_the_server_s_memory_has_the_step_and_the_context_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else models that fit by their weights and arenas exceed --memory together, by a step and a context each."""
    monkeypatch.setattr("weft.assemble.room.memory_share_bytes", lambda: 20 * GIB)
    whole = gpu_room(EngineConfig(gpu_memory_fraction=1.0), 60 * GIB, 4 * GIB, "for prompts", str)
    room = within_share(EngineConfig(), whole, 8 * GIB)
    assert room.most_bytes == room.usual_bytes == (20 - 8 - 4) * GIB - GPU_CONTEXT_BYTES
    on_cpu = within_share(EngineConfig(), ArenaRoom(60 * GIB, 60 * GIB, ""), 8 * GIB)
    assert on_cpu.most_bytes == 12 * GIB
    with pytest.raises(ConfigError, match=r"weights take 15\.5 GiB, its process and a step 4\.5 GiB: raise --memory"):
        within_share(EngineConfig(), whole, 31 * GIB // 2)


def test_pages_of_a_gpu_are_rows_in_the_same_bytes_and_have_a_store_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = ModelSpec("tiny", 64, 16, 500, "bfloat16", (attention(2, 16), short_conv(32, 3)))
    room = ArenaRoom(1 << 20, 1 << 20, "enough")

    def arena_on(device: str) -> ArenaPlan:
        return plan_memory(EngineConfig(), spec, "bfloat16", room, torch.device(device), sees=False)[0]

    packed, rows = arena_on("cpu"), arena_on("cuda")
    assert (packed.kv_layout, rows.kv_layout) == ("vnni", "rows")
    assert replace(rows, kv_layout="vnni") == packed, "no size and no place differs"
    assert layout_of(rows) == layout_of(packed) | {"blocks": "rows"}, "other bytes, another namespace"
    assert "blocks" not in layout_of(packed), "stores from before rows are read on"
    monkeypatch.setattr(gpu, "_interpreting", True)
    assert arena_on("cpu").kv_layout == "rows", "interpreted kernels read what compiled ones read"


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
        self.meter.hold(10 * len(inputs.tokens_T))
        return inputs.tokens_T[:, None].float()

    def logits(self, hidden_XD: torch.Tensor, out_XV: torch.Tensor | None = None) -> torch.Tensor:
        self.meter.hold(1000 * len(hidden_XD))
        return torch.zeros(len(hidden_XD), 64)


class FakeMeter:
    """Of a device on which every tensor is freed before the next."""

    peak = used = 0

    def begin(self) -> None:
        self.peak = 0

    def hold(self, size: int) -> None:
        self.peak = max(self.peak, size)

    def peak_bytes(self) -> int:
        return self.peak

    def used_bytes(self) -> int:
        return self.used


class Pooled:
    """A capture whose first graph takes a pool, and each graph 300 bytes of nodes; forgotten with it."""

    reads_host = False

    def __init__(self, meter: FakeMeter) -> None:
        self.meter = meter
        self.widths: list[int] = []

    def capture(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        hidden = run()
        self.widths.append(len(hidden))
        self.meter.used += 300 if self.meter.used else 5300
        graph = torch.zeros(1)
        weakref.finalize(graph, self.free)
        return lambda: graph + hidden

    def free(self) -> None:
        self.meter.used -= 300
        if self.meter.used == 5000:
            self.meter.used = 0


def measured(
    rows: int, capture: bool = False, step_tokens: int = 1000, *, verify_runs: bool = False
) -> tuple[Reserve, Greedy, Pooled]:
    meter = FakeMeter()
    model, pooled = Greedy(meter), Pooled(meter)
    reserve = measure_reserve(
        model,
        model.spec,
        "float32",
        step_tokens=step_tokens,
        rows=rows,
        model_len=400,
        device=torch.device("cpu"),
        meter=meter,
        capture=pooled if capture else None,
        verify_runs=verify_runs,
    )
    return reserve, model, pooled


def test_the_reserve_is_that_of_the_largest_step() -> None:
    """Many short runs have more tokens than one prompt where a sequence is shorter than a step; a slice of a
    scored prompt, or the logits of all rows, may need more than either. A step with verify runs chooses a
    token for each of theirs too."""
    assert measured(7)[0].step_bytes == 1000 * 128
    assert measured(200)[0].step_bytes == 1000 * (200 + 64)
    assert measured(40, step_tokens=100_000)[0].largest == "short runs after hits"
    assert measured(7)[0].graph_bytes == 0


def room_of_a_gpu_without_room_for_a_kernel(monkeypatch: pytest.MonkeyPatch, choice: str) -> list[str]:
    """``measured_gpu_room`` where the first measurement meets a kernel that does not fit."""
    measured_with: list[str] = []

    def measure(*_: object, capture: object, **__: object) -> Reserve:
        measured_with.append(f"{'triton' if gpu.in_use() else 'torch'}, capture {capture}")
        if gpu.in_use():
            raise gpu.KernelTooLargeError("kernel _decode does not fit the GPU")
        return Reserve(1 << 20, 0, "long prompt")

    monkeypatch.setattr(reserve_module, "measure_reserve", measure)
    monkeypatch.setattr(device_module, "free_bytes", lambda device: GIB)
    gpu.choose(choice)  # type: ignore[arg-type]
    loaded = load_model(checkpoint("qwen3"))
    room = measured_gpu_room(
        EngineConfig(gpu_kernels=choice),
        loaded,
        loaded.spec,  # type: ignore[arg-type]
        "float32",
        torch.device("cuda"),
        "graphs",
        lambda line: None,
    )  # type: ignore[arg-type]
    assert room.most_bytes == int((GIB - (1 << 20) - MOVES_ROOM_BYTES) * 0.9)
    return measured_with


def test_a_kernel_that_fits_no_gpu_turns_triton_off_with_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        measured_with = room_of_a_gpu_without_room_for_a_kernel(monkeypatch, "auto")
    finally:
        gpu.choose("auto")
    assert measured_with == ["triton, capture graphs", "torch, capture None"]
    [line] = [record.message for record in caplog.records if "_decode does not fit" in record.message]
    assert "torch's operators run in their place" in line


def test_a_kernel_that_fits_no_gpu_ends_the_start_where_triton_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with pytest.raises(ConfigError, match=r"debug\.gpu_kernels is triton: kernel _decode"):
            room_of_a_gpu_without_room_for_a_kernel(monkeypatch, "triton")
    finally:
        gpu.choose("auto")


def test_what_is_measured_is_what_a_server_meets() -> None:
    reserve, model, _ = measured(7)
    prompt, short, mixed, idle = model.shown[0], model.shown[2], model.shown[4], model.shown[-1]
    assert prompt.runs.lengths == [500], "no longer than the model's positions"
    assert (short.runs.starts, short.runs.lengths) == ([40] * 7, [142] * 7)
    assert not any(short.runs.fresh), "after a hit: its states come from a snapshot"
    assert (mixed.runs.decode_count, mixed.runs.page_table_RP.shape[1]) == (4, 1), "attention is not split"
    assert mixed.runs.run_count == 5
    assert idle.runs.decode_count == 7
    assert (idle.positions_T == PAD).all()
    assert idle.runs.page_table_RP.shape[1] == 25, "as wide as a graph's"
    assert {1, 2, 16, 32, 64, 128, 256} <= {len(inputs.tokens_T) for inputs in model.shown}
    plan = plan_arena(model.spec, 1 << 20)
    assert int(prompt.runs.page_table_RP.min()) >= plan.pages_per_frame, "its pages are not its slot's frame"
    assert reserve.in_words().endswith("0 B for CUDA graphs")


def test_tokens_are_chosen_with_every_filter_and_with_logprobs_where_memory_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampled: list[SamplingParams] = []
    scored: list[int] = []
    admit, score = reserve_module.Sampler.admit, reserve_module.score

    def admitted(sampler: Any, row: int, tokens: Any, known: int, sampling: SamplingParams, *more: Any) -> None:
        sampled.append(sampling)
        admit(sampler, row, tokens, known, sampling, *more)

    monkeypatch.setattr(reserve_module.Sampler, "admit", admitted)
    monkeypatch.setattr(
        reserve_module, "score", lambda logits, following, top: (scored.append(top), score(logits, following, top))[1]
    )
    measured(7)
    assert len(sampled) == 7, "every row"
    for one in sampled:
        assert one.logprobs == LOGPROBS_MAX
        assert one.top_p < 1 < one.top_k
        assert one.temperature * one.min_p > 0
    assert set(scored) == {LOGPROBS_MAX}, "and of prompts"


def test_graphs_are_budgeted_by_recording_two_of_them() -> None:
    reserve, _, pooled = measured(12, capture=True)
    assert pooled.widths == [12, 12, 8, 1024, 1024, 1008]
    decodes, mixed = 5300 + 4 * 300, 5300 + 15 * 300
    assert reserve.graph_bytes == decodes + mixed, "of 1, 2, 4, 8 and 12 decodes; of 16 sizes with prompts"
    assert reserve.total_bytes == reserve.step_bytes + reserve.graph_bytes
    with_drafts, _, _ = measured(12, capture=True, verify_runs=True)
    assert with_drafts.graph_bytes == reserve.graph_bytes + 38 * 300, "nineteen sizes, and their states"


def test_steps_with_prompts_may_be_left_out_of_the_graphs() -> None:
    assert mixed_tokens_max(EngineConfig(cuda_graphs="decodes")) == 0
    assert mixed_tokens_max(EngineConfig()) == 2048
    meter = FakeMeter()
    model, pooled = Greedy(meter), Pooled(meter)
    measure_reserve(
        model,
        model.spec,
        "float32",
        step_tokens=1000,
        rows=12,
        model_len=400,
        device=torch.device("cpu"),
        meter=meter,
        capture=pooled,
        mixed_tokens_max=0,
    )
    assert pooled.widths == [12, 12, 8], "decodes alone"


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "jamba", "lfm2"])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_every_shape_runs_on_real_models(family: str, kv_dtype: CacheDTypeName) -> None:
    meter, loaded = FakeMeter(), load_model(checkpoint(family))
    reserve = measure_reserve(
        loaded.model,
        loaded.spec,
        kv_dtype,
        step_tokens=100,
        rows=6,
        model_len=64,
        device=torch.device("cpu"),
        meter=meter,
        capture=EagerCapture(),
    )
    assert reserve.total_bytes == 0, "nothing of it was counted, and all of it ran"
