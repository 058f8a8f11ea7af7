"""A GGUF file as a checkpoint directory, which the rest of weft reads.

    model.gguf  ->  ~/.cache/weft/gguf/KEY/   config.json   generation_config.json   model.gguf -> the file
                                              tokenizer.json   tokenizer_config.json   chat_template.jinja

Engine, server and ranks are several processes, and each reads files of a checkpoint by name. So a view is made once, in
the user's cache, and every process finds it by the name of the model. The view has only a link to the weights: tensors
are looked up again in the header of the GGUF file, under our names (``stored_tensors``).

The key is a digest of the files' paths, sizes and times, and the form of the view. A file that changes has another
view. A view takes a few MB, nearly all for the tokenizer, and may be deleted at any time. Making a view deletes views
of files that are gone, and the longest unused beyond 32.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.errors import CheckpointError
from weft.models.gguf import METHOD
from weft.models.gguf.architectures import read_layout
from weft.models.gguf.header import FileTensor, Header, read_header, split_files
from weft.models.gguf.keys import GgufKeys
from weft.models.gguf.parts import NOTHING, ROTARY, FileLayout, Undo
from weft.models.gguf.vocabulary import generation_config, write_tokenizer
from weft.models.safetensors_header import StoredTensor

_FORM = 9
"""Version of the files of a view; a change in how they are made raises it."""
_KEY_CHARS = 24
_VIEWS_MAX = 32
"""Number of views that are kept; the longest unused one is deleted first."""
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
"""``pooling_type`` (llama.cpp's ``llama_pooling_type``) -> the name in sentence-transformers."""
_NO_POOLING, _RANK = 0, 4
_TOWERS = {"v.": "visual.", "mm.": "visual.", "a.": "audio_tower."}
"""Prefixes of towers' names in the file of the text part, as Ollama stores both, and their prefixes here."""
_FLOATS = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True, slots=True)
class GgufTensor(StoredTensor):
    """A tensor of a view. ``dtype``: ggml's name of the form ("Q4_K"), ``shape``: of its values. ``undo``: the change
    to undo. ``in_pairs``: see ``FileTensor``.
    """

    undo: Undo = NOTHING
    in_pairs: bool = False


