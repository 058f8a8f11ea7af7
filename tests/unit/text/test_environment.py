"""Children of a server inherit no secret of its environment that they do not need."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from weft.environment import engine_variables, worker_variables
from weft.text.worker_main import JobFunction
from weft.text.workers import BoundedWorker

SECRETS = {
    "WEFT_API_KEY": "key",
    "WEFT_OPERATOR_KEY": "key",
    "WEFT_TOKEN": "/fleet.token",
    "HF_TOKEN": "hf_x",
    "OPENAI_API_KEY": "sk-x",
    "DATABASE_PASSWORD": "x",
    "PYTHON_KEYRING_SECRET": "x",
}
BUCKET = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "GOOGLE_APPLICATION_CREDENTIALS": "/x"}
PLAIN = {"PATH": "/bin", "HOME": "/root", "LC_ALL": "C", "PYTHONPATH": "src", "LD_LIBRARY_PATH": "/lib"}
DEVICE = {"CUDA_VISIBLE_DEVICES": "0", "HF_HOME": "/hub", "TOKENIZERS_PARALLELISM": "false", "NCCL_DEBUG": "INFO"}
ALL = {**SECRETS, **BUCKET, **PLAIN, **DEVICE}


def prepare(start: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    """A job function whose answer is the environment of its process."""
    return b"", lambda body: json.dumps(dict(os.environ)).encode()


def test_a_worker_has_no_secret_of_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ALL.items():
        if name not in PLAIN:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", os.getcwd()]))
    worker = BoundedWorker(JobFunction("tests.unit.text.test_environment:prepare"), b"")
    try:
        answer = worker.receive(worker.send(b""), 60)
    finally:
        worker.end()
    assert answer is not None
    inherited = json.loads(answer)
    assert not inherited.keys() & {*SECRETS, *BUCKET, *DEVICE}
    assert inherited["PATH"] == os.environ["PATH"]


def test_a_worker_has_what_python_and_its_libraries_read() -> None:
    assert worker_variables(ALL) == PLAIN


def test_an_engine_has_its_devices_and_its_bucket_and_no_key_of_clients() -> None:
    assert engine_variables(ALL, has_bucket=True) == {**BUCKET, **PLAIN, **DEVICE}
    assert engine_variables(ALL, has_bucket=False) == {**PLAIN, **DEVICE}
