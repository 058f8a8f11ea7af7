"""The plan of a checkpoint's config.json against the engine that loads the checkpoint: the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from tests.fixtures.checkpoints import CHECKPOINTS, checkpoint, make_checkpoint
from tests.fixtures.quantised_forms import FORMS, write
from tests.support.gguf_files import write_gguf
from weft.assemble import assemble
from weft.assemble.assembly import Assembled
from weft.cli.plan import find_config
from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.models.hub import resolve_model
from weft.models.loading import load_model
from weft.planning import weights
from weft.planning.model_plan import ModelPlan, PlanOptions, make_plan
from weft.tensor import native
from weft.tensor.weights import tiles

ARENA_BYTES = 3 << 20


def engine_of(model: Path, **settings: Any) -> Assembled:
    """Return an engine without drafts: it would measure steps for them, which takes two thirds of its start and
    allocates nothing."""
    sizes = {"memory": str(ARENA_BYTES), "threads": 1, "speculate": "off"}
    return assemble(EngineConfig(model=str(model), **sizes | settings))


def config_of(name: str) -> dict[str, Any]:
    return json.loads((checkpoint(name) / "config.json").read_text())


def planned(name: str, **asked: Any) -> ModelPlan:
    return make_plan(name, config_of(name), PlanOptions(arena_bytes=ARENA_BYTES, **asked))


def buffer_bytes(core: EngineCore) -> int:
    """Bytes of the tensor that pages and states live in."""
    return int(core.executor.arena.buffer.numel())  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_plan_has_the_bytes_that_the_engine_then_allocates(name: str) -> None:
    made = engine_of(checkpoint(name))
    plan = planned(name)
    assert plan.weights.rank_bytes == made.info.weights_bytes
    assert plan.arena == made.core.memory.plan
    assert plan.arena.arena_bytes == buffer_bytes(made.core)
    assert plan.longest_tokens == made.info.sizes.max_model_len
    rows = {row.name: row.size_bytes for row in made.info.memory}
    assert rows["a token's KV"] == plan.kv_token_bytes
    assert 0 <= rows["a sequence's state"] - plan.state_bytes < 256 * 2 * len(plan.spec.layers)
    made.core.close()


@pytest.mark.parametrize("speculate", ["auto", "suffix"])
def test_the_models_own_head_counts_where_the_engine_reads_it(speculate: str) -> None:
    made = assemble(EngineConfig(memory=str(ARENA_BYTES), threads=1, speculate=speculate))
    config = json.loads((Path(made.info.directory) / "config.json").read_text())
    plans = [make_plan("", config, PlanOptions(arena_bytes=ARENA_BYTES, mtp=mtp)) for mtp in (True, False)]
    mine, other = plans if speculate == "auto" else reversed(plans)
    assert mine.weights.rank_bytes == made.info.weights_bytes != other.weights.rank_bytes
    assert mine.arena == made.core.memory.plan != other.arena
    assert ("draft head" in mine.weights.parts) == (speculate == "auto")
    made.core.close()


def test_another_dtype_changes_plan_and_engine_alike() -> None:
    made = engine_of(checkpoint("granite_moe"), dtype="bfloat16")
    plan = planned("granite_moe", dtype="bfloat16")
    assert plan.weights.rank_bytes == made.info.weights_bytes
    assert plan.arena == made.core.memory.plan
    made.core.close()
    float32 = planned("granite_moe")
    assert plan.weights.rank_bytes < float32.weights.rank_bytes
    assert plan.arena != float32.arena


@pytest.mark.parametrize("name", ["granite_moe", "qwen3_5"])
def test_weights_in_12_bits_are_planned_as_the_engine_holds_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd weights are estimated; a limit of small matrices stands for that of large models."""
    assert weights.TWELVE_BIT_ELEMENTS == tiles.TWELVE_BIT_SIZE_MIN
    if native.MISSING is not None or not native.extension().has_twelve_bit_products():
        return
    monkeypatch.setattr(weights, "TWELVE_BIT_ELEMENTS", 2048)
    monkeypatch.setattr(tiles, "TWELVE_BIT_SIZE_MIN", 2048)
    loaded = engine_of(checkpoint(name), dtype="bfloat16")
    held = loaded.info.weights_bytes
    loaded.core.close()
    plan = planned(name, dtype="bfloat16", twelve_bit=True)
    assert plan.weights.rank_bytes == pytest.approx(held, rel=0.02)
    assert plan.weights.form == "bfloat16 in 12 bits"
    assert planned(name, dtype="bfloat16").weights.rank_bytes > 1.1 * held


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "granite", "qwen3_next", "jamba"])
@pytest.mark.parametrize("form", ["gptq", "awq", "int8_rows", "packed_int4_zeros", "auto_round_mixed", "int4_torchao"])
def test_matrices_that_a_quantised_checkpoint_leaves_in_floats_are_counted(
    family: str, form: str, tmp_path: Path
) -> None:
    """config.json names none of them: convolutions' projections, rows of beta and decay, routers, ..."""
    directory, _ = write(family, tmp_path, FORMS[form])
    held = load_model(directory).weights_bytes
    asked = PlanOptions(arena_bytes=ARENA_BYTES, twelve_bit=True)  # of a CPU
    _, config = find_config(str(directory))
    plan = make_plan(family, config, asked)
    assert plan.weights.rank_bytes == pytest.approx(held, rel=0.015)
    assert plan.weights.rank_bytes == sum(plan.weights.parts.values())
    if family in ("lfm2", "jamba"):  # the control: what config.json says alone
        said = json.loads((directory / "config.json").read_text())
        assert make_plan(family, said, asked).weights.rank_bytes < 0.8 * held


