"""A checkpoint directory as a set of named tensors, read only from headers.

    config.json  +  model.safetensors                                    one file
                 |  model.safetensors.index.json -> model-0000N-of-...   an index over several
                 |  *.safetensors                                        several without an index
                 |  *.gguf                                               a view of GGUF files (models/gguf)

``CheckpointFiles.open`` reads config.json and the headers, and no weight. It refuses all visible faults: files that
are missing, truncated, broken or linked out of the directory, and an index that names tensors which no file has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from weft.errors import CheckpointError
from weft.families import EACH_EXPERT, is_text_alone, most_experts, name_here, stores_transposed
from weft.models.config_file import read_config
from weft.models.forms import quant_method, stored_form
from weft.models.gguf import METHOD
from weft.models.safetensors_header import StoredTensor, read_header, weight_files
from weft.units import format_bytes

_PREFIXES = (
    "model.language_model.",
    "model.",
    "language_model.model.",
    "language_model.",
    "backbone.",
    "language_model.backbone.",
    "model.text_model.",
    "llm.model.",
    "thinker.model.",
    "model.decoder.",
    "decoder.",
    "biogpt.",
    "lfm.",
    "",
)
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight", "word_embeddings.weight")
HEADS = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.lm_head.weight",
    "llm.lm_head.weight",
    "thinker.lm_head.weight",
)
DRAFT_PREFIXES = ("mtp.", "model.mtp.")
"""Prefixes of heads that predict further tokens (multi-token prediction)."""
_TOWERS: dict[str, tuple[str, ...]] = {
    "vision tower": (
        "visual.",
        "vision_tower.",
        "vision_model.",
        "multi_modal_projector.",
        "embed_vision.",
        "linear_proj.",
    ),
    "audio tower": (
        *("audio_tower.", "audio_model.", "embed_audio.", "talker.", "token2wav.", "code2wav."),
        *("conformer.", "audio_adapter.", "audio_embedding.", "depthformer.", "depth_linear.", "depth_embeddings."),
        *("codebook_offsets", "audio_loss_weights"),  # two tensors of LFM2-Audio
    ),
}

SKIPPED_PREFIXES: tuple[str, ...] = tuple(
    wrapper + name for names in _TOWERS.values() for name in names for wrapper in ("", "model.", "thinker.")
)
"""Prefixes of the tensors of a multimodal checkpoint's vision and audio towers, which are not read from disk."""
_UNUSED_KNOWN = (*DRAFT_PREFIXES, *SKIPPED_PREFIXES)
_UNUSED_KNOWN_ENDS = ("rotary_emb.inv_freq",)
_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Tensors of a checkpoint: ``tensors`` by name over all files; ``prefix`` goes before every name of the language
    model.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    prefix: str
    source: Path
    """The file that lists the tensors (the index, or the one weights file): errors point at it."""

    @classmethod
    def open(cls, directory: Path) -> CheckpointFiles:
        """Open a checkpoint. Raises CheckpointError naming the file that is missing, malformed or truncated."""
        config = read_config(directory)
        if quant_method(config) == METHOD:
            from weft.models.gguf.view import stored_tensors

            tensors, source = stored_tensors(directory)
            return cls(directory, config, tensors, _prefix(tensors), source)
        files, listed, source = weight_files(directory)
        headers = {file.name: read_header(file) for file in files}
        tensors = {}
        for header in headers.values():
            tensors.update(header)
        for name, file_name in listed.items():
            if name not in headers[file_name]:
                raise CheckpointError(f"{source}: places {name} in {file_name}, which does not hold it", param="model")
            tensors[name] = headers[file_name][name]
        tensors = tensors_here(config, tensors)
        return cls(directory, config, tensors, _prefix(tensors), source)

    @property
    def stored_dtype(self) -> str:
        """Return the format name of the embedding's dtype ("F32" when the embedding is missing, which fails later)."""
        return "F32" if self.embedding is None else self.embedding.dtype

    @property
    def embedding(self) -> StoredTensor | None:
        names = (self.prefix + name for name in _EMBEDDINGS)
        return next((self.tensors[name] for name in names if name in self.tensors), None)

    def unused(self, used: set[str]) -> list[str]:
        """Return names that no part of the model asked for, without names that are known to be unused."""
        known_ends = (*_UNUSED_KNOWN_ENDS, *stored_form(self.config, self.tensors).left_ends)
        return sorted(
            name
            for name in self.tensors
            if name not in {*used, *HEADS}  # a head that nothing reads was compared with the embedding
            and not name.startswith(_UNUSED_KNOWN)
            and not name.endswith(known_ends)
        )

    def of_model(self, name: str) -> bool:
        """Return whether a tensor belongs to the language model, by its name."""
        stems = tuple(head.removesuffix("weight") for head in HEADS)
        return quant_method(self.config) == METHOD or name.startswith((self.prefix or "layers.", *stems))


