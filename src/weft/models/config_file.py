"""The config.json of a checkpoint directory, with the quantisation that modelopt's exports state elsewhere.

    config.json            quantization_config {"quant_method": "modelopt", "quant_algo": "NVFP4", ...}
                           or, as the other file has it, {"quant_method": "modelopt", "quantization": {...}}
    hf_quant_config.json   {"quantization": {"quant_algo": "NVFP4", ...}}        of older exports

Without torch: plans read it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import CheckpointError
from weft.files import read_json


def read_config(directory: Path) -> dict[str, Any]:
    """Return the parsed config.json with one ``quantization_config``. Raises CheckpointError naming the file that is
    missing or malformed."""
    config = read_json(directory / "config.json")
    whole = config.get("quantization_config")
    if isinstance(whole, Mapping) and isinstance(settings := whole.get("quantization"), Mapping):
        return config | {"quantization_config": {**whole, **settings}}
    apart, inner = directory / "hf_quant_config.json", config.get("text_config")
    if whole or not apart.is_file() or (isinstance(inner, Mapping) and inner.get("quantization_config")):
        return config
    settings = read_json(apart).get("quantization")
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{apart}: quantization is missing", param="model")
    return config | {"quantization_config": {"quant_method": "modelopt", **settings}}
