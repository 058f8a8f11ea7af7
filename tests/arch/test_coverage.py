"""The table of coverage adds up the files of each folder."""

from __future__ import annotations

from tests.coverage_by_folder import folder_rows, table_of


def test_files_are_added_up_by_folder() -> None:
    def measured(statements: int, run: int) -> dict[str, dict[str, int]]:
        return {"summary": {"num_statements": statements, "covered_lines": run}}

    report = {
        "files": {
            "src/weft/memory/state.py": measured(10, 9),
            "src/weft/memory/prefix/tree.py": measured(30, 21),
            "src/weft/units.py": measured(5, 5),
            "src/weft_tools/sim/replay.py": measured(8, 0),
        }
    }
    rows = folder_rows(report)
    assert rows == [("src/weft", 5, 5), ("src/weft/memory", 40, 30), ("src/weft_tools/sim", 8, 0), ("sum", 53, 35)]
    lines = [line.split() for line in table_of(rows).splitlines()]
    assert lines[0] == ["folder", "statements", "run", "%"]
    assert lines[2] == ["src/weft/memory", "40", "30", "75.0"]
