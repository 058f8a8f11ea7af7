"""What is served is one list, told the same everywhere."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.fixtures.checkpoints import CHECKPOINTS
from tests.fixtures.checkpoints import FAMILIES as TESTED
from tests.unit.models.releases_dense import DENSE_RELEASES
from tests.unit.models.releases_gemma import GEMMA_RELEASES
from tests.unit.models.releases_mamba import MAMBA_RELEASES
from tests.unit.models.test_families import RELEASES
from tests.unit.models.test_families_attention import RELEASES_MORE
from weft.families import FAMILIES, GROUP, all_families, read_spec, served
from weft.families.mixers import BlockShape
from weft.models.block_reader import function

PAGE = (
    (Path(__file__).parents[3] / "docs" / "models.md")
    .read_text(encoding="utf-8")
    .partition("\n## Comparisons with transformers\n")[0]
)


def test_each_family_has_a_release_and_a_test_checkpoint() -> None:
    tables = (RELEASES, RELEASES_MORE, MAMBA_RELEASES, GEMMA_RELEASES, DENSE_RELEASES)
    releases = [config for table in tables for config in table.values()]
    assert {read_spec(config).family for config in releases} == {family.name for family in all_families()}
    assert set(TESTED) <= set(CHECKPOINTS)
    assert {model_type for model_type, _ in CHECKPOINTS.values()} <= set(served())


def test_the_page_on_models_names_every_model_type_served() -> None:
    assert [name for name in served() if f"`{name}`" not in PAGE] == []


def kinds_of(kind: type) -> Iterator[type]:
    for below in kind.__subclasses__():
        yield from (below, *kinds_of(below))


def test_each_reader_that_a_record_or_a_row_of_names_names_is_there() -> None:
    families = all_families()
    rows = [family.names for family in families]
    named = {name for row in rows for name in (row.layer_reader, row.feed_reader, row.ends_reader)}
    named |= {kind.reader for kind in kinds_of(BlockShape) if not getattr(kind, "__abstractmethods__", None)}
    assert len(named) > 30
    assert all(callable(function(name)) for name in named - {""})


def test_each_model_type_of_a_family_in_more_is_an_entry_point() -> None:
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"][GROUP]
    assert set(points) == set(served()) - {name for family in FAMILIES for name in family.model_types} - {"leaky_lm"}
    modules = sorted({value.partition(":")[0].rpartition(".")[2] for value in points.values()})
    more = (root / "src/weft/families/more").glob("[!_]*.py")
    assert modules == sorted(path.stem for path in more)
