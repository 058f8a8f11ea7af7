"""Each key that a class of transformers knows is read here, or is listed with the reason why not: of config.json, and
of the files next to it."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.processing_utils import ImagesKwargs, VideosKwargs
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from tests.fixtures.checkpoints import CHECKPOINTS
from weft.families import _refuse_what_is_not_served, all_families, known_keys, text_config
from weft.families.config_keys import ConfigKeys
from weft.families.known_keys import OF_FAMILY, OF_FILE, is_harmless, is_known
from weft.models import generation

FAMILY_OF = {model_type: family for family in all_families() for model_type in family.model_types}


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
    assert stated.keys() == {family.name for family in all_families()}
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


ASKED = re.compile(r"""kwargs\.(?:pop|get|setdefault)\(\s*"(\w+)\"""")
OF_CALLS = {
    "gguf_file", "merges", "post_processor", "tokenizer", "tokenizer_object", "tokenizer_padding",
    "tokenizer_truncation", "vocab", "_json_padding", "_json_truncation", "_spm_precompiled_charsmap",
}  # fmt: skip
"""Arguments that a tokenizer's classes hand to each other and no file has."""


def asked_by(*functions: Any) -> set[str]:
    """Names that the source of ``functions`` takes out of its keywords."""
    return {name for function in functions for name in ASKED.findall(inspect.getsource(function))}


def annotated(*modules: str) -> set[str]:
    """Keywords of the processors in files of ``transformers.models``, which need torchvision to be imported."""
    root = Path(transformers.__file__).parent / "models"
    trees = [ast.parse((root / f"{module}.py").read_text()) for module in modules]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef) and "Kwargs" in node.name]
    lines = [line for node in classes for line in node.body if isinstance(line, ast.AnnAssign)]
    return {line.target.id for line in lines if isinstance(line.target, ast.Name)}


KNOWN_TO_TRANSFORMERS: dict[str, set[str]] = {
    known_keys.TOKENIZER_CONFIG: asked_by(PreTrainedTokenizerBase.__init__, TokenizersBackend.__init__) - OF_CALLS,
    known_keys.GENERATION_CONFIG: {*vars(transformers.GenerationConfig()), *asked_by(transformers.GenerationConfig)}
    - {"return_unused_kwargs", "commit_message", "repo_id", "token", "proxies", "subfolder", "_from_pipeline",
       "_from_auto", "force_bos_token_to_be_generated", "generation_kwargs"} - generation._NEUTRAL.keys(),
    known_keys.PREPROCESSOR_CONFIG: {
        *ImagesKwargs.__annotations__,
        *annotated("lfm2_vl/image_processing_lfm2_vl", "qwen2_vl/image_processing_qwen2_vl")},
    known_keys.VIDEO_PREPROCESSOR_CONFIG: {
        *VideosKwargs.__annotations__, *annotated("qwen3_vl/video_processing_qwen3_vl")},
}  # fmt: skip


@pytest.mark.parametrize("file", KNOWN_TO_TRANSFORMERS)
def test_no_key_of_a_side_file_is_unknown(file: str) -> None:
    assert len(KNOWN_TO_TRANSFORMERS[file]) > 10, "the law is read out of transformers"
    assert not {key for key in KNOWN_TO_TRANSFORMERS[file] if not is_known(file, key)}


READERS = {
    known_keys.TOKENIZER_CONFIG: ("added_tokens.py", "text/chat.py"),
    known_keys.SPECIAL_TOKENS: ("added_tokens.py",),
    known_keys.GENERATION_CONFIG: ("models/generation.py",),
    known_keys.PREPROCESSOR_CONFIG: ("images/settings.py",),
    known_keys.VIDEO_PREPROCESSOR_CONFIG: ("images/settings.py",),
}


@pytest.mark.parametrize("file", OF_FILE)
def test_what_is_listed_as_read_is_read_and_nothing_is_listed_twice(file: str) -> None:
    root = Path(known_keys.__file__).parents[1]
    source = "".join((root / name).read_text() for name in READERS[file])
    assert not [key for key in OF_FILE[file][known_keys.READ] if f'"{key}"' not in source]
    listed = [key for keys in OF_FILE[file].values() for key in keys]
    assert len(listed) == len(set(listed))
    if file == known_keys.GENERATION_CONFIG:
        assert not set(listed) & generation._NEUTRAL.keys(), "not applied and harmless at once"
