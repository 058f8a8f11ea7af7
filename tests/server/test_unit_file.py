"""deploy/weft.service: its flags exist, and it is hardened."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

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
    assert service["RestartPreventExitStatus"] == "2", "flags that cannot work do not work at a second start"
    assert service["SystemCallFilter"] == "@system-service"
    drain_s = next(field.default for field in fields(ServerConfig) if field.name == "drain_timeout")
    assert float(service["TimeoutStopSec"]) > drain_s


def test_systemd_accepts_the_unit_where_there_is_one() -> None:
    verifier = shutil.which("systemd-analyze")
    command = [verifier, "verify", "--man=no", str(UNIT)] if verifier else ["true"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
