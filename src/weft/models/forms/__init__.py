"""Storage form of a checkpoint's matrices: ``quantization_config`` of config.json -> StoredForm.

    none                 plain tensors
    fp8                  e4m3 with a scale per block           -> codes as they are on GPUs, else widened
    compressed-tensors   int8, int4 in words, or fp8           -> codes as they are; fp8 as above
    gptq, awq,           int4 (gptq: also int8) in words       -> codes as they are
    auto-round
    modelopt, quark      NVFP4, MXFP4, MXFP8 or fp8            -> codes and their table; fp8 as above
    bitsandbytes         nf4, fp4; int8                        -> widened; codes
    torchao              int8, int4, float8                    -> codes; widened; fp8 as above
    mxfp4                experts in blocks (gpt-oss)           -> codes
    gguf                 ggml's blocks                         -> codes; IQ1 to IQ3 widened

config.json decides the method here; the headers show the form of each tensor, so lists of exceptions
(``modules_to_not_convert``, ``ignore``) need not be matched: an excepted tensor is simply there. A form's module is
imported when a checkpoint has that form.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import Any

from weft.errors import CheckpointError
from weft.models.forms.stored_form import Ask, Plain, StoredForm
from weft.models.safetensors_header import StoredTensor

__all__ = ["Ask", "Plain", "StoredForm", "quant_method", "stored_form"]

_READERS = {
    "fp8": "small_floats:BlockFp8",
    "compressed-tensors": "compressed:Compressed",
    "gptq": "words:Gptq",
    "awq": "words:Awq",
    "auto-round": "words:auto_round",
    "modelopt": "small_floats:Modelopt",
    "quark": "small_floats:Quark",
    "mxfp4": "small_floats:Mxfp4",
    "bitsandbytes": "bitsandbytes:BitsAndBytes",
    "torchao": "torchao:TorchAo",
    "gguf": "gguf:Gguf",
}
SERVED = tuple(_READERS)


def _settings(config: Mapping[str, Any]) -> Any:
    inner = config.get("text_config")
    return config.get("quantization_config") or (
        inner.get("quantization_config") if isinstance(inner, Mapping) else None
    )


def quant_method(config: Mapping[str, Any]) -> str | None:
    """Return the method as config.json names it, "unknown" if it names none; None for plain tensors."""
    settings = _settings(config)
    if not settings:
        return None
    return str(settings.get("quant_method", "unknown")) if isinstance(settings, Mapping) else "unknown"


def stored_form(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> StoredForm:
    """Return the stored form. Raises CheckpointError naming the method, or its setting, that is not served."""
    method = quant_method(config)
    if method is None:
        form: StoredForm = Plain({})
    elif method not in _READERS:
        raise CheckpointError(
            f"config.json has quantization_config.quant_method {method!r}; weft reads {', '.join(SERVED)}",
            param="model",
        )
    else:
        form = pkgutil.resolve_name(f"{__name__}.{_READERS[method]}")(_settings(config))
    form.tensors = form.headers = tensors
    return form
