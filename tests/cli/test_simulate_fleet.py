"""``weft simulate --replicas``: flags and output."""

from __future__ import annotations

import json

import pytest

from weft.cli.main import main
from weft.cli.simulate_fleet import parse_kills
from weft.errors import ConfigError
from weft.sim.fleet_replay import Kill

LINE = ["simulate", "sample", "--model", "Qwen3.5-397B-A17B", "--tp", "8", "--quantize", "fp8",
        "--memory", "4GB", "--limit", "12", "--replicas", "2"]


def test_routers_side_by_side_and_one_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, "--router", "seconds,round-robin", "--kill", "1@30s"]) == 0
    out = capsys.readouterr().out
    for words in ("seconds", "round-robin", "one engine", "4 GB each", "8 GB", "1 deaths"):
        assert words in out, words


def test_json_has_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    [row] = data["results"]
    assert (data["replicas"], row["router"], len(row["replicas"])) == (2, "seconds", 2)
    assert row["requests"] == 12
    assert data["one_engine"][0]["requests"] == 12


@pytest.mark.parametrize(("more", "words"), [
    (["--router", "fastest"], "--router 'fastest' is no router"),
    (["--kill", "2@5s"], "--replicas 2 has 0 to 1"),
    (["--kill", "soon"], "REPLICA@SECONDS"),
    (["--policy", "lru,value"], "takes one --policy"),
    (["--replicas", "1001"], "1001"),
])
def test_bad_flags_are_named(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, *more]) == 2
    assert words in capsys.readouterr().err


def test_kills_are_read() -> None:
    assert parse_kills("2@600s, 0@1.5", 3) == [Kill(2, 600.0), Kill(0, 1.5)]
    assert parse_kills(None, 3) == []
    with pytest.raises(ConfigError, match="--kill"):
        parse_kills("", 3)
