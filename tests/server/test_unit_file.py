"""deploy/weft.service: its flags exist, and it is hardened."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

from weft.config import EngineConfig
from weft.server.config import ServerConfig

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "weft.service"


def _service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return parser["Service"]


def test_the_unit_starts_the_server_with_flags_that_exist() -> None:
    flags = re.findall(r"--([a-z-]+)", _service()["ExecStart"])
    assert "api-key-file" in flags
    assert {flag.replace("-", "_") for flag in flags} <= {field.name for field in fields(ServerConfig)}
    assert "--api-key " not in _service()["ExecStart"]


def test_the_environment_file_names_a_model_and_settings_that_exist() -> None:
    assert _service()["EnvironmentFile"] == "/etc/weft/weft.env"
    lines = [line.lstrip("#") for line in (UNIT.parent / "weft.env").read_text().splitlines() if "=" in line]
    names = {line.partition("=")[0].removeprefix("WEFT_").lower() for line in lines}
    assert "model" in names
    assert names <= {field.name for kind in (ServerConfig, EngineConfig) for field in fields(kind)}


def test_the_unit_takes_no_privileges() -> None:
    service = _service()
    for option in (
        "DynamicUser",
        "NoNewPrivileges",
        "ProtectHome",
        "PrivateTmp",
        "ProtectKernelModules",
        "ProtectKernelTunables",
        "ProtectControlGroups",
        "RestrictNamespaces",
        "LockPersonality",
        "RestrictSUIDSGID",
    ):
        assert service[option] == "yes", option
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    assert {"MemoryMax", "TasksMax"} <= service.keys()
    assert service["UMask"] == "0077"
    assert service["RestartPreventExitStatus"] == "2 203", "no restart mends flags, or the path of the program"
    assert service["SystemCallFilter"] == "@system-service"
    drain_s = next(field.default for field in fields(ServerConfig) if field.name == "drain_timeout")
    assert float(service["TimeoutStopSec"]) > drain_s


def test_systemd_accepts_the_unit_where_there_is_one(tmp_path: Path) -> None:
    verifier = shutil.which("systemd-analyze")
    unit = tmp_path / UNIT.name  # with a program that is there
    unit.write_text(UNIT.read_text().replace("/opt/weft/bin/weft", "/usr/bin/env weft"))
    command = [verifier, "verify", "--man=no", str(unit)] if verifier else ["true"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
