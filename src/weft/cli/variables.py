"""Environment variables that begin with ``WEFT_``: which names weft reads, and the warning for others.

    WEFT_MAX_MODEL_LEN=4096     a field of a config: every command that takes the config reads it
    WEFT_URL, WEFT_CONFIG       an option of one command
    WEFT_TEST_DEVICE            read by the tests and the Makefile alone
    WEFT_MAX_MODEL_LENGTH=4096  no name of weft: one warning line on stderr, with the nearest name

A typo in a config file is an error. A typo in a variable is a warning: variables also come from outside. A
cluster that runs a service called ``weft`` sets WEFT_SERVICE_HOST in every container, and the command must
start there. A variable that belongs to another command is known here too: ``weft plan`` beside an exported
WEFT_MEMORY says nothing.

Rejected: an error. Rejected: a check per command, which warns about variables of other commands.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import fields

ENV_PREFIX = "WEFT_"

COMMAND_VARIABLES = frozenset({"WEFT_CONFIG", "WEFT_URL"})
"""Variables that options read and no config field has."""

TEST_VARIABLES = frozenset({"WEFT_TEST_DEVICE", "WEFT_NATIVE_UNDER_TEST", "WEFT_FUZZ_SECONDS",
                            "WEFT_FUZZ_ROUNDS", "WEFT_FUZZ_SEED", "WEFT_TEST_STOPPED_S"})


def unknown_variables(environment: Iterable[str], own: Collection[str] = ()) -> str | None:
    """The warning about names in ``environment`` that weft never reads, or None. ``own``: this command's."""
    doubtful = sorted(name for name in environment if name.startswith(ENV_PREFIX) and name not in own
                      and name not in COMMAND_VARIABLES | TEST_VARIABLES)
    if not doubtful:
        return None
    known = known_variables() | set(own)
    unknown = [name for name in doubtful if name not in known]
    return "; ".join(_sentence(name, known) for name in unknown) or None


def known_variables() -> set[str]:
    """Every variable that a command reads."""
    from weft.config import EngineConfig
    from weft.server.config import ServerConfig

    names = {ENV_PREFIX + f.name.upper() for config in (EngineConfig, ServerConfig) for f in fields(config)}
    return names | COMMAND_VARIABLES


def _sentence(name: str, known: Collection[str]) -> str:
    tails = sorted(one.removeprefix(ENV_PREFIX) for one in known)
    near = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), tails, n=1, cutoff=0.6)
    hint = f": did you mean {ENV_PREFIX}{near[0]}?" if near else ", so it is ignored"
    return f"weft reads no environment variable {name}{hint}"
