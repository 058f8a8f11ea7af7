"""Every checkpoint of the fixtures over two and four ranks: logits, bytes read, and memory against the plan.

Ranks are threads of this process (``tests.ranks.threads``), so a family costs a tenth of a second.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch

from tests.fixtures.checkpoints import CHECKPOINTS, checkpoint, make_checkpoint
from tests.ranks.threads import ThreadCollectives, load_ranks, logits_of
from weft.errors import ConfigError
from weft.families import read_architecture
from weft.families.sharding import possible_tps
from weft.memory.frames.plan import plan_arena
from weft.models import loading
from weft.models.blocks.attention import AttentionBlock
from weft.models.blocks.rwkv import Shifted
from weft.models.checkpoint_files import CheckpointFiles
from weft.models.loading import LoadedModel, load_model
from weft.models.rotary import RotaryTable
from weft.models.safetensors_header import StoredTensor
from weft.models.sharding import Shard
from weft.models.stored_values import MappedFiles
from weft.planning.model_plan import PlanOptions, make_plan
from weft.runner.arena import DeviceArena
from weft.tensor.weights.tiles import TiledWeight

TOLERANCE = 1e-5
ARENA_BYTES = 3 << 20
MORE_HEADS: dict[str, dict[str, int]] = {
    "qwen3_5": {"linear_num_key_heads": 4},
    "qwen3_5_moe": {"linear_num_key_heads": 4},
    "qwen3_next": {"linear_num_key_heads": 4},
    "olmo_hybrid_rope": {"linear_num_key_heads": 4},
    "mamba2": {"num_heads": 12, "head_dim": 8},
    "bamba": {"mamba_n_heads": 12, "mamba_d_head": 8},
    "falcon_h1": {"mamba_n_heads": 12, "mamba_d_head": 8},
    "nemotron_h_moe": {"mamba_num_heads": 12, "mamba_head_dim": 8},
    "zamba2": {"n_mamba_heads": 12, "mamba_headdim": 8},
    "zaya": {"num_key_value_heads": 4},
}
"""What four ranks divide in place of the fixture's numbers, one checkpoint of each family that needs it."""
_NOT_WEIGHTS = (RotaryTable, ThreadCollectives, FunctionType, ModuleType, type)


def held_bytes(model: object) -> int:
    """Return the bytes of the tensors that ``model`` reaches, each storage once. Rotary angles, distances of ALiBi, the
    ones and zeros of RWKV's shifts, and rows that fill last tiles up to 16 are left out: no plan counts them, and they
    are some percent of these models."""
    storages, visited, reached, padding = dict[int, int](), set[int](), [model], 0
    while reached:
        holder = reached.pop()
        if id(holder) in visited or isinstance(holder, _NOT_WEIGHTS):
            continue
        visited.add(id(holder))
        if isinstance(holder, torch.Tensor):
            storage = holder.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        else:
            padding += holder.tiles.nbytes - holder.nbytes if isinstance(holder, TiledWeight) else 0
            padding += holder._shift.nbytes if isinstance(holder, Shifted) else 0
            padding += sum(x.nbytes for x in holder.bias or ()) if isinstance(holder, AttentionBlock) else 0
            reached += gc.get_referents(holder)
    return sum(storages.values()) - padding


def convolution_bytes(directory: Path) -> int:
    """Of convolutions in three tensors, which a rank reads whole. Here they are 1 % of a model."""
    tensors = CheckpointFiles.open(directory).tensors
    return sum(
        stored.stored_bytes
        for name, stored in tensors.items()
        if name.endswith(("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"))
    )


def positions_bytes(config: dict[str, object]) -> int:
    """Return the bytes of the positions that are added to the embedding, which every rank reads."""
    architecture = read_architecture(config)
    positions = architecture.residual.positions
    tables = [] if positions is None else positions.table(architecture.hidden_size).values()
    return sum(4 * tensor.elements(1) for tensors in tables for tensor in tensors)


def once(used: Callable[..., set[str]]) -> Callable[..., set[str]]:
    """Return ``used`` of one checkpoint, computed for the first rank: each would build the whole model for them."""
    names: list[set[str]] = []

    def used_by_all_ranks(*checkpoint: object) -> set[str]:
        if not names:
            names.append(used(*checkpoint))
        return names[0]

    return used_by_all_ranks


def check(
    directory: Path, size: int, whole: LoadedModel, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = [0]
    copied = MappedFiles.read

    def counted(files: MappedFiles, stored: StoredTensor, shard: Shard | None = None) -> torch.Tensor:
        tensor = copied(files, stored, shard)
        is_whole = not stored.transposed  # read as the tensor of the file, which counts
        read[0] += tensor.nbytes if is_whole and not (shard is not None and shard.absent) else 0
        return tensor

    with monkeypatch.context() as patch:
        patch.setattr(MappedFiles, "read", counted)
        patch.setattr(loading, "check_derived", lambda *_: None)  # reads what no rank keeps
        patch.setattr(loading, "_used_by_all_ranks", once(loading._used_by_all_ranks))
        ranks = load_ranks(directory, size)
    holds = [held_bytes(loaded.model) for loaded in ranks]
    config = json.loads((directory / "config.json").read_text())
    plan = make_plan("", config, PlanOptions(arena_bytes=ARENA_BYTES, tp=size))
    gap = float((logits_of(ranks) - expected).abs().max() / expected.abs().max())
    assert gap < TOLERANCE
    planned, of_all = plan.weights.rank_bytes, positions_bytes(config)
    read_planned = planned + convolution_bytes(directory) * (size - 1) // size
    assert read[0] == sum(loaded.read_bytes for loaded in ranks)
    assert read[0] == pytest.approx(size * read_planned, rel=0.02)
    for loaded, held in zip(ranks, holds, strict=True):
        assert plan_arena(loaded.spec, ARENA_BYTES) == plan.arena
        arena = DeviceArena(plan.arena, torch.device("cpu"))
        assert held + arena.buffer.nbytes == pytest.approx(planned + plan.arena.arena_bytes, rel=0.01)
        assert held == pytest.approx(planned, rel=0.01)
        assert loaded.weights_bytes == pytest.approx(read_planned, rel=0.01)
        assert loaded.read_bytes == pytest.approx(read_planned, rel=0.02)
        assert loaded.read_bytes - of_all < (0.75 if size == 2 else 0.5) * (whole.read_bytes - of_all)
        arena.release()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_ranks_compute_read_and_hold_their_share(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two ranks, and with four where the fixture has numbers that four divide."""
    directory = checkpoint(name)
    whole = load_model(directory)
    expected = logits_of([whole])
    sizes = possible_tps(read_architecture(json.loads((directory / "config.json").read_text())))
    assert 2 in sizes
    for size in {2, 4}.intersection(sizes):
        check(directory, size, whole, expected, monkeypatch)


@pytest.mark.parametrize("name", MORE_HEADS)
def test_four_ranks_with_more_heads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_checkpoint(tmp_path, name, **MORE_HEADS[name])
    whole = load_model(directory)
    with pytest.raises(ConfigError, match="--tp is 4, which does not divide"):
        load_ranks(checkpoint(name), 4)
    check(directory, 4, whole, logits_of([whole]), monkeypatch)
