"""Checks of a release: contents of its files, and its first minute in an empty environment without a compiler."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PURE_BYTES = 9_000_000
KERNEL_BYTES = 5_000_000
"""Most bytes of a wheel without kernels, and of what the kernels add to it."""
SDIST_BYTES = 13_000_000
NEEDED = (
    "weft/py.typed",
    "weft/embedded/weft-recall/model.safetensors",
    "weft/server/page_files/index.html",
    "weft/server/page_files/vendor/LICENSE.marked",
    "weft_tools/py.typed",
    "weft_tools/sim/sample/mooncake_conversation.jsonl",
    "DIST/entry_points.txt",
    "DIST/licenses/LICENSE",
    "DIST/licenses/src/weft/server/page_files/vendor/LICENSE.marked",
)
"""Files of each wheel; DIST stands for its folder of metadata."""
_FOREIGN = re.compile(r"(^|/)(tests?|csrc|benchmarks|build|__pycache__)/|\.(pyc|[ch]pp|[oa])$")
_MACHINES = {62: "x86_64", 183: "aarch64"}
_TABLES = {"x86_64": (b"portable", b"x86_64_v3", b"x86_64_v4", b"x86_64_v4_bf16"), "aarch64": (b"neon",)}
NEWEST_SYMBOLS = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)}
"""Newest versions of symbols that kernels may ask for: those of RHEL 9."""
SHELL_TOOLS = ("bash", "cat", "curl", "env", "sh")
"""Programs besides Python's that the README's commands use."""


def wheel_complaints(wheel: Path, version: str) -> list[str]:
    """Return a line for each fault of a wheel: foreign or missing files, kernels, size, version."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        kernels = {name: archive.read(name) for name in names if re.search(r"/_native\.[\w.-]*so$", name)}
    parts = wheel.stem.split("-")
    metadata = f"weft-{parts[1]}.dist-info"
    faults = [f"no part of a wheel: {name}" for name in names if _FOREIGN.search(name)]
    faults += [
        f"a folder of its own: {name}" for name in names if name.split("/")[0] not in ("weft", "weft_tools", metadata)
    ]
    needed = [name.replace("DIST", metadata) for name in NEEDED]
    faults += [f"missing: {name}" for name in needed if name not in names]
    if parts[1] != version.replace("-", "_"):
        faults.append(f"its version is {parts[1]}, and not {version}")
    is_pure = parts[-1] == "any"
    if len(kernels) != (0 if is_pure else 1):
        faults.append(f"{len(kernels)} files of kernels: {', '.join(kernels) or 'the compiler failed'}")
    for name, content in kernels.items():
        faults += kernel_complaints(name, content, wheel)
    limit = PURE_BYTES + (0 if is_pure else KERNEL_BYTES)
    if wheel.stat().st_size > limit:
        faults.append(f"{wheel.stat().st_size:,} bytes, and at most {limit:,} are expected")
    return [f"{wheel.name}: {fault}" for fault in faults]


def kernel_complaints(name: str, content: bytes, wheel: Path) -> list[str]:
    """Return a line for each fault of ``_native``: another machine or Python than its wheel names, a missing table."""
    _, _, python, abi, platform = wheel.stem.split("-")
    machine = _MACHINES.get(int.from_bytes(content[18:20], "little"), "an unknown machine")
    faults = []
    if not platform.endswith(machine):
        faults.append(f"{name} is for {machine}")
    suffix = "_native.abi3.so" if abi == "abi3" else f"_native.cpython-{python.removeprefix('cp')}-"
    if suffix not in name:
        faults.append(f"{name} is not for {abi}")
    missing = [table.decode() for table in _TABLES.get(machine, ()) if table + b"\0" not in content]
    if missing:
        faults.append(f"{name} has no kernels for {', '.join(missing)}")
    for library, newest in NEWEST_SYMBOLS.items():
        found = re.findall(rb"\0" + library.encode() + rb"_(\d+(?:\.\d+)+)(?=\0)", content)
        if any(tuple(map(int, version.split(b"."))) > newest for version in found):
            faults.append(f"{name} asks for symbols of {library} that are newer than {'.'.join(map(str, newest))}")
    if str(ROOT).encode() in content:
        faults.append(f"{name} names the folder that it was built in")
    return faults


def sdist_complaints(sdist: Path, version: str) -> list[str]:
    """Return a line for each fault of a source archive."""
    with tarfile.open(sdist) as archive:
        names = [member.name.partition("/")[2] for member in archive if member.isfile()]
    needed = (
        "PKG-INFO",
        "CMakeLists.txt",
        "csrc/module.cpp",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "src/weft/py.typed",
    )
    faults = [f"missing: {name}" for name in needed if name not in names]
    faults += [f"no part of it: {name}" for name in names if re.search(r"(^|/)(build|dist|\.venv|__pycache__)/", name)]
    if sdist.name != f"weft-{version}.tar.gz":
        faults.append(f"its version is not {version}")
    if sdist.stat().st_size > SDIST_BYTES:
        faults.append(f"{sdist.stat().st_size:,} bytes, and at most {SDIST_BYTES:,} are expected")
    return [f"{sdist.name}: {fault}" for fault in faults]


