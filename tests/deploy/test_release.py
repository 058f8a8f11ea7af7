"""What a release is made of: the contents and size of a wheel, its version, its notes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deploy.release import release_notes
from deploy.release_check import kernel_complaints, readme_commands, wheel_complaints

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.2.0"
PURE_SETTINGS = (("wheel.cmake", "false"), ("wheel.py-api", "py3"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without kernels, as pip builds it where there is no compiler."""
    folder = tmp_path_factory.mktemp("dist")
    code = f"from scikit_build_core.build import build_wheel; build_wheel({str(folder)!r}, {dict(PURE_SETTINGS)!r})"
    variables = os.environ | {"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_WEFT": VERSION}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, check=True, capture_output=True)
    [built] = folder.glob("*.whl")
    return built


def changed(wheel: Path, folder: Path, name: str, content: bytes | None) -> Path:
    """Return a copy of ``wheel`` with one more file, or without it (None)."""
    copy = folder / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(copy, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            if item.filename != name:
                new.writestr(item, old.read(item))
        if content is not None:
            new.writestr(name, content)
    return copy


def test_a_wheel_has_the_page_the_licences_and_the_model_and_no_tests_and_no_sources(wheel: Path) -> None:
    assert wheel.name == f"weft-{VERSION}-py3-none-any.whl"
    assert wheel_complaints(wheel, VERSION) == []


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("weft/tests/test_a.py", b"", "no part of a wheel: weft/tests/test_a.py"),
        ("weft/csrc/pool.cpp", b"", "no part of a wheel: weft/csrc/pool.cpp"),
        ("tools/a.py", b"", "a folder of its own: tools/a.py"),
        ("weft/server/page_files/index.html", None, "missing: weft/server/page_files/index.html"),
        (f"weft-{VERSION}.dist-info/licenses/LICENSE", None, "missing: weft-0.2.0.dist-info/licenses/LICENSE"),
        ("weft/_native.abi3.so", b"\x7fELF", "1 files of kernels: weft/_native.abi3.so"),
        ("weft/large", os.urandom(1_500_000), "bytes, and at most 9,000,000 are expected"),
    ],
)
def test_a_fault_of_a_wheel_is_named(
    wheel: Path, tmp_path: Path, name: str, content: bytes | None, complaint: str
) -> None:
    assert any(complaint in line for line in wheel_complaints(changed(wheel, tmp_path, name, content), VERSION))


def test_a_wheel_of_another_version_is_noticed(wheel: Path) -> None:
    assert wheel_complaints(wheel, "0.3.0") == [f"{wheel.name}: its version is {VERSION}, and not 0.3.0"]


def test_a_wheel_for_a_platform_needs_kernels(wheel: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(wheel, tmp_path / f"weft-{VERSION}-cp311-cp311-manylinux_2_34_x86_64.whl"))
    assert wheel_complaints(copy, VERSION) == [f"{copy.name}: 0 files of kernels: the compiler failed"]


def test_kernels_of_another_machine_another_python_or_without_an_instruction_set_are_named() -> None:
    wheel = Path(f"weft-{VERSION}-cp312-abi3-manylinux_2_34_x86_64.whl")
    tables = b"\0portable\0x86_64_v3\0x86_64_v4\0x86_64_v4_bf16\0"
    header = b"\x7fELF".ljust(18, b"\0")
    assert kernel_complaints("weft/_native.abi3.so", header + bytes([62, 0]) + tables, wheel) == []
    assert kernel_complaints("weft/_native.abi3.so", header + bytes([183, 0]) + b"\0neon\0", wheel) == [
        "weft/_native.abi3.so is for aarch64"
    ]
    assert kernel_complaints("weft/_native.cpython-311-x.so", header + bytes([62, 0]) + tables, wheel) == [
        "weft/_native.cpython-311-x.so is not for abi3"
    ]
    without = tables.replace(b"x86_64_v4_bf16", b"")
    assert kernel_complaints("weft/_native.abi3.so", header + bytes([62, 0]) + without, wheel) == [
        "weft/_native.abi3.so has no kernels for x86_64_v4_bf16"
    ]
    for asked in (b"\0GLIBC_2.36\0", b"\0GLIBCXX_3.4.30\0"):
        [said] = kernel_complaints("weft/_native.abi3.so", header + bytes([62, 0]) + tables + asked, wheel)
        assert "newer than" in said
    allowed = tables + b"\0GLIBC_2.2.5\0GLIBCXX_3.4.29\0"
    assert kernel_complaints("weft/_native.abi3.so", header + bytes([62, 0]) + allowed, wheel) == []
    named = tables + str(ROOT).encode()
    assert kernel_complaints("weft/_native.abi3.so", header + bytes([62, 0]) + named, wheel) == [
        "weft/_native.abi3.so names the folder that it was built in"
    ]


def test_the_version_of_a_tag_is_the_tag(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "SETUPTOOLS_SCM"))}
    variables |= {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def version() -> str:
        return run(sys.executable, "-m", "setuptools_scm")

    run("git", "init", "-q")
    run("git", "add", ".")
    run("git", "commit", "-q", "-m", "one")
    assert "+" in version()
    run("git", "tag", "v0.2.0")
    assert version() == "0.2.0"
    (tmp_path / "pyproject.toml").write_text((tmp_path / "pyproject.toml").read_text() + "\n")
    assert "+" in version(), "what is not committed is no release"


def test_the_notes_of_a_release_are_its_part_of_the_changelog() -> None:
    changelog = "# Changelog\n\n## Unreleased\n\n- new\n\n## 0.2.0 (2026-12-01)\n\n- old\n\n### Mended\n\n- b\n"
    assert release_notes(changelog, "0.2.0") == "- old\n\n### Mended\n\n- b\n"
    assert release_notes(changelog, "0.2.0+gabc") == "- new\n"
    with pytest.raises(SystemExit, match=r'no "## 0.3.0"'):
        release_notes(changelog, "0.3.0")


def test_the_commands_of_the_readme_are_run_against_the_server_that_is_checked() -> None:
    commands = readme_commands(4321)
    assert any("curl http://127.0.0.1:4321/v1/chat/completions" in command for command in commands)
    assert any(command.startswith("pip install --quiet openai\npython - ") for command in commands)
    assert any("weft generate" in command for command in commands)
    assert not any("weft serve" in command or "weft chat" in command for command in commands)
