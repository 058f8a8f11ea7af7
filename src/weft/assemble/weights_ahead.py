"""How much memory the weights of a checkpoint will take, from its headers and before torch is imported.

    bfloat16 matrices of the language model, in 12 bits a number        of all files
    0                            to a GPU, into other forms, into a mapped file, for one rank of several

It is an estimate for ``memory_ahead``: a file that cannot be read is refused later, by name. At most half of
the free memory is touched ahead, so that a checkpoint that does not fit fails where weights are read.
"""

from __future__ import annotations

from pathlib import Path

from weft.config import EngineConfig
from weft.errors import CheckpointError
from weft.host import container_memory_limit_bytes
from weft.models.safetensors_header import StoredTensor, read_header
from weft.models.skipped import SKIPPED_PREFIXES

_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
"""Files of the drivers of NVIDIA and AMD."""


def bytes_ahead(config: EngineConfig, directory: Path) -> int:
    if not _packs_on_cpu(config):
        return 0
    try:
        tensors = [tensor for file in directory.glob("*.safetensors")
                   for tensor in read_header(file).values()]
    except (CheckpointError, OSError):
        return 0
    return min(sum(map(_packed_bytes, tensors)), _available_bytes() // 2)


def _available_bytes() -> int:
    """Within the container's limit. It waits for no other engine, as ``free_ram_bytes`` does."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit = container_memory_limit_bytes()
    return available if limit is None else min(available, limit)


def _packs_on_cpu(config: EngineConfig) -> bool:
    on_cpu = config.device == "cpu" or (
        config.device == "auto" and not any(Path(driver).exists() for driver in _GPU_DRIVERS))
    return (on_cpu and config.tp == 1 and config.quantize == "none" and config.weights_cache is None
            and config.cpu_kernels != "torch" and config.dtype in ("auto", "bfloat16"))


def _packed_bytes(tensor: StoredTensor) -> int:
    if tensor.dtype != "BF16" or len(tensor.shape) < 2 or tensor.name.startswith(SKIPPED_PREFIXES):
        return 0
    return tensor.stored_bytes * 3 // 4
