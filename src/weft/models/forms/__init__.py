"""Which form a checkpoint's matrices are stored in: ``quantization_config`` of config.json -> StoredForm.

    none                 plain tensors
    fp8                  e4m3 with a scale per block           -> codes as they are on GPUs, else widened
    compressed-tensors   int8, int4 in words, or fp8           -> codes as they are; fp8 as above
    gptq, awq            int4 (gptq: also int8) in words       -> codes as they are
    gguf                 ggml's blocks                         -> widened

What config.json says is settled here; which tensor is stored how is seen from the headers, so lists of
exceptions (``modules_to_not_convert``, ``ignore``) need not be matched: an excepted tensor is simply there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.errors import CheckpointError
from weft.models.forms.awq import Awq
from weft.models.forms.compressed import Compressed
from weft.models.forms.fp8 import BlockFp8
from weft.models.forms.gguf import Gguf
from weft.models.forms.gptq import Gptq
from weft.models.forms.stored_form import Ask, Plain, StoredForm
from weft.models.safetensors_header import StoredTensor

__all__ = ["Ask", "Plain", "StoredForm", "stored_form"]

_READERS: dict[str, Callable[[Mapping[str, Any]], StoredForm]] = {
    "fp8": BlockFp8, "compressed-tensors": Compressed, "gptq": Gptq, "awq": Awq, "gguf": Gguf}
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
    form.tensors = tensors
    return form
