"""``--help`` in groups: every config flag has one heading, and the rare flags wait for ``--help-all``."""

from __future__ import annotations

from dataclasses import fields

import pytest

from weft.cli.flags import FREQUENT, GROUPS
from weft.cli.main import main
from weft.config import EngineConfig
from weft.config_check import flag_name
from weft.server.config import ServerConfig

FIELDS = [f.name for config in (EngineConfig, ServerConfig) for f in fields(config) if "table" not in f.metadata]
GROUPED = [name for names in GROUPS.values() for name in names]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def flags_of(text: str) -> set[str]:
    lines = [line.strip() for line in text.splitlines() if line.startswith("  --")]
    return {line.split()[0].split("/")[0].rstrip(",") for line in lines}


def test_every_flag_is_in_one_group() -> None:
    assert sorted(GROUPED) == sorted(FIELDS)
    assert set(GROUPED) >= FREQUENT


@pytest.mark.parametrize("command", [("serve",), ("generate",), ("chat",), ("eval", "recall")])
def test_help_shows_the_frequent_flags_in_groups_and_help_all_shows_all(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    declared = fields(EngineConfig) + (fields(ServerConfig) if command == ("serve",) else ())
    names = [f.name for f in declared if "table" not in f.metadata]
    text, whole = shown(capsys, *command, "--help"), shown(capsys, *command, "--help-all")
    for heading, members in GROUPS.items():
        assert (f"\n{heading}:\n" in text) == bool(FREQUENT & set(members) & set(names))
    every = {flag_name(name) for name in names}
    assert every <= flags_of(whole)
    assert flags_of(text) & every == {flag_name(name) for name in FREQUENT & set(names)}
    assert "--help-all" in text
    keys = {f.name for f in declared if "table" in f.metadata}
    assert keys <= {line.split()[0] for line in whole.splitlines() if line.startswith("  ")}
    assert "\nConfig file, [debug]:\n" in whole
    assert "Config file, [" not in text