def test_a_checkpoint_whose_files_are_not_all_there_is_counted_by_its_config(tmp_path: Path) -> None:
    directory, _ = write("lfm2", tmp_path, FORMS["gptq"])
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    asked = PlanOptions(arena_bytes=ARENA_BYTES)
    _, config = find_config(str(directory))
    said = json.loads((directory / "config.json").read_text())
    assert make_plan("", config, asked).weights == make_plan("", said, asked).weights


def test_as_many_sequences_as_planned_fit_and_no_more() -> None:
    """The engine's memory itself: that many leases are given, one more is refused."""
    made = engine_of(checkpoint("lfm2"), prefix_cache=False)
    plan = planned("lfm2", lengths=(200,))
    fit = plan.fits[0].sequences
    assert fit > 3
    transaction = made.core.memory.transaction()
    given = 0
    while transaction.open(given, made.core.memory.match([1] * 200, salt=""), 200):  # type: ignore[arg-type]
        given += 1
    assert given == fit
    made.core.close()


def test_a_plan_of_a_gguf_file_counts_the_forms_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = make_checkpoint(tmp_path / "wide", "lfm2", hidden_size=512, intermediate_size=1536)
    types = {"blk.": GGMLQuantizationType.Q4_K, "token_embd": GGMLQuantizationType.Q6_K}
    file = write_gguf(source, tmp_path / "a.gguf", types=types)
    made = engine_of(file)
    config = json.loads((resolve_model(file) / "config.json").read_text())
    plan = make_plan("a", config, PlanOptions(arena_bytes=ARENA_BYTES, twelve_bit=True)).weights
    assert plan.form == "Q4_K"  # norms and kernels of convolutions are no matrices
    assert made.info.weights_bytes <= plan.rank_bytes <= 1.1 * made.info.weights_bytes
    del config["quantization_config"]
    wide = make_plan("a", config, PlanOptions(arena_bytes=ARENA_BYTES, twelve_bit=True)).weights
    assert wide.rank_bytes > 1.5 * plan.rank_bytes
    made.core.close()
