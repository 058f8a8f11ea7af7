"""Every number that a command or the config file takes has a bound on both sides, and a value outside of it is refused
in one line that names the value, the limit and the flag. The numbers are those that are declared."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from tests.server.running import running_server
from weft.cli.flags import SAMPLING_FLAGS, Count, FlagCommand, Number, Size
from weft.cli.main import cli, main
from weft.config import EngineConfig
from weft.config_check import flag_name, setting_name, without_none
from weft.request import RANGES
from weft.server.config import ServerConfig
from weft.units import BYTES_MAX, format_bytes

CONFIGS = (EngineConfig, ServerConfig)
DECLARED = {f.name: (config, f) for config in CONFIGS for f in fields(config)}
NEEDED = {("generate",): ("words",), ("batch",): (__file__, "-o", "answers.jsonl")}
"""Arguments without which a command looks at no number."""
VALUES = ("0", "-1", "9" * 30, "nan", "inf", "-inf", "1e308", "1e400", "0B", "1e400GiB", "2EB")


class Bound(NamedTuple):
    """The range of a number. ``open``: without ``least`` itself. ``size``: of a text that is a number of bytes."""

    least: float
    most: float
    open: bool = False
    size: bool = False

    def takes(self, text: str) -> bool | None:
        """None: not a number of this kind, or one that is as long as a number can be written."""
        if self.size:
            count = {"0": 0.0, "0B": 0.0, "1e400GiB": math.inf}.get(text)
            return None if count is None else self.least <= count <= self.most
        try:
            value = float(text)
        except ValueError:
            return None
        return (self.least < value if self.open else self.least <= value) and value <= self.most

    def words(self) -> set[str]:
        """The limits as an error may write them; one of them is the side that was missed."""
        if self.size:
            return {format_bytes(self.least), format_bytes(self.most)}
        return {f"{limit:g}" for limit in (self.least, self.most)} | {f"{limit}" for limit in (self.least, self.most)}


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from commands(inner, (*path, name))


COMMANDS = dict(commands(cli))


def own_options(command: click.Command) -> list[click.Option]:
    """The options of ``command`` that come from no config."""
    configs = command.config_types if isinstance(command, FlagCommand) else ()
    taken = {f.name for config in configs for f in fields(config)}
    return [
        param
        for param in command.params
        if isinstance(param, click.Option) and (param.name or "").removesuffix("_as_flag") not in taken
    ]


def bound_of_field(declared: Field[Any], hint: Any) -> Bound | None:
    """None where the field is no number. A number without a bound fails."""
    about = declared.metadata
    if "size" in about:
        return Bound(about.get("least", 0), BYTES_MAX, size=True)
    if "rate" in about:
        return Bound(1, BYTES_MAX, size=True)
    if without_none(hint) not in (int, float):
        return None
    assert "most" in about, f"{declared.name} has no upper bound"
    assert "least" in about or "above" in about, f"{declared.name} has no lower bound"
    return Bound(about.get("least", about.get("above")), about["most"], open="above" in about)


def bound_of_option(option: click.Option) -> Bound | None:
    """None where the option is no number. A number without a bound fails."""
    kind = option.type
    if isinstance(kind, Size):
        return Bound(kind.least, BYTES_MAX, size=True)
    if option.name in SAMPLING_FLAGS and option.name in RANGES:
        low, high, open_low = RANGES[option.name]
        return Bound(low, high, open=open_low)
    if not isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        return None
    assert isinstance(kind, Count | Number), f"{option.opts} has no bounds: it is a {kind}"
    assert kind.min is not None
    assert kind.max is not None
    return Bound(kind.min, kind.max, open=kind.min_open)


def as_number(text: str) -> float | str:
    """As Python writes it: 1e+30 for thirty digits."""
    try:
        return float(text)
    except ValueError:
        return text


def numbers_of_fields(configs: Sequence[type] = CONFIGS) -> dict[str, Bound]:
    found = {}
    for config in configs:
        hints = typing.get_type_hints(config)
        for f in fields(config):
            bound = bound_of_field(f, hints[f.name])
            if bound is not None:
                found[f.name] = bound
    return found


def refused(arguments: Sequence[str], name: str, value: str, bound: Bound, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with one line that has ``name``, ``value`` and, where that is a number, one of the limits."""
    assert main(list(arguments)) == 2, arguments
    line = capsys.readouterr().err
    assert line.startswith("error: "), (arguments, line)
    assert line.count("\n") == 1, (arguments, line)
    assert name in line, (arguments, line)
    assert value in line or f"{as_number(value)}" in line, (arguments, line)
    kinds = (
        "above 0 bytes a second",
        "is not a valid",
        "is not a whole number",
        "is not a size",
        "is not a rate",
        "a whole number",
        "has no unit",
    )
    assert any(kind in line for kind in kinds) or any(word in line for word in bound.words()), (arguments, line)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_number_of_a_command_outside_of_its_bounds_is_refused_at_once(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    command = COMMANDS[path]
    for option in own_options(command):
        bound = bound_of_option(option)
        for value in VALUES if bound is not None else ():
            if bound is None or bound.takes(value):
                continue
            name = next(opt for opt in option.opts if opt.startswith("--"))
            refused([*path, f"{name}={value}", *NEEDED.get(path, ())], name, value, bound, capsys)
    if isinstance(command, FlagCommand):
        for field, bound in numbers_of_fields(command.config_types).items():
            if DECLARED[field][1].metadata.get("table") or bound.takes("9" * 30):
                continue
            given = f"{flag_name(field)}={'9' * 30}"
            refused([*path, given, *NEEDED.get(path, ())], flag_name(field), "9" * 30, bound, capsys)


@pytest.mark.parametrize("field", numbers_of_fields())
def test_a_number_of_the_config_outside_of_its_bounds_is_refused_by_flag_variable_and_file(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    declared, bound = DECLARED[field][1], numbers_of_fields()[field]
    table = declared.metadata.get("table")
    said = setting_name(declared)
    for value in VALUES:
        if bound.takes(value):
            continue
        if table is None:
            refused(["serve", f"{said}={value}"], said, value, bound, capsys)
        with monkeypatch.context() as patched:
            patched.setenv(f"WEFT_{field.upper()}", value)
            refused(["serve"], said, value, bound, capsys)
    file = tmp_path / "weft.toml"
    for written, shown in (("nan", "nan"), ("-1", "-1"), ("9" * 30, "9" * 30), ("true", "rue")):
        if bound.size or bound.takes(written):
            continue
        file.write_text(f"[{table}]\n" * (table is not None) + f"{field} = {written}\n")
        if written == "true" and DECLARED[field][0].__annotations__[field].startswith("float"):
            continue
        refused(["serve", "--config", str(file)], said, shown, bound, capsys)


def test_a_fraction_in_a_file_is_no_whole_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "weft.toml"
    file.write_text("max_num_seqs = 1.5\n")
    assert main(["serve", "--config", str(file)]) == 2
    assert "'--max-num-seqs': 1.5 is not a whole number" in capsys.readouterr().err


ALONE = {"port", "tp", "http_workers", "threads"}
"""Numbers of processes, of threads and of a port, whose largest value the machine bounds too."""


@pytest.mark.parametrize("side", ["least", "most"])
def test_a_server_with_every_number_at_its_bound_starts_and_answers(side: str, tmp_path: Path) -> None:
    given: dict[type, dict[str, Any]] = {EngineConfig: {}, ServerConfig: {}}
    for field, bound in numbers_of_fields().items():
        config = DECLARED[field][0]
        kind = without_none(typing.get_type_hints(config)[field])
        if field in ALONE or bound.size or field.startswith(("store_", "ray_", "key_")):
            continue
        least = bound.least if not bound.open else (bound.least + bound.most) / 1000
        given[config][field] = kind(least if side == "least" else bound.most)
    if side == "least":
        # These are of the requests below, and as small as they can be they refuse all of them.
        for field in ("max_model_len", "max_tokenize_chars", "template_chars", "template_seconds", "header_timeout"):
            given[ServerConfig].pop(field, None)
            given[EngineConfig].pop(field, None)
        for field in ("max_request_line", "max_header_bytes", "max_headers", "max_connections"):
            del given[ServerConfig][field]
    with running_server("", engine=given[EngineConfig], server=given[ServerConfig]) as server:
        answer = server.post("/v1/completions", {"model": "default", "prompt": "a", "max_tokens": 3})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert "Traceback" not in server.output


@pytest.mark.parametrize(
    ("variables", "arguments", "said"),
    [
        ({}, ["--replicas", "99999"], "--replicas 99999: 99999 replicas; the most are 1000"),
        ({}, ["--replicas", "1000"], "--replicas is 1000; this machine has"),
        ({}, ["--roles", "0p0d"], "--roles 0p0d: 0 replicas; there must be at least 1"),
        ({}, ["--device", "tpu"], "--device is 'tpu'; it may be auto, cpu, cuda or cuda:N, N from 0 to 999"),
        ({}, ["--device", "cuda:99999999999"], "--device is 'cuda:99999999999'; it may be auto, cpu, cuda or cuda:N"),
        ({}, ["--snapshots", "every:0"], "--snapshots is 'every:0'; the N of every:N must be a multiple of 64"),
        ({}, ["--snapshots", "decode:" + "9" * 30], "is not a number of tokens"),
        ({}, ["--default-sampling", "temperature=nan"], "--default-sampling: temperature is nan; it must be at least"),
        ({"WEFT_KEEP_ALIVE": "nan"}, [], "limits.keep_alive 'nan' is not a time"),
        ({"WEFT_STEP_COSTS": "fixed_s=nan"}, [], "debug.step_costs"),
        ({"WEFT_STEP_COSTS": "fixed_s=-1"}, [], "debug.step_costs"),
        ({"WEFT_UDS_MODE": "999"}, ["--uds", "s"], "server.uds_mode is '999'; it is three digits from 0 to 7"),
        ({}, ["--listen-engines", "127.0.0.1:99999"], "--listen-engines 127.0.0.1:99999: it is HOST:PORT"),
    ],
)
def test_a_number_inside_of_a_text_is_refused_as_well(
    variables: dict[str, str],
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", *arguments]) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1
