"""As in ``tests/server``: a module names its engine with ``FACTORY`` and its flags with ``SERVER``."""

from __future__ import annotations

import shutil

import pytest

from tests.server.conftest import model_directory, server

__all__ = ["model_directory", "server"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if shutil.which("chromium") is None:
        terminalreporter.write_line("left out: the browser of tests/hostile, as no chromium is installed")
