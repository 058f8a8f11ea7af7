"""Checkpoints that were saved without the head for next tokens: encoders, and models that score prompts.

    Qwen3Model                        no head: serves only embeddings
    Qwen3ForSequenceClassification    score.weight [labels, hidden]: logits of the labels, of the last token
    Qwen3ForTokenClassification       score.weight, score.bias: logits of the labels, of each token
    Qwen2ForRewardModel               score.0 and score.2 with weights and biases, a ReLU between them
    JevForDecision                    proj.weight, proj.bias: scores of options, of the last token

Sources: ``GenericForSequenceClassification`` and ``GenericForTokenClassification`` of transformers 5.24, ``models/jev``
of the same, the code released with Qwen2.5-Math-RM and Qwen2.5-Math-PRM.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from weft.errors import CheckpointError
from weft.families import read_architecture
from weft.families.architecture import Architecture
from weft.models.checkpoint_files import HEADS, CheckpointFiles
from weft.models.stored_values import MappedFiles, is_finite, same_values

_HEADS = (("score",), ("score.0", "score.2"))
"""Names of the products of a score head, in order, in its two forms."""
_DECISION_HEADS = (("proj",), ("",))
"""Names of a decision head: transformers saves it under the second one."""
HEAD_TENSORS = {
    f"{name}.{part}".removeprefix(".")
    for head in (*_HEADS, *_DECISION_HEADS)
    for name in head
    for part in ("weight", "bias")
}
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


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """A head of one product, or of two with a ReLU between them. ``layers``: float32 weights [out, in] and bias [out]
    of each product."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor | None], ...]

    @property
    def labels(self) -> int:
        return len(self.layers[-1][0])

    def __call__(self, rows_XD: torch.Tensor) -> torch.Tensor:
        """Return the logits of ``rows_XD``, float32 [X, labels]."""
        (weight, bias), *later = self.layers
        x_XC = F.linear(rows_XD.float(), weight, bias)
        for weight, bias in later:
            x_XC = F.linear(x_XC.relu(), weight, bias)
        return x_XC


def read_score_head(checkpoint: CheckpointFiles, hidden: int, device: torch.device | None) -> ScoreHead | None:
    """Return the score head, None where the checkpoint has none. Raises CheckpointError."""
    decides = checkpoint.config.get("model_type") == "jev"
    heads = _DECISION_HEADS if decides else _HEADS
    present = [head for head in heads if _tensor(head[0], "weight") in checkpoint.tensors]
    if not present:
        if decides:
            raise CheckpointError(
                f"{checkpoint.directory}: tensor {_tensor(heads[0][0], 'weight')}, the decision head, is missing",
                param="model",
            )
        return None
    layers, width = [], hidden
    for name in present[0]:
        weight_LD = _read(checkpoint, _tensor(name, "weight"), [None, width], device)
        width, bias = len(weight_LD), _tensor(name or "proj", "bias")
        layers.append((weight_LD, _read(checkpoint, bias, [width], device) if bias in checkpoint.tensors else None))
    head = ScoreHead(tuple(layers))
    if head.labels > LABELS_MAX:
        raise CheckpointError(
            f"{checkpoint.directory}: the score head has {head.labels} labels; the limit is {LABELS_MAX}", param="model"
        )
    return head


def _tensor(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _read(checkpoint: CheckpointFiles, name: str, shape: list[int | None], device: torch.device | None) -> torch.Tensor:
    stored, words = checkpoint.tensors[name], ", ".join("labels" if size is None else str(size) for size in shape)
    same = len(stored.shape) == len(shape) and all(
        wanted in (size, None) for size, wanted in zip(stored.shape, shape, strict=True)
    )
    if not same or not stored.shape[0]:
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
