"""Flags made from config dataclasses: flag = config field = Python keyword = config file key.

    EngineConfig.max_model_len  ->  --max-model-len   WEFT_MAX_MODEL_LEN   max_model_len = 4096  (TOML)
    ServerConfig.max_body_mb    ->                    WEFT_MAX_BODY_MB     [limits] max_body_mb = 128
                                       1st                 2nd                3rd             then the default

click asks the command line, then the environment, then its default map, which is where ``--config FILE`` is loaded. A
value is converted by the same type from every source, and an error names the source. A field with a ``table`` has a
variable and a key of that table, and no flag.

A typo in a config file is an error. A typo in a variable is a warning: Kubernetes sets WEFT_SERVICE_HOST in every
container next to a service called ``weft``, and the command must start there. An unknown flag is looked up among the
fields of tables, in ``foreign`` (flags of other engines), then among similar names.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import click
from click.core import ParameterSource

from weft.config import DTYPE_SPELLINGS
from weft.config_check import TABLES, check_fields, flag_name, setting_name, without_none
from weft.errors import ConfigError, RequestError
from weft.foreign import foreign_flag, foreign_sentence
from weft.units import parse_byte_rate, parse_bytes

ConfigT = TypeVar("ConfigT")
ENV_PREFIX = "WEFT_"
COMMAND_VARIABLES = frozenset({"WEFT_CONFIG", "WEFT_URL", "WEFT_MODEL_DIR"})
"""Variables of options that are not config fields."""
TEST_VARIABLES = frozenset(
    {
        "WEFT_TEST_DEVICE",
        "WEFT_NATIVE_UNDER_TEST",
        "WEFT_FUZZ_SECONDS",
        "WEFT_FUZZ_ROUNDS",
        "WEFT_FUZZ_SEED",
        "WEFT_CONFIG_FUZZ",
        "WEFT_TEST_COST_SCALE",
        "WEFT_TEST_STOPPED_S",
    }
)
GROUPS: dict[str, tuple[str, ...]] = {
    "Model": ("model", "revision", "dtype", "quantize", "weights_cache", "seed", "default_sampling",
              "served_model_name", "pulled", "chat_template", "reasoning_parser", "tool_parser", "lora"),
    "Memory": ("memory", "gpu_memory_fraction", "max_model_len", "kv_dtype", "state_dtype"),
    "Cache": ("prefix_cache", "snapshots", "exact", "store", "store_size"),
    "Scheduling": ("max_num_seqs", "max_num_batched_tokens", "max_step_ms", "speculate",
                   "priority_across_keys"),
    "Server": ("host", "port", "uds", "log_level", "log_format", "log_file", "otlp_endpoint", "record",
               "kv_events_config", "replicas", "roles", "listen_engines", "token", "http_workers", "ray",
               "stream_interval"),
    "Security": ("api_key", "api_key_file", "operator_key", "ssl_certfile", "ssl_keyfile",
                 "allowed_host", "allowed_origin", "media_domains", "tenant_by_key", "trust_control_tokens"),
    "Device": ("device", "threads", "tp", "ep"),
}  # fmt: skip
FREQUENT = frozenset(
    {
        "model",
        "dtype",
        "quantize",
        "served_model_name",
        "lora",
        "memory",
        "max_model_len",
        "kv_dtype",
        "state_dtype",
        "prefix_cache",
        "exact",
        "store",
        "store_size",
        "max_num_seqs",
        "speculate",
        "host",
        "port",
        "replicas",
        "listen_engines",
        "record",
        "api_key",
        "operator_key",
        "allowed_host",
        "tenant_by_key",
        "device",
        "threads",
        "tp",
    }
)
"""Names of the fields that ``--help`` shows."""
AS_FLAG = "_as_flag"
"""Suffix of the hidden twin of a positional field: ``--model X`` for ``MODEL``."""
_SHOW_ALL = "weft.help_all"
VOCABULARY_MAX = 2**31
"""Stand-in for the size of a vocabulary in checks: no flag names a token."""
COUNT_MAX = 1_000_000
"""Most requests or repetitions of a measurement."""
PORTS_MAX = 65_535
"""Ports of a machine, which bound its connections to a server."""
DAY_S = 86_400.0
SAMPLING_FLAGS: dict[str, tuple[click.ParamType[Any], str]] = {
    "max_tokens": (click.INT, "Most tokens of the answer."),
    "temperature": (click.FLOAT, "0 takes the likeliest token; higher is more varied."),
    "top_p": (click.FLOAT, "Choose among the likeliest tokens that together reach this probability."),
    "top_k": (click.INT, "Choose among this many of the likeliest tokens; 0: all."),
    "min_p": (click.FLOAT, "Drop tokens below this share of the likeliest one's probability."),
    "repetition_penalty": (click.FLOAT, "Above 1, tokens of prompt and answer get less likely."),
    "presence_penalty": (click.FLOAT, "Above 0, tokens of the answer get less likely, once each."),
    "frequency_penalty": (click.FLOAT, "Above 0, tokens of the answer get less likely, each time."),
    "min_tokens": (click.INT, "Fewest tokens before the model may end."),
    "stop": (click.STRING, "End before this text; may be given several times."),
}
"""Field of SamplingParams -> type and help. A flag that is not set stays out of the request, so that the model's
generation defaults apply."""


class _ListItem(click.types.StringParamType):
    """The type of a text that may be given several times; its environment variable separates values by commas."""

    envvar_list_splitter = ","


class _Whole(click.types.IntParamType):
    """The type of a whole number, which refuses 1.5 and true from a file; click's own type would make 1 of both."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, bool | float):
            self.fail(f"{value} is not a whole number.", param, ctx)
        return int(super().convert(value, param, ctx))


