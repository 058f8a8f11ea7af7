"""Checkpoints with some tensors replaced, which a trainer that has tensors in memory gives to an engine.

    directory/model-1.safetensors --copied, and the bytes of the replaced tensors written over--> out/...
             /model-2.safetensors --linked, as no tensor in it is replaced----------------------> out/...
             /config.json, tokenizer, templates, index --copied---------------------------------> out/...

The engine then reads ``out`` as any other checkpoint. So a replaced tensor and one that was saved to a file go through
the same checks and give the same digest and the same bits.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from weft.errors import CheckpointError
from weft.files import read_json
from weft.models.safetensors_header import StoredTensor, read_header, weight_files
from weft.models.stored_values import TORCH_DTYPES

_TIED = "lm_head.weight"
"""Name of a tied head, which trainers list and files leave out."""


def write_replaced(directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], out: Path) -> None:
    """Write the checkpoint of ``directory`` into the empty directory ``out``, with ``tensors`` replacing those of the
    same names. They are consumed one by one. Raises CheckpointError for a name that the checkpoint does not have,
    another shape, and a checkpoint that is not in safetensors; OSError.
    """
    files, listed, _ = weight_files(directory)
    places: dict[str, StoredTensor] = {}
    for file in files:
        header = read_header(file)
        places |= {name: stored for name, stored in header.items() if listed.get(name, file.name) == file.name}
    is_tied = bool(read_json(directory / "config.json").get("tie_word_embeddings"))
    names = {file.name for file in files}
    for file in sorted(directory.iterdir()):
        if file.is_file() and file.name not in names:
            shutil.copyfile(file, out / file.name)
    written: set[str] = set()
    for name, tensor in tensors:
        stored = places.get(name)
        if stored is None and is_tied and name.endswith(_TIED):
            continue
        if stored is None:
            raise CheckpointError(f"{name} is not a tensor of the checkpoint in {directory}", param="tensors")
        if tuple(tensor.shape) != stored.shape:
            raise CheckpointError(
                f"tensor {name} has the shape {list(tensor.shape)}; the checkpoint has {list(stored.shape)}",
                param="tensors",
            )
        if stored.dtype not in TORCH_DTYPES:
            raise CheckpointError(
                f"tensor {name} is stored as {stored.dtype}, which cannot be replaced", param="tensors"
            )
        target = out / stored.file.name
        if target.name not in written:
            shutil.copyfile(stored.file, target)
            written.add(target.name)
        values = tensor.detach().to("cpu", TORCH_DTYPES[stored.dtype]).contiguous()
        with target.open("r+b") as opened:
            opened.seek(stored.begin)
            opened.write(values.reshape(-1).view(torch.uint8).numpy().data)
    for file in files:
        if file.name not in written:
            _link(file.resolve(), out / file.name)


def _link(file: Path, target: Path) -> None:
    """Make a hard link, because symbolic links out of a checkpoint are refused; a copy if hard links are not
    possible.
    """
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)
