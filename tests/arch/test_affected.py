"""``make affected`` runs all tests that a change can break, and no others."""

from __future__ import annotations

import pytest

from tests.affected import affected, modules, named_modules

ALL = [str(file) for file in modules().values() if file.name.startswith("test_")]


def test_a_page_needs_the_tests_of_pages_alone() -> None:
    chosen = affected(["docs/server.md"])
    assert "tests/docs/test_pages_run.py" in chosen
    assert "tests/arch/test_prose.py" in chosen
    assert all(file.startswith(("tests/docs/", "tests/arch/")) for file in chosen)


@pytest.mark.parametrize(
    ("changed", "needed"),
    [
        ("src/weft/tensor/ops/delta_rule.py", "tests/ops/test_recurrent_ops.py"),  # imported by name
        ("src/weft/store/ledger.py", "tests/server/test_update_weights.py"),  # through a server in a process of its own
        ("src/weft/cli/plan.py", "tests/cli/test_plan.py"),  # a verb that the command line imports by a string
        ("src/weft/server/ollama/answers.py", "tests/server/test_several_models.py"),
        ("src/weft/families/mamba.py", "tests/oracle/test_engine_against_transformers.py"),
        ("csrc/tiles.hpp", "tests/ops/test_native.py"),
        ("src/weft/server/page_files/chat.js", "tests/server/test_page_chat.py"),
        ("tests/server/running.py", "tests/server/test_concurrency.py"),
        ("tests/conftest.py", "tests/unit/memory/test_audit.py"),
        ("deploy/Dockerfile", "tests/deploy/test_deploy.py"),
        ("weft_tools.py", "tests/unit/memory/test_audit.py"),  # of no folder that is known
    ],
)
def test_a_change_finds_the_tests_that_it_can_break(changed: str, needed: str) -> None:
    assert needed in ALL, "the example is gone: name another"
    assert needed in affected([changed])


def test_what_nothing_knows_runs_everything() -> None:
    assert affected(["pyproject.toml"]) == sorted(ALL)
    assert affected([]) == sorted(file for file in ALL if file.startswith("tests/arch/"))


def test_the_pure_half_does_not_need_the_http_server() -> None:
    chosen = affected(["src/weft/server/ollama/answers.py"])
    assert len(chosen) < len(ALL) / 2
    assert "tests/unit/memory/test_audit.py" not in chosen


def test_strings_and_packages_count_as_imports() -> None:
    known = {"weft", "weft.a", "weft.a.b", "weft.a.c", "weft.__main__", "weft.d"}

    def named(text: str, *, is_package: bool = False) -> set[str]:
        imported, in_strings = named_modules(text, "weft.d", known, is_package=is_package)
        return imported | in_strings

    assert named("from weft.a.b import function") == {"weft", "weft.a", "weft.a.b", "weft.a.b:names"}
    assert named("from weft.a import c") == {"weft", "weft.a", "weft.a.c"}
    assert named("from .a import c") == {"weft", "weft.a", "weft.a.c"}
    assert named("from weft import Engine") == {"weft", "weft:names"}
    assert named('TABLE = ("weft.a.b:function",)') == {"weft", "weft.a", "weft.a.b"}
    assert named('f"weft.a.{name}"') == {"weft", "weft.a", "weft.a.b", "weft.a.c"}
    assert named('run([python, "-m", "weft", "serve"])') == {"weft", "weft.__main__"}
    assert named('"weft is a word"') == set()
