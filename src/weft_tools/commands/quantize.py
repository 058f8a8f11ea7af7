"""``weft quantize SOURCE OUT --form int8``: a checkpoint in fewer bits, which other engines read too.

The writing is ``models.quantized_copy`` and, of GGUF files, ``models.gguf.writing``; here are the flags and
the report.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from weft.cli.flags import FlagCommand
from weft.errors import CheckpointError
from weft.units import format_bytes

if TYPE_CHECKING:
    from weft_tools.quantize.quantized_copy import MatrixError

_FORMS = ("int8", "int4", "w8a8", "q4_k")
_LAYER = re.compile(r".*?\.\d+(?=\.)")


@click.command(
    "quantize",
    cls=FlagCommand,
    params=[
        click.Argument(["source"]),
        click.Argument(["out"], type=click.Path(path_type=Path)),
        click.Option(
            ["--form"],
            type=click.Choice(_FORMS),
            required=True,
            help="int8 and int4: only weights, scales for 128 and 32 columns; w8a8: int8 by rows, for "
            "inputs in int8; q4_k: a GGUF file.",
        ),
        click.Option(["--revision"], help="Branch, tag or commit of a hub model."),
    ],
)
def command(source: str, out: Path, form: str, revision: str | None) -> int:
    """Write a checkpoint in int8 or int4, as compressed-tensors does, or as a GGUF file.

    SOURCE is a checkpoint directory or a hub name in 16 or 32 bits; OUT is a new directory, or with q4_k a
    new file, which appears when it is complete. A run that was broken off goes on where it was.
    """
    from weft.models.hub import resolve_model
    from weft.text.pooling import is_embedder, read_embedding_settings
    from weft_tools.quantize.gguf_writing import write_gguf
    from weft_tools.quantize.quantized_copy import FORMATS, write_quantized

    directory = resolve_model(source, revision)
    embedding = read_embedding_settings(directory)
    if form != "q4_k":
        errors = write_quantized(directory, out, next(one for one in FORMATS if one == form))
    elif embedding.refusal or embedding.dense:
        raise CheckpointError(
            f"{directory}: a GGUF file can only name a pooling, of the first token, the last one or the mean; "
            f"{embedding.refusal or 'its modules.json has Dense'}",
            param="SOURCE",
        )
    else:
        errors = write_gguf(directory, out, pooling=embedding.kind if is_embedder(directory) else None)
    stored, copied = sum(one.stored_bytes for one in errors), sum(one.copied_bytes for one in errors)
    click.echo(f"{out}: {len(errors)} matrices in {form}, {format_bytes(stored)} became {format_bytes(copied)}")
    click.echo("\n".join(error_lines(errors)))
    return 0


def error_lines(errors: Sequence[MatrixError]) -> list[str]:
    """Return a line for each layer: the error of all its matrices, and the matrix with the largest one."""
    by_layer: dict[str, list[MatrixError]] = {}
    for one in errors:
        above = _LAYER.match(one.name)
        by_layer.setdefault(above[0] if above else one.name, []).append(one)
    lines = ["errors, relative to the rounded weights: a layer's, and the largest of its matrices"]
    for layer, own in by_layer.items():
        size = sum(one.stored_bytes for one in own)
        whole = math.sqrt(sum(one.stored_bytes * one.error**2 for one in own) / size)
        worst = max(own, key=lambda one: one.error)
        lines.append(f"  {layer:<20}{whole:8.3%}{worst.error:10.3%}  {worst.name.removeprefix(layer + '.')}")
    return lines
