"""Flag = config field = variable = key of the config file; and the right answer to a wrong flag."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import click
import pytest

from weft.cli.flags import FlagCommand, TableSetting, arguments_of, build, given_flags, variables_of
from weft.cli.serve import command as serve_command
from weft.config import EngineConfig
from weft.config_check import TABLES, flag_name
from weft.foreign import FOREIGN_FLAGS, foreign_sentence
from weft.server.config import ServerConfig

CONFIGS = (EngineConfig, ServerConfig)
SCREEN_LINES = 50


@dataclass(frozen=True, slots=True)
class Sample:
    """One field of each kind that a config may have."""

    model: str | None = field(default=None, metadata={"help": "A model.", "positional": True})
    length: int | None = field(default=None, metadata={"help": "A length."})
    share: float = field(default=0.5, metadata={"help": "A share."})
    kind: Literal["auto", "cpu"] = field(default="auto", metadata={"help": "A kind."})
    eager: bool = field(default=False, metadata={"help": "A switch."})
    names: tuple[str, ...] = field(default=(), metadata={"help": "Names."})


def parse(*arguments: str, config: type = Sample) -> Any:
    """The config object that a command line gives."""
    made: list[Any] = []

    def keep(**values: Any) -> None:
        made.append(build(config, values))

    FlagCommand("sample", callback=keep, configs=(config,)).main(list(arguments), standalone_mode=False)
    return made[0]


def refusal(*arguments: str) -> str:
    with pytest.raises(click.ClickException) as caught:
        parse(*arguments)
    return caught.value.format_message()


def test_every_config_field_is_a_flag_of_serve_with_its_own_help() -> None:
    assert isinstance(serve_command, FlagCommand)
    flags = [
        param
        for param in serve_command.params
        if isinstance(param, click.Option) and not isinstance(param, TableSetting)
    ]
    options = {opt: param for param in flags for opt in param.opts}
    for config in CONFIGS:
        for f in fields(config):
            param = serve_command.settings[f.name] if "table" in f.metadata else options[flag_name(f.name)]
            assert param.help == f.metadata["help"]


def test_serve_has_about_fifty_flags_and_its_help_fits_two_screens() -> None:
    assert isinstance(serve_command, FlagCommand)
    assert len([f for config in CONFIGS for f in fields(config) if "table" not in f.metadata]) <= 58
    context = click.Context(serve_command, info_name="serve", terminal_width=80)
    assert len(serve_command.get_help(context).splitlines()) <= 2 * SCREEN_LINES


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--max-body-mb", "limits.max_body_mb of the --config file (under [limits]), or the variable WEFT_MAX_BODY_MB"),
        ("--no-twelve-bit", "debug.twelve_bit of the --config file (under [debug]), or the variable WEFT_TWELVE_BIT"),
        ("--ray-gpus", "server.ray_gpus of the --config file (under [server]), or the variable WEFT_RAY_GPUS"),
        (
            "--compress-kv=int4",
            "cache.compress_kv of the --config file (under [cache]), or the variable WEFT_COMPRESS_KV",
        ),
        (
            "--cuda-graphs=off",
            "debug.cuda_graphs of the --config file (under [debug]), or the variable WEFT_CUDA_GRAPHS",
        ),
    ],
)
def test_a_flag_that_became_a_key_of_the_config_file_names_its_place(typed: str, said: str) -> None:
    assert _serve_refusal(typed) == f"{typed.partition('=')[0]} is not a flag: it is {said}"


def test_limits_and_switches_come_from_their_tables_and_from_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weft.toml"
    file.write_text("port = 7\nlimits.restarts = 3\n[debug]\nrouter = 'kv-only'\n")
    expected = ServerConfig(port=7, restarts=3, router="kv-only")
    assert parse("--config", str(file), config=ServerConfig) == expected
    monkeypatch.setenv("WEFT_RESTARTS", "4")
    assert parse("--config", str(file), config=ServerConfig).restarts == 4
    monkeypatch.setenv("WEFT_RESTARTS", "many")
    with pytest.raises(click.BadParameter, match=r"not a valid integer.*WEFT_RESTARTS") as caught:
        parse(config=ServerConfig)
    assert "limits.restarts" in caught.value.format_message()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("restarts = 3\n", "restarts belongs under [limits]"),
        ("[debug]\nrestarts = 3\n", "restarts belongs under [limits]"),
        ("[limits]\nport = 3\n", "port belongs at the top, above every [table]"),
        ("strict_fields = true\n", "strict_fields belongs under [server]"),
        ("[sever]\nstrict_fields = true\n", "there is no table [sever]; the tables are limits, cache, server, debug"),
        ("server = 3", "server is a table: its keys go under a line [server]"),
        ("[[limits]]\nmax_headers = 9", "limits is a table: its keys go under a line [limits]"),
        ("[limits]\nrestart = 3\n", "there is no flag --restart"),
    ],
)
def test_a_key_in_a_wrong_place_of_the_config_file_names_the_right_one(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "weft.toml"
    file.write_text(text)
    with pytest.raises(click.UsageError) as caught:
        parse("--config", str(file), config=ServerConfig)
    assert said in caught.value.format_message()


def test_no_flag_given_gives_the_default_config() -> None:
    for config in (Sample, *CONFIGS):
        assert parse(config=config) == config()


def test_values_of_every_kind_arrive_with_their_type() -> None:
    made = parse(
        "some/dir", "--length", "7", "--share=0.25", "--kind", "cpu", "--eager", "--names", "a", "--names", "b"
    )
    assert made == Sample("some/dir", 7, 0.25, "cpu", True, ("a", "b"))


def test_variables_and_files_take_the_same_names_and_the_nearest_source_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weft.toml"
    file.write_text('length = 1\nshare = 0.1\nkind = "cpu"\nnames = ["x", "y"]\nmodel = "from-file"\n')
    assert parse("--config", str(file)) == Sample("from-file", 1, 0.1, "cpu", False, ("x", "y"))
    monkeypatch.setenv("WEFT_LENGTH", "2")
    monkeypatch.setenv("WEFT_EAGER", "true")
    monkeypatch.setenv("WEFT_NAMES", "p,q r")
    made = parse("--config", str(file), "--share", "0.3")
    assert made == Sample("from-file", 2, 0.3, "cpu", True, ("p", "q r"))
    assert parse("--config", str(file), "--length", "3", "typed").length == 3
    monkeypatch.setenv("WEFT_CONFIG", str(file))
    assert parse().kind == "cpu"


@pytest.mark.parametrize(("short", "long"), [("fp16", "float16"), ("bf16", "bfloat16"), ("fp32", "float32")])
def test_both_spellings_of_a_dtype_are_taken_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: str, long: str
) -> None:
    expected = EngineConfig(dtype=long, state_dtype=long)  # type: ignore[arg-type]
    for spelled in (short, long):
        assert parse("--dtype", spelled, "--state-dtype", spelled, config=EngineConfig) == expected
        assert EngineConfig.of(dtype=spelled, state_dtype=spelled) == expected
    file = tmp_path / "weft.toml"
    file.write_text(f'state_dtype = "{short}"\n')
    monkeypatch.setenv("WEFT_DTYPE", short)
    assert parse("--config", str(file), config=EngineConfig) == expected


def test_dashes_in_a_file_are_as_good_as_underscores(tmp_path: Path) -> None:
    file = tmp_path / "weft.toml"
    file.write_text("max-model-len = 99\nmax_num_seqs = 3\n")
    made = parse("--config", str(file), config=EngineConfig)
    assert (made.max_model_len, made.max_num_seqs) == (99, 3)


def test_the_model_may_be_an_argument_or_a_flag_but_not_two_models() -> None:
    assert parse("a").model == parse("--model", "a").model == parse("a", "--model", "a").model == "a"
    assert refusal("a", "--model", "b") == "two values for model: a and --model b"


def test_a_bad_value_says_which_source_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weft.toml"
    file.write_text('length = "long"\n')
    assert "--length" in refusal("--length", "long")
    assert "--config file" in refusal("--config", str(file))
    monkeypatch.setenv("WEFT_LENGTH", "long")
    assert "environment variable WEFT_LENGTH" in refusal()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lenght = 1\n", "did you mean --length?"),
        ("gpu_memory_utilization = 0.9\n", "nearest: --gpu-memory-fraction"),
        ("length = \n", "is not TOML"),
    ],
)
def test_a_config_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "weft.toml"
    file.write_text(text)
    message = refusal("--config", str(file))
    assert sentence in message
    assert str(file) in message


def test_a_config_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none.toml") in refusal("--config", str(tmp_path / "none.toml"))


def test_the_arguments_of_a_config_give_that_config_again() -> None:
    for config in (
        Sample(),
        Sample("m", 3, 0.75, "cpu", True, ("a b", "c,d")),
        EngineConfig(memory="1GiB", seed=-4),
        ServerConfig(api_key=("k",), restarts=0, port=0),
        EngineConfig(twelve_bit=False),
    ):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables_of(config).items():
                patch.setenv(name, value)
            assert parse(*arguments_of(config), config=type(config)) == config


def test_given_flags_are_those_set_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_SHARE", "0.5")  # the default, but set by hand
    seen: dict[str, Any] = {}

    def keep(**values: Any) -> None:
        seen.update(given_flags(click.get_current_context(), Sample))

    FlagCommand("sample", callback=keep, configs=(Sample,)).main(["--length", "1"], standalone_mode=False)
    assert seen == {"length": 1, "share": 0.5}


def test_a_typo_suggests_the_nearest_flag() -> None:
    assert refusal("--lenght", "4") == "there is no flag --lenght; did you mean --length?"
    assert refusal("--zzzzzz") == "there is no flag --zzzzzz; `sample --help` lists the flags"


def _serve_refusal(*arguments: str) -> str:
    with pytest.raises(click.UsageError) as caught:
        serve_command.make_context("serve", list(arguments))
    return caught.value.format_message()


@pytest.mark.parametrize("flag", FOREIGN_FLAGS)
def test_a_flag_of_another_engine_says_why_not_and_what_instead(flag: str) -> None:
    expected = foreign_sentence(flag, FOREIGN_FLAGS[flag])
    assert _serve_refusal("some/model", flag, "2") == expected
    if flag.startswith("--"):
        assert _serve_refusal(flag + "=2") == expected
        typed = "--" + flag[2:].replace("-", "_")
        assert _serve_refusal(typed) == expected.replace(flag, typed, 1)


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--checkpoints", "--checkpoints has another name here: --snapshots"),
        ("--enforce-eager", "--enforce-eager has another name here: debug.cuda_graphs = 'off' of the --config file"),
        (
            "--cpu-offload-gb",
            "--cpu-offload-gb is not supported here, because each model is on one device; nearest: --memory",
        ),
        (
            "--tokenizer-mode",
            "--tokenizer-mode is not supported here, because this is read from the checkpoint; leave it out",
        ),
        (
            "--max-loras",
            "--max-loras is not supported here, because the adapters that fit run at once; "
            "nearest: limits.lora_memory of the --config file",
        ),
        (
            "--n-predict",
            "--n-predict is not supported here, because it belongs to a request; send `max_tokens` in the request",
        ),
    ],
)
def test_a_sentence_reads_as_one(flag: str, sentence: str) -> None:
    assert foreign_sentence(flag, FOREIGN_FLAGS[flag]) == sentence


def test_the_nearest_flags_are_flags_of_serve_and_none_of_ours_is_called_foreign() -> None:
    assert isinstance(serve_command, FlagCommand)
    own = {*serve_command.flag_names, *(param.setting for param in serve_command.settings.values())}
    assert {
        row.instead.split()[0]
        for row in FOREIGN_FLAGS.values()
        if row.instead.startswith(("--", *(f"{table}." for table in TABLES)))
    } <= own
    assert not own & set(FOREIGN_FLAGS)
