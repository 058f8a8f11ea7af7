"""The commands of this package, which ``weft`` finds by the entry point group ``weft.commands``."""

from __future__ import annotations

VERBS: dict[str, tuple[str, str]] = {
    "eval": ("weft_tools.commands.evaluate", "Score a model: `weft eval recall`, `tools` or `json`."),
    "bench": ("weft_tools.commands.bench", "Measure kernels, the engine, or a server."),
    "quantize": ("weft_tools.commands.quantize", "Write a checkpoint in int8 or int4, as compressed-tensors does."),
    "simulate": ("weft_tools.commands.simulate", "Replay a trace of traffic: hit rates by policy and by memory."),
}
"""Module and sentence of the help by name, as in ``weft.cli.main``."""
