"""A config that cannot work is refused by its own declaration, in the words of the command line."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from weft.api import Engine
from weft.config import EngineConfig
from weft.config_check import check_fields
from weft.errors import ConfigError
from weft.server.config import ServerConfig


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"quantize": "int9"}, "--quantize is 'int9'; it may be none, int8, int4 or w8a8"),
        ({"dtype": "fp8"}, "--dtype is 'fp8'; it may be auto, float32, bfloat16 or float16"),
        ({"kv_dtype": "fp7"}, "--kv-dtype is 'fp7'; it may be auto, .*fp8"),
        ({"state_dtype": "int8"}, "--state-dtype is 'int8'; it may be float32"),
        ({"compress_kv": "int2"}, "cache.compress_kv is 'int2'; it may be int8 or int4"),
        ({"compress_kv": "int4"}, "cache.compress_kv int4 needs --no-exact: without it nothing is compressed"),
        (
            {"quantize": "w8a8", "quantize_inputs": False},
            "--quantize is w8a8.*debug.quantize_inputs = false.*--quantize int8",
        ),
        ({"overlap": "yes"}, "debug.overlap is 'yes'; it may be auto, on or off"),
        ({"memory": 4}, "--memory is 4; it must be text, such as '4GiB'"),
        ({"memory": "4"}, "--memory '4' has no unit: write 4GiB, 4MiB or 4B"),
        (
            {"max_model_len": "4096"},
            "--max-model-len is '4096'; it must be a whole number at least 1 and at most 16777216",
        ),
        ({"max_model_len": 0}, "--max-model-len is 0; it must be at least 1 and at most 16777216"),
        ({"max_num_seqs": 2.5}, "--max-num-seqs is 2.5; it must be a whole number at least 1"),
        ({"max_num_seqs": True}, "--max-num-seqs is True; it must be a whole number"),
        ({"threads": 0}, "--threads is 0; it must be at least 1 and at most 1024"),
        ({"threads": 4096}, "--threads is 4096; it must be at least 1 and at most 1024"),
        ({"gpu_memory_fraction": 0}, "--gpu-memory-fraction is 0; it must be above 0 and at most 1"),
        ({"gpu_memory_fraction": float("nan")}, "--gpu-memory-fraction is nan; it must be a number above 0"),
        ({"exact": "no"}, "--exact is 'no'; it is True or False"),
        ({"store_required": True}, "cache.store_required needs --store"),
        ({"store_key": "/k", "store": "/s"}, "cache.store_key /k signs the objects of a bucket, and --store is /s"),
        ({"model": 7}, "--model is 7; it must be text"),
        ({"max_model_length": 4096}, "there is no keyword max_model_length; did you mean max_model_len?"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"gpu_memory_utilization": 0.9}, "--gpu-memory-fraction"),
        ({"nonsense": 1}, "there is no keyword nonsense; the keywords are model, revision"),
    ],
)
def test_the_python_api_refuses_what_cannot_work_in_one_sentence(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Engine(**({"model": "nowhere"} | asked))
    assert "\n" not in caught.value.message
    name = next(iter(asked))
    assert caught.value.param in {
        f"--{name.replace('_', '-')}",
        name,
        f"debug.{name}",
        f"cache.{name}",
        "debug.quantize_inputs",
    }


def test_the_defaults_and_every_choice_pass() -> None:
    EngineConfig().check()
    EngineConfig(
        memory="4GiB",
        threads=1024,
        gpu_memory_fraction=1,
        max_model_len=1,
        exact=False,
        compress_kv="int4",
        quantize="w8a8",
    ).check()
    check_fields(ServerConfig())
    assert len(fields(EngineConfig)) > 20


@pytest.mark.parametrize(
    ("name", "least", "below"),
    [
        ("images", 0, -1),  # none at all
        ("image_pixels", 1, 0),
        ("drain_timeout", 0, -0.1),  # no wait
        ("header_timeout", 0.1, 0.05),
        ("max_stored_responses", 1, 0),
        ("max_batch_lines", 1, 0),
        ("max_buffered_mb", 1, 0),
        ("max_unread_mb", 1, 0),
        ("file_days", 0.001, 0.0),
    ],
)
def test_the_least_value_of_a_limit_is_taken_and_nothing_below(name: str, least: float, below: float) -> None:
    ServerConfig(**{name: least}).check()
    with pytest.raises(ConfigError, match=rf"limits\.{name} is {below}; it must be .*at least {least} and at most"):
        ServerConfig(**{name: below}).check()


def test_the_pages_name_the_defaults_of_limits() -> None:
    pages = "".join(page.read_text() for page in (Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
    told = re.findall(r"^\| `limits\.(\w+)` \| ([\d,.]+)|`limits\.(\w+)` \(([\d,]+)", pages, re.M)
    defaults = {one.name: one.default for config in (EngineConfig, ServerConfig) for one in fields(config)}
    compared = set()
    for in_table, value, in_text, other in told:
        name, number = in_table or in_text, float((value or other).replace(",", ""))
        if isinstance(defaults[name], int | float):
            assert defaults[name] == number, f"limits.{name}"
            compared.add(name)
    assert len(compared) > 15, "the control: there are such rows"