def tensors_here(config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of files under their names here, matrices as [rows, columns], and each expert's separately."""
    here, turned = name_here(config), stores_transposed(config)
    named = {here(name): replace(tensor, name=here(name)) for name, tensor in stored.items()}
    stacks = [name for name in named if EACH_EXPERT in name]
    experts = range(most_experts(config) if stacks else 0)
    for name in stacks:
        parts = named.pop(name).divided([name.replace(EACH_EXPERT, str(expert)) for expert in experts])
        named |= {part.name: part for part in parts}
    return {name: tensor.turned() if turned(name) else tensor for name, tensor in named.items()}


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """Handle of a checkpoint's heads for multi-token prediction, which are read only if speculation uses them
    (``weft.models.mtp``). The heads have a prefix of their own, or are layers after the last (DeepSeek-V3). ``names``:
    of their tensors; ``count``: number of heads.
    """

    checkpoint: CheckpointFiles
    dtype: torch.dtype
    names: frozenset[str]
    count: int = 1

    @classmethod
    def of(cls, checkpoint: CheckpointFiles, dtype: torch.dtype, layers: int) -> DraftWeights | None:
        """Return the handle, None for a checkpoint without such heads. ``layers``: of the model."""
        for prefix in DRAFT_PREFIXES:
            heads = frozenset(name for name in checkpoint.tensors if name.startswith(prefix))
            if heads:
                return cls(replace(checkpoint, prefix=prefix), dtype, heads)
        behind = draft_layers(checkpoint, layers)
        names = frozenset(name for name in checkpoint.tensors if name.startswith(behind)) if behind else None
        return cls(checkpoint, dtype, names, len(behind)) if names else None


def draft_layers(checkpoint: CheckpointFiles, layers: int) -> tuple[str, ...]:
    """Return "model.layers.42." of each head that is stored as a layer after ``layers`` others."""
    names: list[str] = []
    while True:
        name = f"{checkpoint.prefix}layers.{layers + len(names)}."
        if f"{name}enorm.weight" not in checkpoint.tensors:  # further layers without it are not heads
            return tuple(names)
        names.append(name)


def text_alone_line(config: Mapping[str, Any]) -> str | None:
    """Return a line for a wrapper whose text part is all that weft knows; None for any other checkpoint."""
    if not is_text_alone(config):
        return None
    return f"weft serves the text part of {config.get('model_type')}: pictures and sound are not read."


def skipped_line(tensors: Mapping[str, StoredTensor], *, sees: bool = False) -> str | None:
    """Return one sentence for the user about parts that are skipped; None for a checkpoint of only text, or whose
    vision tower is read (``sees``).
    """
    towers = []
    for tower, names in _TOWERS.items():
        if sees and tower == "vision tower":
            continue
        prefixes = names + tuple(f"model.{name}" for name in names)
        sizes = [stored.stored_bytes for name, stored in tensors.items() if name.startswith(prefixes)]
        if sizes:
            plural = "s" if len(sizes) > 1 else ""
            towers.append(f"{tower} ({len(sizes)} tensor{plural}, {format_bytes(sum(sizes))})")
    if not towers:
        return None
    return f"Skipped the {' and the '.join(towers)}: weft serves the text part of this model."


def unused_warning(names: Sequence[str]) -> str | None:
    """Return one line about tensors that no part of the model uses; None when there are none."""
    if not names:
        return None
    more = len(names) - _NAMES_SHOWN
    return (
        f"{len(names)} tensor{'s are' if len(names) > 1 else ' is'} not used: "
        f"{', '.join(names[:_NAMES_SHOWN])}{f' and {more} more' if more > 0 else ''}"
    )


def _prefix(tensors: Mapping[str, StoredTensor]) -> str:
    return next((p for p in _PREFIXES for name in _EMBEDDINGS if p + name in tensors), "model.")
