"""Facts of a started engine as one value: read by the banner, the API and the server.

It crosses processes (the engine runs in its own), so it is plain data: names, numbers, sentences.
"""

from __future__ import annotations

import msgspec

from weft.adapters import Adapter
from weft.config import Sizes


class MemoryRow(msgspec.Struct, frozen=True):
    """A line of the memory table: a name, a number of bytes, and a remark for people."""

    name: str
    size_bytes: int
    remark: str


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a served model. ``name``: of the model in the API, ``directory``: of its files. ``layers``: count by
    kind, in words. ``memory``: the memory table, top to bottom. ``notes``: sentences the user should see (sizes shrunk
    to fit, parts of the checkpoint that are ignored). ``generation_defaults``: values recommended by the checkpoint's
    makers, as fields of SamplingParams; ``default_sampling``: the same, and the values of ``--default-sampling`` for
    fields on which they are silent. ``identity``: settings that determine its tokens (``weft.assemble.identity``).
    ``picture_tokens``: of a model that sees pictures, by ``PICTURE_KINDS``: with two it reads videos. ``adapters``: of
    ``--lora``, served next to the base model; ``refused_adapters``: why others of them are not served, by name, where
    the model is one of several. ``generates``: it was not saved only to embed or to score; ``score_labels``: rows of
    its score head. ``trust_control_tokens``: texts of requests may spell control tokens. ``peer``: address where other
    engines send records to it, empty where they cannot."""

    name: str
    directory: str
    family: str
    layers: str
    vocab_size: int
    dtype: str
    weights_bytes: int
    load_s: float
    device: str
    threads: int
    kernels: str
    sizes: Sizes
    memory: list[MemoryRow]
    notes: list[str]
    eos_ids: list[int]
    generation_defaults: dict[str, float | int]
    default_sampling: dict[str, float | int] = {}
    identity: dict[str, str] = {}
    picture_tokens: list[int] = []
    adapters: list[Adapter] = []
    refused_adapters: dict[str, str] = {}
    hidden_size: int = 0
    generates: bool = True
    score_labels: int = 0
    trust_control_tokens: bool = False
    peer: str = ""
