"""As in ``tests/server``: a module names its engine with ``FACTORY`` and its flags with ``SERVER``."""

from __future__ import annotations

from tests.server.conftest import model_directory, server

__all__ = ["model_directory", "server"]
