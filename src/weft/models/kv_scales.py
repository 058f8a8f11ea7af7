"""Scales of a checkpoint for KV in fp8: for K and V of a layer, one number or one per KV head.

Names differ by the calibrating tool: ``self_attn.k_scale`` or ``attn.k_scale``, ``k_proj.k_scale``,
``k_proj.output_scale`` (compressed-tensors), ``kv_scale`` for both. These tensors are few and tiny, so they are read by
name, in any family, before the weights.
"""

from __future__ import annotations

import re

import torch

from weft.errors import CheckpointError
from weft.models.checkpoint_files import CheckpointFiles
from weft.models.forms.stored_form import FLOATS
from weft.models.stored_values import MappedFiles, is_finite
from weft.spec import ModelSpec

_NAME = re.compile(
    r"layers\.(\d+)\.(?:[\w.]+\.)?"
    r"(?:(?P<part>k|v|kv)_scale|(?P<projection>k|v)_proj\.output_scale)$"
)
_UNREAD = re.compile(r"layers\.\d+\.(?:[\w.]+\.)?(?:q_scale|prob_scale|[qkv]_zero_point)$")
"""Names of scales of queries and of attention weights, which are never narrowed."""


def read_kv_scales(checkpoint: CheckpointFiles, spec: ModelSpec) -> tuple[dict[int, torch.Tensor], set[str]]:
    """Return the scales by layer, float32 [K and V, kv_heads], only K for a layer without V, and the names that were
    looked at. Raises CheckpointError that names a scale of another shape.
    """
    scales_of: dict[int, dict[str, torch.Tensor]] = {}
    files = MappedFiles()
    names = {name for name in checkpoint.tensors if _UNREAD.search(name)}
    for name, stored in checkpoint.tensors.items():
        match = _NAME.search(name)
        if match is None or int(match[1]) >= len(spec.layers):
            continue
        layer, heads = int(match[1]), spec.layers[int(match[1])].cached_heads
        names.add(name)
        if not heads:
            continue
        scale = files.read(stored).float().flatten() if stored.dtype in FLOATS else torch.empty(0)
        if not is_finite(scale, "F32"):
            raise CheckpointError(f"{stored.file}: {name} is not finite", param="model")
        if scale.numel() not in (1, heads):
            raise CheckpointError(
                f"{stored.file}: {name} holds {scale.numel()} scales for {heads} KV heads", param="model"
            )
        part = match["part"] or match["projection"]
        for kind in part:
            scales_of.setdefault(layer, {})[kind] = scale.expand(heads)
    files.close()
    whole = {}
    for layer, scales in scales_of.items():
        parts = "kv" if spec.layers[layer].has_values else "k"
        if all(part in scales for part in parts):
            whole[layer] = torch.stack([scales[part] for part in parts])
    return whole, names
