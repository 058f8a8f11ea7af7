"""``weft simulate --replicas``: flags and output."""

from __future__ import annotations

import json

import pytest

from weft.cli.main import main
from weft.errors import ConfigError
from weft_tools.commands.simulate_fleet import parse_kills
from weft_tools.sim.fleet_replay import Kill

LINE = [
    "simulate",
    "sample",
    "--model",
    "Qwen3.5-397B-A17B",
    "--tp",
    "8",
    "--quantize",
    "fp8",
    "--memory",
    "4GB",
    "--limit",
    "12",
    "--replicas",
    "2",
]


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


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--router", "fastest"], "--router 'fastest' is not a router"),
        (["--kill", "2@5s"], "--replicas 2 has 0 to 1"),
        (["--kill", "soon"], "REPLICA@SECONDS"),
        (["--policy", "lru,value"], "takes one --policy"),
        (["--replicas", "1001"], "1001"),
    ],
)
def test_bad_flags_are_named(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, *more]) == 2
    assert words in capsys.readouterr().err


ROLES = LINE[:-2]


def test_roles_are_shown_beside_the_same_replicas_without_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ROLES, "--roles", "1p1d", "--router", "split"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    [split] = [row for row in rows if "1p1d" in row]
    [whole] = [row for row in rows if row[:1] == ["none"]]
    assert split[:3] == ["4", "GB", "each"]
    assert split[5].endswith("%"), "how many were split"
    assert len(whole) < len(split), "no share, nothing sent"


def test_json_has_every_number_with_roles_and_without(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ROLES, "--roles", "1p1d", "--router", "split", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    [row], [whole] = data["results"], data["unsplit"]
    assert data["roles"] == "1p1d"
    assert row["splits"] > 0
    assert row["sent_bytes"] > 0
    assert (whole["splits"], whole["sent_bytes"]) == (0, 0)
    for name in ("ttft", "gaps", "hit_rate"):
        assert name in row
        assert name in whole


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--roles", "2p"], "--roles 2p has no decode replica"),
        (["--roles", "0p1d"], "--roles 0p1d has no prefill replica"),
        (["--roles", "xpyd"], "--roles xpyd: it is a list of counts and roles"),
        (["--roles", ""], "--roles : it is a list of counts and roles"),
        (["--roles", "1000p1d"], "--roles 1000p1d: 1001 replicas; the most are 1000"),
        (["--replicas", "2", "--link", "1GB/s"], "--link 1GB/s has no effect without --roles"),
        (["--roles", "1p1d", "--replicas", "3"], "--roles 1p1d are 2 replicas, and --replicas is 3"),
        (["--roles", "1p1d", "--router", "round-robin"], "--router round-robin splits no prompt"),
        (["--roles", "1p1d", "--link", "0"], "--link is '0'"),
        (["--roles", "1p1d", "--link", "fast"], "--link 'fast'"),
        (["--roles", "1p1d", "--kill", "2@5s"], "--kill names replica 2; --roles 1p1d has 0 to 1"),
        (["--roles", "1p1d", "--link", "-3GB/s"], "--link '-3GB/s' is not a rate"),
    ],
)
def test_roles_that_cannot_work_are_named_with_the_flag(
    more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ROLES, *more]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_kills_are_read() -> None:
    assert parse_kills("2@600s, 0@1.5", 3) == [Kill(2, 600.0), Kill(0, 1.5)]
    assert parse_kills(None, 3) == []
    with pytest.raises(ConfigError, match="--kill"):
        parse_kills("", 3)
