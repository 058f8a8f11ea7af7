"""The C++ forms of the ops by their names, as ``naive_ops``. A call that one does not take fails the test."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from weft.tensor.op import UNFIT

_MODULES = {
    "add_norm": "norm",
    "rms_norm": "norm",
    "causal_conv": "conv",
    "short_conv": "conv",
    "weight_product": "linear",
    "silu_mul": "elementwise",
    "rotary": "elementwise",
    "activate": "elementwise",
    "softmax_": "elementwise",
    "gated_delta_layer": "recurrent_layers",
    "mamba2_layer": "recurrent_layers",
}
"""The module of an op that is not named as the op."""


def form_of(name: str) -> Callable[..., Any]:
    """Return the C++ form of op ``name``; a call of it may return UNFIT."""
    module = importlib.import_module(f"weft.tensor.ops.{_MODULES.get(name, name)}")
    form: Callable[..., Any] = getattr(module, name).native
    return form


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    form = form_of(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        out = form(*args, **kwargs)
        assert out is not UNFIT, f"{name} in C++ does not take this call"
        return out

    return run
