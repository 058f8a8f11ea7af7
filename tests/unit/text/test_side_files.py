"""Keys of the files next to config.json that change answers and are not served, or that nothing here knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.added_tokens import TEKKEN, read_next_to
from weft.errors import CheckpointError
from weft.models.generation import read_generation_defaults
from weft.text.side_files import unknown_keys
from weft.text.tokenizer_file import tokenizer_text


def write(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_a_key_that_nothing_knows_is_named_with_its_file(tmp_path: Path) -> None:
    write(
        tmp_path,
        tokenizer_config={"eos_token": "</s>", "my_token": "<a>", "model_max_length": 8, "spells": True, "casts": 1},
        special_tokens_map={"eos_token": "</s>", "oddity": 3},
        processor_config={"image_processor": {"do_resize": True, "do_sharpen": True}, "processor_class": "P"},
    )
    assert list(unknown_keys(tmp_path)) == [
        "Not known in tokenizer_config.json, and left out: spells, casts.",
        "Not known in special_tokens_map.json, and left out: oddity.",
        "Not known in image_processor of processor_config.json, and left out: do_sharpen.",
    ]


def test_files_as_releases_have_them_say_nothing_unknown(tmp_path: Path) -> None:
    write(
        tmp_path,
        tokenizer_config={
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": {},
            "additional_special_tokens": ["<|im_start|>"],
            "bos_token": None,
            "chat_template": "{{ messages }}",
            "clean_up_tokenization_spaces": False,
            "errors": "replace",
            "legacy": False,
            "model_max_length": 131072,
            "sp_model_kwargs": {},
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "use_default_system_prompt": False,
        },
        generation_config={"bos_token_id": 1, "do_sample": True, "eos_token_id": [2], "transformers_version": "4.57.1"},
        preprocessor_config={"size": {"longest_edge": 1}, "patch_size": 16, "processor_class": "P"},
    )
    assert not list(unknown_keys(tmp_path))
    assert read_generation_defaults(tmp_path, {}).note() is None


def test_what_generate_applies_and_weft_does_not_is_named(tmp_path: Path) -> None:
    stated = {"num_beams": 4, "max_new_tokens": 100, "max_length": 20, "temperature": "0.7", "top_k": 5, "spells": 1}
    defaults = read_generation_defaults(write(tmp_path, generation_config=stated), {})
    assert defaults.note() == (
        "Not applied of generation_config.json: max_new_tokens, num_beams, temperature. "
        "Not known in generation_config.json, and left out: spells."
    )
    assert defaults.sampling == {"top_k": 5}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer_config": {"split_special_tokens": True}}, "split_special_tokens is true"),
        ({"added_tokens": {"<a>": "7"}}, "'<a>' is '7'; it must be the token's number"),
        ({"added_tokens": {"<a>": None}}, "'<a>' is None"),
    ],
)
def test_a_setting_that_is_not_served_is_one_line(files: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=reason) as error:
        read_next_to(write(tmp_path, **files))
    assert str(error.value).startswith(str(tmp_path))


def test_names_of_tokens_in_an_object_are_read(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"model_specific_special_tokens": {"image_token": "<i>"}, "eos_token": "</s>"})
    assert read_next_to(tmp_path).named == {"eos_token": "</s>", "image_token": "<i>"}


@pytest.mark.parametrize(
    ("config", "fixed", "size", "mended"),
    [
        ({"model_type": "mistral", "transformers_version": "4.57.0"}, True, 100_001, True),
        ({"model_type": "mistral", "transformers_version": "5.24.0"}, True, 100_001, False),
        ({"model_type": "qwen3", "transformers_version": "4.57.0"}, True, 100_001, False),
        ({"model_type": "mistral"}, False, 100_001, False),
        ({"model_type": "mistral"}, True, 32_000, False),
    ],
)
def test_an_old_expression_of_mistral_is_mended_as_transformers_does(
    config: dict[str, Any], fixed: bool, size: int, mended: bool, tmp_path: Path
) -> None:
    split = {"type": "Split", "pattern": {"Regex": r"\p{L}+"}, "behavior": "Isolated", "invert": False}
    content = {
        "added_tokens": [],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel"}]},
        "model": {"type": "BPE", "vocab": {f"t{index}": index for index in range(size)}, "merges": []},
    }
    write(tmp_path, config=config, tokenizer=content, tokenizer_config={"fix_mistral_regex": fixed})
    cut, rest = json.loads(tokenizer_text(tmp_path / "tokenizer.json"))["pre_tokenizer"]["pretokenizers"]
    assert cut["pattern"] == {"Regex": TEKKEN if mended else r"\p{L}+"}
    assert rest == {"type": "ByteLevel"}