class Count(click.IntRange):
    """The type of a whole number from ``least`` to ``most``. Every number of a command has a bound on both sides; the
    error names both."""

    def __init__(self, least: int, most: int) -> None:
        super().__init__(least, most)


class Number(click.FloatRange):
    """The type of a number from ``least`` to ``most``; ``above``, ``below``: exclusive bounds. NaN is outside of every
    range, and so is infinity unless it is ``most``."""

    def __init__(self, least: float, most: float, *, above: bool = False, below: bool = False) -> None:
        super().__init__(least, most, min_open=above, max_open=below)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


class Size(click.types.StringParamType):
    """The type of a text that is a size of at least ``least`` bytes. ``a_second``: bytes per second; ``several``: sizes
    separated by commas."""

    name = "size"

    def __init__(self, *, least: int = 1, a_second: bool = False, several: bool = False) -> None:
        self.least = least
        self._parse = parse_byte_rate if a_second else partial(parse_bytes, least=least)
        self._several = several

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(super().convert(value, param, ctx))
        flag = param.opts[0] if param is not None else "a size"
        for size in filter(str.strip, text.split(",")) if self._several else (text,):
            self._parse(size, flag=flag)
        return text


class SpelledChoice(click.Choice[str]):
    """A choice that also takes other spellings of a dtype: ``bf16`` is ``bfloat16``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        spelled = DTYPE_SPELLINGS.get(str(value).lower(), value)
        return super().convert(spelled if spelled in self.choices else value, param, ctx)


class TableSetting(click.Option):
    """A field of a table: click reads it from the variable and the file, never from the command line."""

    def __init__(self, declared: Field[Any], kind: click.ParamType[Any], **more: Any) -> None:
        self.setting, self.table = setting_name(declared), declared.metadata["table"]
        super().__init__(
            [flag_name(declared.name), declared.name],
            type=kind,
            help=declared.metadata["help"],
            envvar=ENV_PREFIX + declared.name.upper(),
            default=declared.default,
            show_default=True,
            **more,
        )

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Add no flag: the command line cannot set this field."""

    def get_error_hint(self, ctx: click.Context | None) -> str:
        return f"'{self.setting}'"

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        _, text = super().get_help_record(ctx) or ("", "")
        return f"{self.name} {self.make_metavar(ctx)}", text