def check_import_under_qemu(wheel: Path, root: Path) -> str:
    """Import the kernels of an aarch64 wheel in an emulated Python and return what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            [name] = [one for one in archive.namelist() if "/_native." in one]
            archive.extract(name, folder)
        code = "import _native, platform; print('imported on', platform.machine() + ':', *_native.instruction_sets())"
        return _printed(
            ["qemu-aarch64", "-L", str(root), str(root / "usr/bin/python3.11"), "-c", code],
            {"PYTHONPATH": str(Path(folder, name).parent), "PYTHONHOME": str(root / "usr")},
        ).strip()


def check_environment(wheel: Path, torch: list[str], limit_s: float | None) -> None:
    """Install ``wheel`` into an empty environment and do what the README says.

    ``torch``: a requirement, then options of pip for it. ``limit_s``: most seconds from the empty environment to the
    first token on two cores; None for no limit. Raises SystemExit when it is exceeded or a command fails."""
    with tempfile.TemporaryDirectory(prefix="weft-release-") as name:
        folder = Path(name)
        variables = without_compiler(folder)
        downloads = folder / "downloads"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        # Downloads are not counted: an index may be near or far.
        _printed([*pip, "download", "--dest", str(downloads), *torch])
        _printed([*pip, "download", "--dest", str(downloads), "--find-links", str(downloads), torch[0], str(wheel)])
        cores = sorted(os.sched_getaffinity(0))[:2]
        os.sched_setaffinity(0, cores)
        began, used = time.monotonic(), os.times()
        _printed([sys.executable, "-m", "venv", str(folder / "env")])
        own = [str(folder / "env/bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        _printed([*own, "--no-index", "--find-links", str(downloads), str(wheel)], variables)
        installed = time.monotonic()
        with served(folder, variables) as (port, text):
            seconds = time.monotonic() - began
            usage = os.times()
            processors = sum(usage[2:4]) - sum(used[2:4])
            print(f"{wheel.name}: first token {text!r} after {seconds:.1f} s on {len(cores)} cores", flush=True)
            to_install = installed - began
            print(
                f"  {to_install:.1f} s to install ({processors:.0f} CPU s), {seconds - to_install:.1f} s to serve; "
                f"load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            for line in readme_commands(port):
                print(f"  {line.splitlines()[0][:100]}", flush=True)
                _printed(["bash", "-euo", "pipefail", "-c", line], variables, folder)
        if limit_s is not None and seconds > limit_s:
            raise SystemExit(f"the first token took {seconds:.1f} s, and at most {limit_s:g} are promised")


def without_compiler(folder: Path) -> dict[str, str]:
    """Return variables with a PATH of the new environment and SHELL_TOOLS alone."""
    links = folder / "links"
    links.mkdir()
    for name in SHELL_TOOLS:
        found = shutil.which(name)
        if found is None:
            raise SystemExit(f"{name} is missing: the README's commands use it")
        (links / name).symlink_to(found)
    return {
        "PATH": f"{folder / 'env/bin'}{os.pathsep}{links}", "HOME": str(folder), "CC": "", "CXX": "",
        "XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": "",
    }  # fmt: skip


@contextlib.contextmanager
def served(folder: Path, variables: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Start ``weft serve`` and yield its port and its first token, as soon as a client has it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "serve.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [folder / "env/bin/weft", "serve", "--port", str(port)], cwd=folder, env={**os.environ, **variables},
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        while (text := first_token(port)) is None:
            if server.poll() is not None:
                raise SystemExit(f"weft serve ended with code {server.returncode}:\n{log.read_text()[-3000:]}")
            time.sleep(0.05)
        yield port, text
    finally:
        server.terminate()
        server.wait(30)


def first_token(port: int) -> str | None:
    """Return the first text of a streamed answer; None while no server answers."""
    body = {"model": "default", "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status == 503:
            return None
        for line in answer:
            if line.startswith(b"data: {"):
                text = json.loads(line[6:])["choices"][0]["delta"].get("content")
                if text:
                    return str(text)
        raise SystemExit(f"the server answered {answer.status} without a token")
    except ConnectionError:
        return None
    finally:
        connection.close()


def readme_commands(port: int) -> list[str]:
    """Return the shell commands for those lines and programs of the README that need no download and no terminal."""
    from tests.docs.blocks import blocks_of
    from tests.docs.commands import shell_lines
    from tests.docs.not_run import reason

    commands = ["weft --version"]
    for block in blocks_of("README.md", (ROOT / "README.md").read_text(encoding="utf-8")):
        if block.language == "python" and reason("README.md", block.text.split("\n", 1)[0]) is None:
            needs_client = "from openai" in block.text
            commands.append(
                ("pip install --quiet openai\n" if needs_client else "") + f"python - <<'END'\n{block.text}\nEND"
            )
        if block.language == "bash":
            commands += [
                line.text
                for line in shell_lines(block)
                if reason("README.md", line.text) is None and "weft serve" not in line.text
            ]
    return [command.replace("127.0.0.1:8000", f"127.0.0.1:{port}") for command in commands]


def _printed(words: list[str], variables: dict[str, str] | None = None, folder: Path | None = None) -> str:
    done = subprocess.run(words, env={**os.environ, **(variables or {})}, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout
