"""Family name -> the function that builds it from tensors. One line per family; see docs/models.md."""

from __future__ import annotations

from collections.abc import Callable

from weft.families.architecture import Architecture
from weft.models import (
    bamba,
    falcon_h1,
    granite_hybrid,
    jamba,
    kimi_linear,
    lfm2,
    llama,
    mamba,
    nemotron_h,
    olmo,
    qwen3_5,
    qwen3_next,
    zamba2,
)
from weft.models.decoder import CausalModel
from weft.models.weights import TensorSource

Build = Callable[[Architecture, TensorSource], CausalModel]

FAMILIES: dict[str, Build] = {
    "llama": llama.build,
    "qwen3": llama.build,
    "qwen3_5": qwen3_5.build,
    "qwen3_next": qwen3_next.build,
    "lfm2": lfm2.build,
    "lfm3": lfm2.build,
    "olmo3": olmo.build,
    "olmo_hybrid": olmo.build,
    "kimi_linear": kimi_linear.build,
    "granite_hybrid": granite_hybrid.build,
    "bamba": bamba.build,
    "falcon_h1": falcon_h1.build,
    "nemotron_h": nemotron_h.build,
    "jamba": jamba.build,
    "zamba2": zamba2.build,
    "mamba2": mamba.build,
    "mamba": mamba.build,
    "falcon_mamba": mamba.build,
}
