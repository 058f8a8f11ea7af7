"""/v1/cache of several replicas: their sum, and each one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.engine.rig import Rig
from weft.errors import EngineUnavailableError
from weft.server.cache import cache_reports


def looked(lengths: list[int]) -> tuple[Any, Any]:
    rig = Rig(cache=True)
    for number, length in enumerate(lengths):
        rig.submit(f"r{number}", [at % 90 for at in range(length)], max_tokens=5)
        rig.run()
    return rig.core.stats(), rig.core.cache_shape()


def test_the_report_of_several_keeps_its_form_while_one_alone_answers() -> None:
    engine = looked([70])
    alone, left = cache_reports([(0, *engine)]), cache_reports([(1, *engine)], several=True)
    assert "replicas" not in alone
    assert left["replicas"] == [{"replica": 1, **alone}]
    assert {name: value for name, value in left.items() if name not in ("tree", "replicas")} == {
        name: value for name, value in alone.items() if name != "tree"
    }


def test_without_an_engine_there_is_no_report() -> None:
    with pytest.raises(EngineUnavailableError, match="no engine"):
        cache_reports([])


def test_numbers_add_up_and_shares_do_not() -> None:
    first, second = looked([70, 70]), looked([70, 200, 200])
    one, other = (cache_reports([(0, *part)]) for part in (first, second))
    both = cache_reports([(0, *first), (1, *second)], several=True)
    assert [row["replica"] for row in both["replicas"]] == [0, 1]
    assert both["replicas"][1] == {"replica": 1, **other}
    for name in ("bytes", "nodes", "states", "pages"):
        assert both[name] == one[name] + other[name] > 0, name
    assert both["counts"]["hits"] == one["counts"]["hits"] + other["counts"]["hits"]
    assert min(one["share"], other["share"]) < both["share"] < max(one["share"], other["share"])
    ages = [prefix["age_s"] for prefix in both["tree"]["prefixes"]]
    assert ages == sorted(ages)
    sizes = [row["tokens_max"] for row in both["tree"]["by_depth"]]
    assert len(set(sizes)) == len(sizes)
    assert sum(row["bytes"] for row in both["tree"]["by_depth"]) == sum(
        row["bytes"] for report in (one, other) for row in report["tree"]["by_depth"]
    )
