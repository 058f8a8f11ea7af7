"""What can be known before weights are read is said before, in one line that names the flag."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import running_server
from tests.server.test_several_models import say, scripted
from weft.assemble.assembly import registered_adapters
from weft.config import EngineConfig
from weft.errors import CheckpointError, RequestError, UserError
from weft.server import early_checks
from weft.server.batches.routes import BatchBody
from weft.server.completions import CompletionBody
from weft.server.config import ServerConfig
from weft.server.early_checks import check_adapters, check_early, make_directories
from weft.server.protocol import read_body


@pytest.mark.parametrize(
    ("engine", "server", "said"),
    [
        ({"threads": 999}, {}, "--threads is 999; this machine has 2 cores for it, and the most is 16"),
        ({}, {"http_workers": 100}, "--http-workers is 100; this machine has 2 cores for it, and the most is 16"),
        ({}, {"record": "/nope/x"}, "--record /nope/x: there is no directory /nope"),
        ({"store": "s3://"}, {}, "--store s3://: the bucket is missing; write s3://BUCKET/PREFIX"),
        ({"store": "ftp://x"}, {}, "--store ftp://x: the scheme ftp is not one of s3, s3a, gs"),
        ({"store": "FILE"}, {}, "--store FILE: this is a file, not a directory"),
        ({"store": "FILE/below"}, {}, "--store FILE/below: .*FILE is a file, not a directory"),
        ({"store": "/proc/x"}, {}, "--store /proc/x: no such file or directory"),
        ({"weights_cache": "/proc/x"}, {}, "--weights-cache /proc/x: no such file or directory"),
        ({"weights_cache": "FILE"}, {}, "--weights-cache FILE: this is a file, not a directory"),
        ({"lora": ("a=/nope",)}, {}, "--lora a=/nope: there is no such directory of an adapter"),
        ({"lora": ("a=.",)}, {}, "adapter_config.json"),
    ],
)
def test_a_flag_that_cannot_work_is_said_before_weights_are_read(
    engine: dict[str, Any], server: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_checks, "usable_cores", lambda: 2)
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("")
    with pytest.raises(UserError, match=said) as caught:
        _check_in_order(EngineConfig(**engine), ServerConfig(**server))
    assert "Errno" not in caught.value.message
    check_early(EngineConfig(threads=2, store="new/store"), ServerConfig(record="x"))
    assert not Path("new").exists()
    make_directories(EngineConfig(threads=2, store="new/store"))
    assert Path("new/store").is_dir()


def _check_in_order(engine: EngineConfig, server: ServerConfig) -> None:
    check_early(engine, server)
    check_adapters(engine)
    make_directories(engine)


def test_other_values_that_cannot_work_name_their_flag() -> None:
    with pytest.raises(UserError, match=r"--store-size 1GB needs --store"):
        EngineConfig(store_size="1GB").check()
    with pytest.raises(UserError, match=r"--max-num-batched-tokens is 10000000000; it must be .* at most 1048576"):
        EngineConfig(max_num_batched_tokens=10_000_000_000).check()
    with pytest.raises(UserError, match=r"--api-key-file /nope: No such file or directory$"):
        ServerConfig(api_key_file="/nope").check()


async def test_a_field_that_takes_few_values_names_them() -> None:
    batch = {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "1h"}
    with pytest.raises(RequestError, match=r"completion_window: invalid enum value '1h'; it may be '24h'"):
        await read_body(json.dumps(batch).encode(), BatchBody)
    side = {"prompt": "a", "truncation_side": "middle"}
    with pytest.raises(RequestError, match="invalid enum value 'middle'; it may be 'left', 'right'"):
        await read_body(json.dumps(side).encode(), CompletionBody)
    with pytest.raises(RequestError, match=r"'/v1/images'; it may be '/v1/chat/completions', '/v1/completions'"):
        await read_body(json.dumps(batch | {"endpoint": "/v1/images"}).encode(), BatchBody)


def test_a_bad_adapter_ends_the_start_of_one_model_and_is_left_out_of_several(tmp_path: Path) -> None:
    config = EngineConfig(lora=(f"terse={tmp_path}",))
    with pytest.raises(CheckpointError, match=f"--lora terse={tmp_path}: .*adapter_config.json"):
        registered_adapters(config)
    adapters, refused = registered_adapters(replace(config, lora_required=False))
    assert (adapters, list(refused)) == ([], ["terse"])
    assert refused["terse"].startswith(f"--lora terse={tmp_path}: ")


def test_one_bad_adapter_never_takes_its_model_away(tmp_path: Path) -> None:
    models = scripted(tmp_path, "one"), scripted(tmp_path, "two")
    with running_server(
        "build_refusing_adapters",
        engine={"memory": "60MB", "max_model_len": 512, "lora": ("two/terse=owner/terse",)},
        models=models,
    ) as server:
        assert say(server, "two").json()["choices"][0]["message"]["content"] == "hello"
        refused = say(server, "two/terse")
        assert refused.status_code == 404
        assert "the adapter 'two/terse' is not served: --lora terse=owner/terse: too large" in refused.text
        cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
        assert (cards["two"]["state"], cards["two/terse"]["state"]) == ("loaded", "failed")
        assert cards["two/terse"]["reason"] == "--lora terse=owner/terse: too large"
