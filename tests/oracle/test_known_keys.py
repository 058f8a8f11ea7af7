"""Each key that transformers' configuration class knows is read here, or is listed with the reason why not."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import transformers

from tests.fixtures.checkpoints import CHECKPOINTS
from weft.families import FAMILIES, _refuse_what_is_not_served, text_config
from weft.families.config_keys import ConfigKeys
from weft.families.known_keys import OF_FAMILY, is_harmless

FAMILY_OF = {model_type: family for family in FAMILIES for model_type in family.model_types}


def stated_and_read() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """By family, all keys that the class writes, and those that the family asks for in any of its variants."""
    stated: dict[str, set[str]] = defaultdict(set)
    read: dict[str, set[str]] = defaultdict(set)
    for model_type, settings in CHECKPOINTS.values():
        config: dict[str, Any] = transformers.AutoConfig.for_model(
            model_type, **(settings | {"eos_token_id": 2})
        ).to_dict()
        config["dtype"] = "float32"
        family, text = FAMILY_OF[model_type], text_config(config)
        keys = ConfigKeys(text, fallback=config, seen=read[family.name])
        _refuse_what_is_not_served(keys, family.activation)
        family.read(family.name, keys)
        stated[family.name] |= text.keys()
    return stated, read


def test_no_key_of_transformers_is_unknown() -> None:
    stated, read = stated_and_read()
    assert stated.keys() == {family.name for family in FAMILIES}
    unknown = {
        f"{family}: {key}"
        for family, keys in stated.items()
        for key in keys - read[family]
        if not is_harmless(family, key)
    }
    assert not unknown


def test_no_list_has_a_key_that_is_read_or_that_nothing_knows() -> None:
    stated, read = stated_and_read()
    shared = {"chunk_size", "mamba_chunk_size"} | set(OF_FAMILY["jamba"])
    stale = {
        f"{family}: {key}"
        for family, keys in OF_FAMILY.items()
        for key in keys
        if key in read[family] or (key not in stated[family] and key not in shared)
    }
    assert not stale