class FlagCommand(click.Command):
    """A command whose flags come from ``configs`` in addition to its own ``params``.

    The callback gets each field by name, positional and ``--model`` twins already merged. With ``positional`` False
    positional fields have only their flag, for commands with other arguments.
    """

    def __init__(self, *args: Any, configs: Sequence[type] = (), positional: bool = True, **more: Any) -> None:
        super().__init__(*args, **more)
        self.config_types = tuple(configs)
        for config_type in self.config_types:
            known = {param.name for param in self.params}  # a field of both configs is one parameter
            self.params += [
                param for param in parameters_of(config_type, positional=positional) if param.name not in known
            ]
        if self.config_types:
            self.params += [_config_file_option(), help_all_option()]
            self.epilog = (
                f"A flag is also a variable ({ENV_PREFIX}MAX_MODEL_LEN) and a key of the --config "
                "file (max_model_len); the command line wins, then the variable. A setting in a table of "
                "the file ([limits], [debug]) is a variable and a key, not a flag."
            )

    @property
    def flag_names(self) -> list[str]:
        """Every ``--flag`` this command takes."""
        return [
            opt
            for param in self.params
            if isinstance(param, click.Option) and not isinstance(param, TableSetting)
            for opt in (*param.opts, *param.secondary_opts)
            if opt.startswith("--")
        ]

    @property
    def settings(self) -> dict[str, TableSetting]:
        """The fields of tables, by their names."""
        return {param.name: param for param in self.params if isinstance(param, TableSetting) and param.name}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.config_types:
            names = {f.name for config_type in self.config_types for f in fields(config_type)}
            write_groups(
                ctx,
                formatter,
                self.get_params(ctx),
                names,
                {name: param.table for name, param in self.settings.items()},
            )
        else:
            super().format_options(ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = list(args)
        self._warn_of_variables()
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(self.unknown_flag(error.option_name, typed), ctx) from None
        except click.BadParameter as error:
            where = _where_from(ctx, error.param)
            if not where:
                raise
            raise click.BadParameter(error.message + where, ctx, error.param) from None
        _merge_positional(ctx)
        for config_type in self.config_types:
            check_fields(build(config_type, ctx.params))
        return rest

    def _warn_of_variables(self) -> None:
        own = {
            name
            for param in self.params
            for name in ([param.envvar] if isinstance(param.envvar, str) else param.envvar or ())
        }
        warning = unknown_variables(os.environ, own)
        if warning is not None:
            click.echo(f"warning: {warning}", err=True)

    def unknown_flag(self, name: str, args: Sequence[str]) -> str:
        """Return the message for an unknown flag. ``name``: the text at which click stopped. For combined letters such
        as ``-hf`` that is ``-f``, so the typed argument is looked up first.
        """
        heads = (arg.split("=", 1)[0] for arg in args)
        typed = next((head for head in heads if foreign_flag(head) and _could_be(name, head)), name)
        moved = self.settings.get(typed.lstrip("-").removeprefix("no-").replace("-", "_"))
        if moved is not None:
            return (
                f"{typed} is not a flag: it is {moved.setting} of the --config file (under "
                f"[{moved.table}]), or the variable {moved.envvar}"
            )
        foreign = foreign_flag(typed)
        if foreign is not None:
            return foreign_sentence(typed, foreign)
        near = difflib.get_close_matches(typed, self.flag_names, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"`{self.name} --help` lists the flags"
        return f"there is no flag {typed}; {hint}"


def parameters_of(config_type: type, *, positional: bool = True) -> list[click.Parameter]:
    """Return click parameters for every field of a config dataclass, in its order."""
    hints = typing.get_type_hints(config_type)
    return [
        param
        for f in fields(config_type)
        for param in _parameters(f, hints[f.name], positional and f.metadata.get("positional", False))
    ]


def build(config_type: Callable[..., ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Return the config object out of a callback's ``values``; names of other configs are ignored."""
    own = {f.name for f in fields(typing.cast(Any, config_type))}
    return config_type(**{name: value for name, value in values.items() if name in own})


def given_flags(ctx: click.Context, config_type: type) -> dict[str, Any]:
    """Return the fields of ``config_type`` that the command line, a variable or the file sets."""
    return {
        f.name: ctx.params[f.name]
        for f in fields(config_type)
        if f.name in ctx.params and ctx.get_parameter_source(f.name) is not ParameterSource.DEFAULT
    }


def arguments_of(config: Any) -> list[str]:
    """Return the command line that gives the flags of ``config`` again: one for each value that differs from its
    default."""
    arguments: list[str] = []
    for f in fields(config):
        value = getattr(config, f.name)
        if value == f.default or "table" in f.metadata:
            continue
        if isinstance(value, bool):
            arguments.append(flag_name(f.name if value else "no_" + f.name))
        else:
            items = value if isinstance(value, tuple) else (value,)
            arguments += [f"{flag_name(f.name)}={item}" for item in items]
    return arguments


def variables_of(config: Any) -> dict[str, str]:
    """Return the environment that gives the limits and debug switches of ``config`` again."""
    return {
        ENV_PREFIX + f.name.upper(): str(value)
        for f in fields(config)
        if "table" in f.metadata and (value := getattr(config, f.name)) != f.default
    }


def _parameters(f: Field[Any], hint: Any, positional: bool) -> list[click.Parameter]:
    assert f.default is not MISSING, f"config field {f.name} has no default: flags are all optional"
    inner = without_none(hint)
    if "table" in f.metadata:
        return [TableSetting(f, click.BOOL if inner is bool else _click_type(inner))]
    help_text, variable = f.metadata["help"], ENV_PREFIX + f.name.upper()
    default = f.default
    if inner is bool:
        both = f"{flag_name(f.name)}/{flag_name('no_' + f.name)}"
        return [click.Option([both], default=default, help=help_text, envvar=variable, show_default=True)]
    several = get_origin(inner) is tuple
    kind: click.ParamType[Any] = _ListItem() if several else _click_type(inner)
    if positional:
        assert default is None
        return [
            click.Argument([f.name], required=False, type=kind, envvar=variable),
            click.Option([flag_name(f.name), f.name + AS_FLAG], type=kind, help=help_text),
        ]
    names = [flag_name(f.name), *f.metadata.get("also", ()), f.name]
    return [
        click.Option(
            names,
            type=kind,
            multiple=several,
            default=default,
            envvar=variable,
            help=help_text,
            show_default=default not in (None, ()),
        )
    ]


def _could_be(name: str, head: str) -> bool:
    """Return whether click, reading the argument ``head``, stops at the option ``name``."""
    return head == name or (not head.startswith("--") and name.removeprefix("-") in head)


def _click_type(inner: Any) -> click.ParamType[Any]:
    if get_origin(inner) is typing.Literal:
        return SpelledChoice([str(arm) for arm in get_args(inner)])
    plain: dict[Any, click.ParamType[Any]] = {int: _Whole(), float: click.FLOAT, str: click.STRING}
    return plain[inner]


def _merge_positional(ctx: click.Context) -> None:
    for name in [n for n in ctx.params if n.endswith(AS_FLAG)]:
        value, field_name = ctx.params.pop(name), name.removesuffix(AS_FLAG)
        if value is None:
            continue
        typed = ctx.get_parameter_source(field_name) is ParameterSource.COMMANDLINE
        if typed and ctx.params.get(field_name) not in (None, value):
            raise click.UsageError(
                f"two values for {field_name}: {ctx.params[field_name]} and {flag_name(field_name)} {value}", ctx
            )
        ctx.params[field_name] = value
        ctx.set_parameter_source(field_name, ParameterSource.COMMANDLINE)


def _where_from(ctx: click.Context, param: click.Parameter | None) -> str:
    source = ctx.get_parameter_source(param.name) if param is not None and param.name else None
    if source is ParameterSource.ENVIRONMENT and param is not None:
        return f" (from the environment variable {param.envvar})"
    if source is ParameterSource.DEFAULT_MAP:
        return " (from the --config file)"
    return ""


def _config_file_option() -> click.Option:
    return click.Option(
        ["--config", "config_file"],
        type=click.Path(path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_load_config_file,
        envvar=ENV_PREFIX + "CONFIG",
        help="TOML file with the same names as the flags.",
    )


def _load_config_file(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    command = ctx.command
    assert isinstance(command, FlagCommand)
    known = {f.name: f.metadata.get("table") for config_type in command.config_types for f in fields(config_type)}
    values: dict[str, Any] = {}
    for table, name, value in _settings_of(_read_toml(path)):
        if isinstance(value, dict):
            raise click.UsageError(f"{path}: there is no table [{name}]; the tables are {', '.join(TABLES)}", ctx)
        if table is None and name in TABLES:
            raise click.UsageError(f"{path}: {name} is a table: its keys go under a line [{name}]", ctx)
        if name not in known:
            raise click.UsageError(f"{path}: {command.unknown_flag(flag_name(name), ())}", ctx)
        if known[name] != table:
            place = f"under [{known[name]}]" if known[name] else "at the top, above every [table]"
            raise click.UsageError(f"{path}: {name} belongs {place}", ctx)
        values[name] = value
    ctx.default_map = values


def _settings_of(document: Mapping[str, Any]) -> Iterator[tuple[str | None, str, Any]]:
    """Yield (table or None, field, value) of every key of a config file."""
    for key, value in document.items():
        if key in TABLES and isinstance(value, dict):
            yield from ((key, name.replace("-", "_"), setting) for name, setting in value.items())
        else:
            yield None, key.replace("-", "_"), value


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.UsageError(f"--config {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--config {path} is not TOML: {error}") from None


def unknown_variables(environment: Iterable[str], own: Collection[str] = ()) -> str | None:
    """Return the warning about names in ``environment`` that weft never reads, or None. ``own``: variables of this
    command."""
    doubtful = sorted(
        name
        for name in environment
        if name.startswith(ENV_PREFIX) and name not in own and name not in COMMAND_VARIABLES | TEST_VARIABLES
    )
    if not doubtful:
        return None
    known = known_variables() | set(own)
    unknown = [name for name in doubtful if name not in known]
    return "; ".join(_sentence(name, known) for name in unknown) or None


def known_variables() -> set[str]:
    """Return every variable that a command reads."""
    from weft.config import EngineConfig
    from weft.server.config import ServerConfig

    names = {ENV_PREFIX + f.name.upper() for config in (EngineConfig, ServerConfig) for f in fields(config)}
    return names | COMMAND_VARIABLES


def _sentence(name: str, known: Collection[str]) -> str:
    tails = sorted(variable.removeprefix(ENV_PREFIX) for variable in known)
    tail = name.removeprefix(ENV_PREFIX)
    other = foreign_flag(flag_name(tail.lower()))
    renamed = other.instead.lstrip("-").replace("-", "_").upper() if other is not None else ""
    near = [renamed] if renamed in tails else difflib.get_close_matches(tail, tails, n=1, cutoff=0.6)
    hint = f": did you mean {ENV_PREFIX}{near[0]}?" if near else ", so it is ignored"
    return f"weft reads no environment variable {name}{hint}"


def help_all_option() -> click.Option:
    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_all,
        help="Every flag, and every key of the config file, in full.",
    )


def _show_all(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted:
        ctx.meta[_SHOW_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def write_groups(
    ctx: click.Context,
    formatter: click.HelpFormatter,
    params: Sequence[click.Parameter],
    config_fields: Collection[str],
    tables: Mapping[str, str],
) -> None:
    """Write the options under their headings; options that are not config fields come under Options. ``tables``: fields
    that are only keys of the config file."""
    show_all = ctx.meta.get(_SHOW_ALL, False)
    headings = {name: heading for heading, names in GROUPS.items() for name in names if name in config_fields}
    headings |= {name: f"Config file, [{table}]" for table in TABLES for name in tables if tables[name] == table}
    rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in ("Options", *headings.values())}
    for param in params:
        if isinstance(param, click.Argument):
            continue
        field = (param.name or "").removesuffix(AS_FLAG)
        record = param.get_help_record(ctx)
        if record is not None and (show_all or field not in headings or field in FREQUENT):
            name, text = record
            rows[headings.get(field, "Options")].append((name, text if show_all else _first_sentence(text)))
    for heading, records in rows.items():
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)


def _first_sentence(text: str) -> str:
    """Return the first sentence, without the default, which ``--help-all`` shows."""
    return text.partition("  [default")[0].partition(". ")[0].partition("; ")[0].rstrip(".")


def sampling_parameters() -> list[click.Parameter]:
    return [
        click.Option([flag_name(name)], type=kind, help=sentence, multiple=name == "stop")
        for name, (kind, sentence) in SAMPLING_FLAGS.items()
    ]


def given_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling fields that are set, for a request or for SamplingParams. Raise ConfigError that names the
    flag of a value out of range, before a model is loaded."""
    from weft.request import SamplingParams  # not needed by `weft --help`

    sampling = {name: values[name] for name in SAMPLING_FLAGS if values.get(name) not in (None, ())}
    try:
        SamplingParams(**sampling).check(vocab_size=VOCABULARY_MAX)
    except RequestError as error:
        raise ConfigError(f"{flag_name(error.param or '')}: {error.message}", param=error.param) from None
    return sampling


def check_sampling(name: str, text: str) -> dict[str, Any]:
    """Return ``{name: value}`` for a sampling field typed as text. Raise RequestError for a value out of its range, and
    for text of another type."""
    from weft.request import SamplingParams

    kind, _ = SAMPLING_FLAGS[name]
    try:
        value = kind.convert(text, None, None)
    except click.BadParameter as error:
        raise RequestError(f"{name} is {text!r}: {error.message}", param=name) from None
    fields: dict[str, Any] = {name: (value,) if name == "stop" else value}
    SamplingParams(**fields).check(vocab_size=VOCABULARY_MAX)
    return fields
