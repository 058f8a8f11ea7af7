"""Variables for child processes, without secrets that they do not need.

    worker    renders templates, compiles grammars, opens pictures    those of ``_PLAIN``
    engine    and its other ranks                                     all but secrets; with a bucket also its own
    HTTP      process of several                                      all: it is the server

The environment of a server has its API keys, the token of the hub and the credentials of buckets. A worker runs the
template of a checkpoint, which is untrusted code: an escape from the sandbox must not find these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_PLAIN = frozenset({"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV"})
_PLAIN_PREFIXES = ("LC_", "PYTHON", "LD_", "DYLD_", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_", "ASAN_", "UBSAN_")
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH)S?(_|\d|$)", re.IGNORECASE)
_BUCKET_PREFIXES = ("AWS_", "AZURE_", "AZURITE_", "GOOGLE_", "OBJECT_STORE_")


def worker_variables(own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a process that runs untrusted input."""
    plain = {name: value for name, value in own.items() if name in _PLAIN or name.startswith(_PLAIN_PREFIXES)}
    return {name: value for name, value in plain.items() if not _SECRET.search(name)}


def engine_variables(own: Mapping[str, str], *, has_bucket: bool) -> dict[str, str]:
    """Return the variables for an engine. ``has_bucket``: whether it needs the credentials of a bucket."""
    prefixes = _BUCKET_PREFIXES if has_bucket else ()
    return {name: value for name, value in own.items() if name.startswith(prefixes) or not _SECRET.search(name)}
