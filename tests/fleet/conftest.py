"""The fixtures of the server's tests."""

from tests.server.conftest import model_directory, server

__all__ = ["model_directory", "server"]
