"""What is served is one list, told the same everywhere."""

from __future__ import annotations

from pathlib import Path

from tests.fixtures.checkpoints import CHECKPOINTS
from tests.fixtures.checkpoints import FAMILIES as TESTED
from tests.unit.models.releases_gemma import GEMMA_RELEASES
from tests.unit.models.releases_mamba import MAMBA_RELEASES
from tests.unit.models.test_families import RELEASES
from tests.unit.models.test_families_attention import RELEASES_MORE
from weft.families import FAMILIES, SUPPORTED, read_spec
from weft.models.families import NAMES

PAGE = (
    (Path(__file__).parents[3] / "docs" / "models.md")
    .read_text(encoding="utf-8")
    .partition("\n## What was compared with transformers\n")[0]
)


def test_each_family_has_names_a_release_and_a_test_checkpoint() -> None:
    releases = [*RELEASES.values(), *RELEASES_MORE.values(), *MAMBA_RELEASES.values(), *GEMMA_RELEASES.values()]
    assert {read_spec(config).family for config in releases} == {family.name for family in FAMILIES}
    assert set(NAMES) == {family.name for family in FAMILIES}
    assert set(TESTED) <= set(CHECKPOINTS)
    assert {model_type for model_type, _ in CHECKPOINTS.values()} <= set(SUPPORTED)


def test_the_page_on_models_names_every_model_type_served() -> None:
    assert [name for name in SUPPORTED if f"`{name}`" not in PAGE] == []
