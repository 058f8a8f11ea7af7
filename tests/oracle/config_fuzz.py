"""Changes one key of a family's config.json, and asks transformers and weft for the logits.

    python -m tests.oracle.config_fuzz                  every change of every family: hours of one core
    python -m tests.oracle.config_fuzz lfm2 qwen3       of these

Each number, switch and name, also inside of rope_parameters and lists, gets another value, and nothing else changes.
A name becomes each other one that some family has for the key, and one that none has; a null becomes the values that
other families have. transformers reads the same directory.

A row of the printed table: changes that both serve with equal logits, changes that weft refuses in one line that
names the key, changes that transformers refuses and that change nothing here (settings of positions that a model
does not have), changes of keys that no comparison can judge (``NOT_COMPARED``), and faults, which follow line by line.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from tests.fixtures.checkpoints import CHECKPOINTS, _class_of, checkpoint
from tests.oracle.model_driver import ModelDriver
from tests.support.naive_model import NAIVE_TYPES
from weft.errors import WeftError
from weft.families.known_keys import OF_FAMILY
from weft.models.loading import load_model

TOKENS = torch.randint(3, 500, (90,), generator=torch.Generator().manual_seed(5)).tolist()
TOLERANCE = 1e-3
TIES = 2
"""Positions at which a router of many experts may choose by the last bit of a sum; settings change most of them."""
OF_TRANSFORMERS = tuple(name for name, (kind, _) in CHECKPOINTS.items() if kind not in NAIVE_TYPES)
"""Families whose class is transformers' own, with its own reading of the configuration."""
NOT_COMPARED = (
    "output_router_logits",
    "rescale_prenorm_residual",
    "time_step_min",
    "block_size",
    "number_of_conv_states",
    *OF_FAMILY["xlstm"],
)
"""Keys of training: transformers' forward pass fails at one value (``output_router_logits``), its initialisation
changes weights that were read (``rescale_prenorm_residual``), or its plain code does what its kernels do not
(``time_step_min``), or they choose code
(xLSTM, ``block_size`` of MiniMax, the cache that ``number_of_conv_states`` sizes)."""
READ_ELSEWHERE = (("nemotron_h", "time_step_limit"), ("phimoe", "long_factor"), ("phimoe", "short_factor"))
"""Families and keys that transformers' plain code does not read as its kernels and the released code do: Phi 3.5 with
experts always turns by the short factors there."""
LEFT_OUT = ("id2label", "label2id", "model_type", "vision_config")
"""Names of labels and of families, and towers that are not read with these checkpoints."""
Path_ = tuple[str | int, ...]
Outcome = Literal["followed", "refused", "without effect", "not compared", "wrong"]


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((checkpoint(name) / "config.json").read_text())
    return config


def leaves(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in LEFT_OUT:
                yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for at, inner in enumerate(value[:2]):
            yield from leaves(inner, (*path, at))
    else:
        yield path, value


def name_of(path: Path_) -> str:
    return str(next(part for part in reversed(path) if isinstance(part, str)))


@functools.cache
def values_seen() -> dict[str, list[Any]]:
    """By key, the names and numbers that any family has for it."""
    seen: dict[str, dict[Any, None]] = defaultdict(dict)
    for name in OF_TRANSFORMERS:
        for path, value in leaves(config_of(name)):
            if value is not None:
                seen[name_of(path)].setdefault(value)
    return {key: list(values) for key, values in seen.items()}


def changes(config: dict[str, Any]) -> Iterator[tuple[Path_, Any]]:
    for path, value in leaves(config):
        others = [other for other in values_seen().get(name_of(path), []) if other != value]
        if isinstance(value, bool):
            yield path, not value
        elif isinstance(value, int):
            yield from ((path, other) for other in (value + 1, 2 * value or 2, 1) if other != value)
        elif isinstance(value, float):
            yield path, value * 1.5 + 0.25
        elif isinstance(value, str):
            yield path, f"another_{value}"
            yield from ((path, other) for other in others if isinstance(other, str))
        else:
            yield from ((path, other) for other in others[:2])


def changed(config: Any, path: Path_, value: Any) -> Any:
    if not path:
        return value
    copy = dict(config) if isinstance(config, dict) else list(config)
    copy[path[0]] = changed(config[path[0]], path[1:], value)
    return copy


def theirs(directory: Path) -> torch.Tensor | None:
    """None where transformers cannot load it whole."""
    transformers.utils.logging.set_verbosity_error()
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    try:
        model, told = _class_of(model_type).from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if told["missing_keys"] or told["mismatched_keys"] or told["unexpected_keys"]:
            return None
        with torch.inference_mode():
            return model.eval()(torch.tensor([TOKENS])).logits[0]
    except Exception:
        return None


def ours(directory: Path) -> torch.Tensor | str:
    try:
        model = load_model(directory, "float32").model
    except WeftError as error:
        return error.message
    if len(TOKENS) > model.spec.max_positions:
        return "config.json: the context is shorter than the text"
    return ModelDriver(model, sequences=1, length=96).step((0, TOKENS))[0]


@functools.cache
def unchanged(name: str) -> torch.Tensor:
    logits = ours(checkpoint(name))
    assert isinstance(logits, torch.Tensor), logits
    return logits


def verdict(name: str, path: Path_, value: Any, directory: Path) -> tuple[Outcome, str]:
    """Return what came out, and the change in words."""
    source = checkpoint(name)
    if not directory.exists():
        directory.mkdir()
        for file in source.iterdir():
            shutil.copy(file, directory / file.name)
    (directory / "config.json").write_text(json.dumps(changed(config_of(name), path, value)))
    said = f"{name}: {'.'.join(map(str, path))} = {value!r}"
    mine = ours(directory)
    if isinstance(mine, str):
        # The key, one that contradicts it now, or a tensor whose shape does.
        named = name_of(path) in mine or mine.startswith("config.json: ") or ".safetensors" in mine
        if named and "\n" not in mine:
            return "refused", said
        return "wrong", f"{said}: refused without the key: {mine}"
    elsewhere = any(name.startswith(family) and name_of(path) == key for family, key in READ_ELSEWHERE)
    if name_of(path) in NOT_COMPARED or elsewhere:
        return "not compared", said
    other = theirs(directory)
    if other is None and torch.equal(mine, unchanged(name)):
        return "without effect", said
    if other is None:
        return "wrong", f"{said}: served, and transformers refuses"
    if mine.shape != other.shape or ((mine - other).abs().amax(-1) > TOLERANCE).sum() > TIES:
        return "wrong", f"{said}: served, and differs from transformers"
    return "followed", said


HEAD = (
    "| family | changes | followed | refused | without effect | not compared | wrong |\n|---|---|---|---|---|---|---|"
)


def main(names: Sequence[str]) -> int:
    faults = 0
    with tempfile.TemporaryDirectory() as room:
        for name in names:
            counts: Counter[str] = Counter()
            lines = []
            for path, value in changes(config_of(name)):
                try:
                    outcome, said = verdict(name, path, value, Path(room) / name)
                except Exception as error:
                    outcome, said = "wrong", f"{name}: {path} = {value!r}: {type(error).__name__}: {error}"
                counts[outcome] += 1
                lines += [said] if outcome == "wrong" else []
            columns = [counts[one] for one in ("followed", "refused", "without effect", "not compared", "wrong")]
            print(f"| `{name}` | {counts.total()} | {' | '.join(map(str, columns))} |", *lines, sep="\n", flush=True)
            faults += len(lines)
    return int(faults > 0)


if __name__ == "__main__":
    print(HEAD)
    sys.exit(main(sys.argv[1:] or OF_TRANSFORMERS))
