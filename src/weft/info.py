"""Facts of a started engine as one value, for the banner, the API and the server.

The value is sent between processes, so it is plain data: names, numbers, sentences.
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
    makers, as fields of SamplingParams; ``default_sampling``: the same, completed by ``--default-sampling``.
    ``identity``: settings that determine the generated tokens (``weft.assemble.identity``). ``picture_tokens``: by
    ``PICTURE_KINDS``, for a model that reads pictures; two for one that reads videos too. ``adapters``: served adapters
    of ``--lora``; ``refused_adapters``: reasons why others are not served, by name (only with several models).
    ``generates``: whether it generates text; false for a model saved only to embed or to score. ``score_labels``: rows
    of the score head. ``trust_control_tokens``: whether texts of requests may spell control tokens. ``peer``: address
    where other engines send records to this one; empty if they cannot."""

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
