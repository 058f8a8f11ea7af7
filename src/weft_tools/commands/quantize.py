"""``weft quantize SOURCE OUT --form int8``: a checkpoint in fewer bits, which other engines read too.

``weft_tools.quantize`` writes the files (``quantized_copy``, ``gguf_writing``); this module has the flags and the
report.
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

    SOURCE is a checkpoint directory or a hub name in 16 or 32 bits; OUT is a new directory, or with q4_k a new file,
    which appears once it is complete. An interrupted run can be continued.
    """
    from weft.models.hub import resolve_model
    from weft.text.pooling import is_embedder, read_embedding_settings
    from weft_tools.quantize.gguf_writing import write_gguf
    from weft_tools.quantize.quantized_copy import FORMATS, write_quantized

    directory = resolve_model(source, revision)
    embedding = read_embedding_settings(directory)
    if form != "q4_k":
        errors = write_quantized(directory, out, next(known for known in FORMATS if known == form))
    elif embedding.refusal or embedding.dense or embedding.kind == "token":
        reason = "its modules.json has Dense" if embedding.dense else "it gives a vector for each token"
        raise CheckpointError(
            f"{directory}: a GGUF file can only name a pooling, of the first token, the last one or the mean; "
            f"{embedding.refusal or reason}",
            param="SOURCE",
        )
    else:
        errors = write_gguf(directory, out, pooling=embedding.kind if is_embedder(directory) else None)
    stored, copied = sum(error.stored_bytes for error in errors), sum(error.copied_bytes for error in errors)
    click.echo(f"{out}: {len(errors)} matrices in {form}, {format_bytes(stored)} became {format_bytes(copied)}")
    click.echo("\n".join(error_lines(errors)))
    return 0


def error_lines(errors: Sequence[MatrixError]) -> list[str]:
    """Return a line for each layer: the error of all its matrices, and the matrix with the largest one."""
    by_layer: dict[str, list[MatrixError]] = {}
    for matrix in errors:
        above = _LAYER.match(matrix.name)
        by_layer.setdefault(above[0] if above else matrix.name, []).append(matrix)
    lines = ["errors, relative to the rounded weights: a layer's, and the largest of its matrices"]
    for layer, own in by_layer.items():
        size = sum(matrix.stored_bytes for matrix in own)
        whole = math.sqrt(sum(matrix.stored_bytes * matrix.error**2 for matrix in own) / size)
        worst = max(own, key=lambda matrix: matrix.error)
        lines.append(f"  {layer:<20}{whole:8.3%}{worst.error:10.3%}  {worst.name.removeprefix(layer + '.')}")
    return lines
