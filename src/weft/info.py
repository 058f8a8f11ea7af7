"""Facts of a started engine as one value: read by the banner, the API and the server.

It crosses processes (the engine runs in its own), so it is plain data: names, numbers, sentences.
"""

from __future__ import annotations

import msgspec

from weft.adapters import Adapter
from weft.config import Sizes


class MemoryRow(msgspec.Struct, frozen=True):
    """A line of the memory table: what, how many bytes, and a remark for people."""

    name: str
    size_bytes: int
    remark: str


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``name`` is what the API calls the model, ``directory`` where its files are. ``layers``: count by
    kind, in words. ``memory``: the memory table, top to bottom. ``notes``: sentences the user should see
    (what was shrunk to fit, what of the checkpoint was ignored). ``generation_defaults``: what the
    checkpoint's makers recommend, as fields of SamplingParams; ``default_sampling``: the same, and the values
    of ``--default-sampling`` for fields on which they are silent. ``identity``: what decides its tokens
    (``weft.assemble.identity``). ``picture_tokens``: of a model that sees pictures, by
    ``PICTURE_KINDS``: with two it reads videos. ``adapters``: of ``--lora``,
    what it serves beside the model; ``refused_adapters``: why others of them are not served, by name, where the model
    is one of several. ``generates``: it was not saved to embed or to score alone;
    ``score_labels``: rows of its score head. ``trust_control_tokens``:
    texts of requests may spell control tokens. ``peer``: where other engines send records to it, empty
    where they cannot."""

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
