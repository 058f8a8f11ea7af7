"""``weft quantize SOURCE OUT --form int8``: a checkpoint in fewer bits, which other engines read too.

The writing is ``models.quantized_copy`` and, of GGUF files, ``models.gguf.writing``; here are the flags and
the report.
"""

from __future__ import annotations

from pathlib import Path

import click

from weft.cli.flags import FlagCommand
from weft.errors import CheckpointError
from weft.units import format_bytes

_FORMS = ("int8", "int4", "w8a8", "q4_k")
_WORST_SHOWN = 8


@click.command("quantize", cls=FlagCommand, params=[
    click.Argument(["source"]),
    click.Argument(["out"], type=click.Path(path_type=Path)),
    click.Option(["--form"], type=click.Choice(_FORMS), required=True,
                 help="int8 and int4: weights alone, scales for 128 and 32 columns; w8a8: int8 by rows, for "
                      "inputs in int8; q4_k: a GGUF file."),
    click.Option(["--revision"], help="Branch, tag or commit of a hub model."),
])
def command(source: str, out: Path, form: str, revision: str | None) -> int:
    """Write a checkpoint in int8 or int4, as compressed-tensors does, or as a GGUF file.

    SOURCE is a checkpoint directory or a hub name in 16 or 32 bits; OUT is a new directory, or with q4_k a
    new file, which appears when it is complete. A run that was broken off goes on where it was.
    """
    from weft.models.gguf.writing import write_gguf
    from weft.models.hub import resolve_model
    from weft.models.quantized_copy import FORMATS, write_quantized
    from weft.text.pooling import is_embedder, read_embedding_settings

    directory = resolve_model(source, revision)
    embedding = read_embedding_settings(directory)
    if form != "q4_k":
        errors = write_quantized(directory, out, next(one for one in FORMATS if one == form))
    elif embedding.refusal:
        raise CheckpointError(f"{directory}: a GGUF file says pooling alone, of the last token or the mean; "
                              f"{embedding.refusal}", param="SOURCE")
    else:
        errors = write_gguf(directory, out, pooling=embedding.kind if is_embedder(directory) else None)
    worst = sorted(errors, key=lambda one: -one.error)
    stored, copied = sum(one.stored_bytes for one in errors), sum(one.copied_bytes for one in errors)
    click.echo(f"{out}: {len(errors)} matrices in {form}, {format_bytes(stored)} became "
               f"{format_bytes(copied)}")
    click.echo("error of a matrix, as a part of its size; the largest:")
    for one in worst[:_WORST_SHOWN]:
        click.echo(f"  {one.error:8.3%}  {one.name}")
    return 0
