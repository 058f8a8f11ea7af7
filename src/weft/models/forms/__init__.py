"""Which form a checkpoint's matrices are stored in: ``quantization_config`` of config.json -> StoredForm.

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

What config.json says is settled here; which tensor is stored how is seen from the headers, so lists of
exceptions (``modules_to_not_convert``, ``ignore``) need not be matched: an excepted tensor is simply there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.errors import CheckpointError
from weft.models.forms.bitsandbytes import BitsAndBytes
from weft.models.forms.compressed import Compressed
from weft.models.forms.gguf import Gguf
from weft.models.forms.small_floats import BlockFp8, Modelopt, Mxfp4, Quark
from weft.models.forms.stored_form import Ask, Plain, StoredForm
from weft.models.forms.torchao import TorchAo
from weft.models.forms.words import AUTO_ROUND, Awq, Gptq, auto_round
from weft.models.safetensors_header import StoredTensor

__all__ = ["Ask", "Plain", "StoredForm", "stored_form"]

_READERS: dict[str, Callable[[Mapping[str, Any]], StoredForm]] = {
    "fp8": BlockFp8, "compressed-tensors": Compressed, "gptq": Gptq, "awq": Awq,
    AUTO_ROUND: auto_round, "modelopt": Modelopt, "quark": Quark, "mxfp4": Mxfp4,
    "bitsandbytes": BitsAndBytes, "torchao": TorchAo, "gguf": Gguf}
SERVED = tuple(_READERS)


def stored_form(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> StoredForm:
    """Raises CheckpointError naming the method, or the setting of it, that is not served."""
    inner = config.get("text_config")
    settings = config.get("quantization_config") or (
        inner.get("quantization_config") if isinstance(inner, Mapping) else None)
    if not settings:
        form: StoredForm = Plain({})
    else:
        method = str(settings.get("quant_method", "unknown")) if isinstance(settings, Mapping) else "unknown"
        if method not in _READERS:
            raise CheckpointError(f"config.json has quantization_config.quant_method {method!r}; weft reads "
                                  f"{', '.join(SERVED)}", param="model")
        form = _READERS[method](settings)
    form.tensors = form.headers = tensors
    return form
