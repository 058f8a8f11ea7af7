"""``weft config``: what is set and why, as a file that ``--config`` reads; and the completion of shells."""

from __future__ import annotations

import subprocess
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from weft.cli.main import main
from weft.config import EngineConfig
from weft.config_check import TABLES
from weft.server.config import ServerConfig

EVERY = {f.name: f.metadata.get("table") for config in (EngineConfig, ServerConfig) for f in fields(config)}


def test_what_is_set_is_shown_with_its_source_and_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "weft.toml"
    file.write_text('memory = "2GiB"\nport = 9\napi_key = ["sec\\"ret"]\n\n[limits]\nmax_body_mb = 7\n')
    monkeypatch.setenv("WEFT_MAX_MODEL_LEN", "512")
    monkeypatch.setenv("WEFT_PORT", "10")
    flags = ["config", "--show", "--config", str(file), "--allowed-host", "a", "--allowed-host", "b", "--no-exact"]
    assert main(flags) == 0
    shown = capsys.readouterr().out
    assert 'memory = "2GiB"  # --config file\n' in shown
    assert "port = 10  # WEFT_PORT\n" in shown
    assert "exact = false  # flag\n" in shown
    assert "# api_key is set, and not shown  (--config file)\n" in shown
    assert "ret" not in shown
    assert tomllib.loads(shown) == {
        "memory": "2GiB", "max_model_len": 512, "port": 10, "allowed_host": ["a", "b"], "exact": False,
        "limits": {"max_body_mb": 7},
    }  # fmt: skip
    again = tmp_path / "again.toml"
    again.write_text(shown)
    monkeypatch.delenv("WEFT_PORT")
    monkeypatch.delenv("WEFT_MAX_MODEL_LEN")
    assert main(["config", "--config", str(again)]) == 0
    assert tomllib.loads(capsys.readouterr().out) == tomllib.loads(shown)


def test_without_settings_it_says_so_and_a_wrong_one_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    assert capsys.readouterr().out == "# nothing is set: all settings have their defaults\n"
    assert main(["config", "--port", "70000"]) == 2
    assert "70000" in capsys.readouterr().err
    assert main(["config", "--show", "--example"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_the_example_has_every_key_and_its_lines_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--example"]) == 0
    example = capsys.readouterr().out
    assert set(tomllib.loads(example)) == set(TABLES), "all keys are comments, and each table is there"
    used = tomllib.loads("\n".join(line.removeprefix("# ") for line in example.splitlines() if _is_key(line)))
    found = {name: None for name in used if name not in TABLES}
    found |= {name: table for table in TABLES for name in used[table]}
    assert found == EVERY
    file = tmp_path / "weft.toml"
    file.write_text(example)
    assert main(["config", "--config", str(file)]) == 0
    assert capsys.readouterr().out.startswith("# nothing is set")


def _is_key(line: str) -> bool:
    name = line.removeprefix("# ").partition(" = ")[0]
    return line.startswith("[") or (" = " in line and name in EVERY)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "_WEFT_COMPLETE" in capsys.readouterr().out


def test_bash_takes_the_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    done = subprocess.run(["bash", "-c", f"{script}\ncomplete -p weft"], capture_output=True, text=True, check=True)
    assert "weft" in done.stdout