def view_of(path: Path) -> Path:
    """Return the directory for the GGUF file ``path``, which may be any part of a split model.

    Raises CheckpointError naming the file and its part that is not served, or the cache that cannot be written.
    """
    # By the file's own name, not the target of a link: the hub's cache links names to digests.
    parts = split_files(path)
    named = {file.name: file.resolve() for file in parts}
    facts = [(name, str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for name, file in named.items()]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "gguf"
    directory = root / hashlib.sha256(repr((_FORM, facts)).encode()).hexdigest()[:_KEY_CHARS]
    if (directory / "config.json").is_file():
        _used(directory)
        return directory
    header = read_header(parts[0])
    making = root / f"{directory.name}.{os.getpid()}.tmp"
    try:
        making.mkdir(parents=True, exist_ok=True)
        _write_view(header, named, making)
        if not directory.exists():
            making.rename(directory)
        _drop_old(root)
    except OSError as error:
        if not directory.is_dir():  # made by another process at the same time
            raise CheckpointError(
                f"{root}: the view of {path.name} cannot be written: {error.strerror}; set "
                "XDG_CACHE_HOME to a directory that can",
                param="model",
            ) from None
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return directory


def _used(view: Path) -> None:
    """Set the time of the view, so that it counts as used now."""
    with suppress(OSError):  # of another user: its age does not matter
        os.utime(view)


def _drop_old(root: Path) -> None:
    """Delete views of files that are gone, and the longest unused beyond ``_VIEWS_MAX``. A process that is starting
    with such a view fails, and its next start makes the view again.
    """

    def age(view: Path) -> float:
        with suppress(OSError):
            return view.stat().st_mtime
        return 0.0

    views = sorted((view for view in root.iterdir() if len(view.name) == _KEY_CHARS), key=age, reverse=True)
    for number, view in enumerate(views):
        if number >= _VIEWS_MAX or not all(link.exists() for link in view.glob("*.gguf")):
            shutil.rmtree(view, ignore_errors=True)


def _write_view(header: Header, files: Mapping[str, Path], directory: Path) -> None:
    layout = read_layout(header)
    config = layout.config | {"quantization_config": {"quant_method": METHOD, "elements": _elements(header)}}
    generation = generation_config(header)
    config["eos_token_id"] = generation["eos_token_id"]
    write_tokenizer(header, directory)
    pooling = GgufKeys(header, str(header.keys["general.architecture"])).integer("pooling_type", _NO_POOLING)
    if pooling == _RANK:  # of the served families only Qwen3-Reranker is converted so
        config["classifier_from_token"] = ["no", "yes"]
    elif pooling != _NO_POOLING:
        _write_pooling(_POOLINGS.get(pooling, f"pooling_type {pooling}"), directory)
    (directory / "generation_config.json").write_text(json.dumps(generation))
    for name, file in files.items():
        (directory / name).symlink_to(file)
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def _write_pooling(mode: str, directory: Path) -> None:
    """Write the settings of pooling. Vectors have length 1, as from llama.cpp's server."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))


def _elements(header: Header) -> dict[str, dict[str, int]]:
    """Return how many numbers each form of blocks has, for plans: of the layers' matrices, and of embedding
    and head.
    """
    counts_of: dict[str, Counter[str]] = {"layers": Counter(), "tables": Counter()}
    for tensor in header.tensors.values():
        # Neither convolutions nor routers: a plan counts them by themselves.
        counted = "gate_inp" not in tensor.name and not tensor.name.startswith(tuple(_TOWERS))
        if counted and len(tensor.shape) > 1 and min(tensor.shape) >= 32:
            of = "layers" if tensor.name.startswith("blk.") else "tables"
            counts_of[of][tensor.type] += math.prod(tensor.shape)
    return {of: dict(counts) for of, counts in counts_of.items()}


def stored_tensors(directory: Path) -> tuple[dict[str, StoredTensor], Path]:
    """Return the tensors of a view under our names, and the file that lists them."""
    files = sorted(directory.glob("*.gguf"))
    if not files:
        raise CheckpointError(f"{directory}: no .gguf file", param="model")
    header = read_header(files[0], keeps_texts=False)
    layout = read_layout(header)
    tensors: dict[str, StoredTensor] = {}
    for tensor in header.tensors.values():
        if tensor.name in ROTARY:  # its content is in config.json
            continue
        for ours in our_tensors(tensor, layout):
            tensors[ours.name] = ours
    return tensors | {number.name: number for number in _numbers(header, layout)}, files[0]


_ARRAY_HEAD_BYTES = 4 + 8
"""Bytes of an array's kind and count, before its numbers."""


def _numbers(header: Header, layout: FileLayout) -> Iterator[GgufTensor]:
    """Yield the tensors of one number whose values are in arrays among the keys."""
    layers = layout.config.get("num_hidden_layers")
    for key, part in layout.numbers.items():
        array = header.keys.get(key)
        if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.size != layers:
            raise CheckpointError(
                f"{header.path}: {key} is {array}: it must list a float32 number for each of the {layers} layers",
                param="model",
            )
        begin = header.places[key] + _ARRAY_HEAD_BYTES
        for layer in range(array.size):
            name = f"{layout.stack}.{layer}.{part}"
            yield GgufTensor(header.path, name, "F32", (1,), array.itemsize, begin + layer * array.itemsize)


def our_tensors(tensor: FileTensor, layout: FileLayout) -> list[GgufTensor]:
    """Return the tensors that weft reads of a stored tensor: one, several parts, or one for each expert. A tensor that
    is not in the table keeps its name, so the warning of unused tensors names it.
    """
    place, names, rest = "", layout.whole, tensor.name
    blocks = layout.config.get("num_hidden_layers") or len(layout.config["layers_block_type"])
    if tensor.name.startswith("blk.") and tensor.name.count(".") > 1:
        _, number, rest = tensor.name.split(".", 2)
        names = layout.names
        place = f"{layout.stack}.{number}."
        if number.isdecimal() and int(number) >= blocks:
            place = f"mtp.layers.{int(number) - blocks}."
    for begin, tower in _TOWERS.items():
        if not place and tensor.name.startswith(begin):
            return [_as(tensor, tower + tensor.name, NOTHING)]
    stem, _, end = rest.rpartition(".")
    key, end = (rest, "") if rest in names else (stem, f".{end}")
    wanted = names.get(key)
    if wanted is None:
        return [_as(tensor, tensor.name, NOTHING)]
    targets = (wanted,) if isinstance(wanted, str) else wanted
    ours: list[GgufTensor] = []
    for target in targets:
        undo = layout.undo.get(f"{key}:{target}{end}", layout.undo.get(f"{target}{end}", NOTHING))
        # Only the first of several heads is read; later ones must not take its names.
        later = place.startswith("mtp.") and place != "mtp.layers.0."
        inside = target.removeprefix("mtp.") if later else target
        full = inside + end if inside.startswith("mtp.") else place + inside + end
        if "{e}" in target:
            part, parts = (targets.index(target), len(targets)) if undo.is_nothing else (0, 1)
            ours += [_expert(tensor, full, expert, part, parts, undo) for expert in range(tensor.shape[0])]
        else:
            ours.append(_as(tensor, full, undo))
    return ours


def _as(tensor: FileTensor, name: str, undo: Undo) -> GgufTensor:
    return GgufTensor(
        tensor.file, name, tensor.type, tensor.shape, tensor.stored_bytes, tensor.begin, undo, tensor.in_pairs
    )


def _expert(tensor: FileTensor, name: str, expert: int, part: int, parts: int, undo: Undo) -> GgufTensor:
    """Return one expert of a stack, or one of its ``parts``, which have equal numbers of rows; ``undo`` of it."""
    count, rows, *columns = tensor.shape
    size = tensor.stored_bytes // count // parts
    return GgufTensor(
        tensor.file,
        name.replace("{e}", str(expert)),
        tensor.type,
        (rows // parts, *columns),
        size,
        tensor.begin + (expert * parts + part) * size,
        undo,
        tensor.in_pairs,
    )


def file_in(directory: Path) -> Path | None:
    """Return the one model among the GGUF files of ``directory``; None without one. Projectors of images are skipped.

    Raises CheckpointError naming the models if there are several.
    """
    models = {
        split_files(file)[0]: None
        for file in sorted(directory.glob("*.gguf"))
        if not file.name.lower().startswith("mmproj")
    }
    if len(models) > 1:
        raise CheckpointError(
            f"{directory}: has several GGUF models; name one of {', '.join(file.name for file in models)}",
            param="model",
        )
    return next(iter(models), None)
