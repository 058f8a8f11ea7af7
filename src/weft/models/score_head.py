"""Checkpoints that were saved without the head for next tokens: encoders, and models that score prompts.

    Qwen3Model                        no head: serves only embeddings
    Qwen3ForSequenceClassification    score.weight [labels, hidden]: logits of the labels, of the last token
    JevForDecision                    proj.weight, proj.bias: scores of options, of the last token

Sources: ``GenericForSequenceClassification`` of transformers 5.19, ``models/jev`` of 5.24.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import torch

from weft.errors import CheckpointError
from weft.families import read_architecture
from weft.families.architecture import Architecture
from weft.models.checkpoint_files import HEADS, CheckpointFiles
from weft.models.stored_values import MappedFiles, is_finite, same_values

SCORE_HEAD = "score.weight"
_DECISION_WEIGHTS = ("proj.weight", "weight")
"""Names of the weights of a decision head: transformers saves it under the second one."""
_DECISION_BIAS = "proj.bias"
HEAD_TENSORS = {SCORE_HEAD, *_DECISION_WEIGHTS, _DECISION_BIAS}
_HEADED = ("ForCausalLM", "ForConditionalGeneration")
LABELS_MAX = 4096


def is_headless(checkpoint: CheckpointFiles) -> bool:
    """Return whether the checkpoint has no head for next tokens: the files have none, and config.json names an
    architecture without one, or the checkpoint is an embedder (these keep the generator's name and leave the head
    out).
    """
    if any(name.endswith("lm_head.weight") for name in checkpoint.tensors):
        return False
    names = [str(name) for name in checkpoint.config.get("architectures") or ()]
    without = bool(names) and not any(name.endswith(_HEADED) for name in names)
    return without or (checkpoint.directory / "modules.json").is_file()


def architecture_in(checkpoint: CheckpointFiles) -> Architecture:
    """Return the architecture of config.json, with the head that the files have: the embedding for a missing head,
    since no request asks for its logits, and a separate head that differs from the embedding even if
    ``tie_word_embeddings`` is set (merged adapters of the head), as in transformers.
    """
    architecture = read_architecture(checkpoint.config)
    if is_headless(checkpoint):
        return replace(architecture, tied_embeddings=True)
    tied = architecture.tied_embeddings and not _has_own_head(checkpoint)
    return replace(architecture, tied_embeddings=tied)


def _has_own_head(checkpoint: CheckpointFiles) -> bool:
    """Return whether the files have a head that is not a copy of the embedding."""
    stems = tuple(head.removesuffix("weight") for head in HEADS)
    stored = [tensor for name, tensor in checkpoint.tensors.items() if name.startswith(stems)]
    return any(not same_values(checkpoint.embedding, tensor) for tensor in stored)


def read_score_head(
    checkpoint: CheckpointFiles, hidden: int, device: torch.device | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return float32 [labels, hidden] and the bias [labels], None where the checkpoint has none. Raises
    CheckpointError."""
    decides = checkpoint.config.get("model_type") == "jev"
    names = _DECISION_WEIGHTS if decides else (SCORE_HEAD,)
    present = [name for name in names if name in checkpoint.tensors]
    if not present:
        if decides:
            raise CheckpointError(
                f"{checkpoint.directory}: tensor {names[0]}, the decision head, is missing", param="model"
            )
        return None, None
    weight_LD = _read(checkpoint, present[0], [None, hidden], device)
    if not decides or _DECISION_BIAS not in checkpoint.tensors:
        return weight_LD, None
    return weight_LD, _read(checkpoint, _DECISION_BIAS, [len(weight_LD)], device)


def _read(checkpoint: CheckpointFiles, name: str, shape: list[int | None], device: torch.device | None) -> torch.Tensor:
    stored, words = checkpoint.tensors[name], ", ".join("labels" if size is None else str(size) for size in shape)
    same = len(stored.shape) == len(shape) and all(
        wanted in (size, None) for size, wanted in zip(stored.shape, shape, strict=True)
    )
    if not same or not 1 <= stored.shape[0] <= LABELS_MAX:
        raise CheckpointError(
            f"{stored.file}: tensor {name} has shape {list(stored.shape)}; it must be [{words}]", param="model"
        )
    if stored.dtype not in ("F32", "F16", "BF16"):
        raise CheckpointError(
            f"{stored.file}: tensor {name} is stored as {stored.dtype}; weft reads F32, F16 and BF16 here",
            param="model",
        )
    with closing(MappedFiles()) as files:
        values = files.read(stored)
        if not is_finite(values, stored.dtype):
            raise CheckpointError(f"{stored.file}: {name} has NaN or infinite values", param="model")
        return values.to(device or torch.device("cpu"), torch.float32, copy=True)
