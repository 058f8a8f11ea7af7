"""Checks of a config dataclass by its declaration: type hints give types and choices, metadata gives ranges.

    overlap: Literal["auto", "on", "off"]              one of those
    threads: int | None, least=1, most=1024            a whole number in that range, or None
    exact: bool                                        True or False
    memory: str | None                                 text, or None

The command line converts text, so it can only get choices and ranges wrong. Python keywords can be anything, and values
of a settings file too. All sources get the same message, which names the flag. An unknown field name gets the hint that
the command line gives for the flag: its name here, or the nearest one.
"""

from __future__ import annotations

import difflib
import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import Field, field, fields
from typing import Any, get_args, get_origin

from weft.errors import ConfigError
from weft.foreign import foreign_flag, foreign_sentence
from weft.units import parse_byte_rate, parse_bytes

TABLES = ("limits", "cache", "server", "debug")
"""Tables of the config file whose fields have no flag: bounds, settings of the prefix cache and of the server that are
made once for a deployment, and switches for comparisons."""


def flag(default: Any, help: str, **more: Any) -> Any:
    """Return a field that is a flag, or with ``table`` a key of that table of the config file. ``more``:
    ``positional``; ``least``, ``above`` and ``most`` bound a number; ``size`` marks a text that is a number of bytes,
    ``least`` bounds it, ``rate`` marks bytes a second."""
    return field(default=default, metadata={"help": help, **more})


def limit(default: Any, help: str, **more: Any) -> Any:
    """Return a field of the table ``[limits]`` of the config file: a bound whose default rarely changes."""
    return flag(default, help, table="limits", **more)


def debug(default: Any, help: str, **more: Any) -> Any:
    """Return a field of the table ``[debug]``: a switch for comparisons, or to find a fault."""
    return flag(default, help, table="debug", **more)


def flag_name(field_name: str) -> str:
    """Return ``--max-model-len`` for ``max_model_len``."""
    return "--" + field_name.replace("_", "-")


def setting_name(declared: Field[Any]) -> str:
    """Return the name of a field in errors and help: ``--max-model-len``, or ``limits.max_body_mb`` as TOML spells
    it."""
    table = declared.metadata.get("table")
    return flag_name(declared.name) if table is None else f"{table}.{declared.name}"


def without_none(hint: Any) -> Any:
    """Return ``T`` for ``T | None``; any other hint as it is."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        [hint] = [arm for arm in get_args(hint) if arm is not type(None)]
    return hint


_hints_of = functools.cache(typing.get_type_hints)
"""Types of a class's fields by name. Each is written as text, which is compiled to find it: 2 ms of a start."""


def check_fields(config: Any) -> None:
    """Raise ConfigError for the first field of the dataclass ``config`` with a value that the declaration excludes."""
    kind: Any = type(config)
    hints = _hints_of(kind)
    for declared in fields(config):
        value, hint = getattr(config, declared.name), hints[declared.name]
        inner = without_none(hint)
        if value is None and inner is not hint:
            continue
        wrong = _wrong(value, inner, declared)
        if wrong is not None:
            raise ConfigError(f"{setting_name(declared)} is {value!r}; {wrong}", param=setting_name(declared))
        if "size" in declared.metadata:
            parse_bytes(value, flag=setting_name(declared), least=declared.metadata.get("least", 0))
        if "rate" in declared.metadata:
            parse_byte_rate(value, flag=setting_name(declared))


def known_fields(config_type: Any, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``settings`` if all its keys are names of fields. Raise ConfigError that suggests a similar name."""
    names = [declared.name for declared in fields(config_type)]
    for name in settings:
        if name not in names:
            raise ConfigError(unknown_name(name, names), param=name)
    return settings


def unknown_name(name: str, names: Iterable[str]) -> str:
    """Return the message for an unknown keyword."""
    foreign = foreign_flag(flag_name(name))
    if foreign is not None:
        return foreign_sentence(flag_name(name), foreign)
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"there is no keyword {name}; " + (
        f"did you mean {near[0]}?" if near else f"the keywords are {', '.join(names)}"
    )


def _wrong(value: object, hint: Any, declared: Field[Any]) -> str | None:
    """Return the valid values, as the end of a sentence; None if ``value`` is valid."""
    if get_origin(hint) is typing.Literal:
        choices = [str(choice) for choice in get_args(hint)]
        return None if value in get_args(hint) else f"it may be {', '.join(choices[:-1])} or {choices[-1]}"
    if hint is bool:
        return None if isinstance(value, bool) else "it is True or False"
    if hint is str:
        example = ", such as '4GiB'" if declared.name == "memory" else ""
        return None if isinstance(value, str) else f"it must be text{example}"
    if get_origin(hint) is tuple:
        right = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        return None if right else "it must be a tuple of texts"
    assert hint in (int, float), f"{declared.name}: no check for {hint}"
    kinds, kind = ((int,), "a whole number") if hint is int else ((int, float), "a number")
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
        return f"it must be {kind}{_range_in_words(declared)}"
    metadata = declared.metadata
    inside = (
        value >= metadata.get("least", -math.inf)
        and value <= metadata.get("most", math.inf)
        and value > metadata.get("above", -math.inf)
    )
    return None if inside else "it must be" + _range_in_words(declared)


def _range_in_words(declared: Field[Any]) -> str:
    words = [
        f"{word} {declared.metadata[key]}"
        for key, word in (("least", "at least"), ("above", "above"), ("most", "at most"))
        if key in declared.metadata
    ]
    return " " + " and ".join(words) if words else ""
