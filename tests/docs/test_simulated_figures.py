"""Hit rates of the pages are those of committed results, and the sample's results are those of today's code.

The replays run in processes of their own. The documented claim is that the same inputs give the same numbers
on any machine: the committed results come from one thread with SIMD, and one replay here has neither.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.arch.rules import ROOT
from tests.docs.blocks import blocks_of
from weft_tools.commands.simulate_view import _lost as lost_table
from weft_tools.commands.simulate_view import _results as result_table

RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
NO_SIMD = "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX2 FMA3"
GB = 10**9


def results(name: str) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads((RESULTS / f"simulate-{name}.json").read_text(encoding="utf-8"))
    return whole


def percentages(name: str, arm: str) -> list[str]:
    """Hit rates of ``arm`` by memory, as a page writes them."""
    rows = [row for row in results(name)["results"] if row["arm"] == arm]
    assert rows, f"no results of {arm}"
    rows.sort(key=lambda row: row["memory_bytes"])
    return [f"{row['cached_tokens'] / row['prompt_tokens']:.1%}".removesuffix("%") for row in rows]


def replayed(policy: str, memory: str, **variables: str) -> dict[str, Any]:
    """One row of `weft simulate sample`, by a process with ``variables`` in its environment."""
    command = [
        sys.executable,
        "-m",
        "weft",
        "simulate",
        "sample",
        "--model",
        "Qwen3.5-397B-A17B",
        "--tp",
        "8",
        "--quantize",
        "fp8",
        "--memory",
        memory,
        "--policy",
        policy,
        "--no-oracle",
        "--json",
    ]
    answer = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    [row] = json.loads(answer.stdout)["results"]
    assert isinstance(row, dict)
    return row


def committed_tables(name: str) -> str:
    """Both tables of `weft simulate`, drawn by the command's own code from a committed result."""
    whole = results(name)
    sizes = []
    for size in whole["oracle"]:
        reports = [
            SimpleNamespace(**row, lost=_lost_tokens(row), store=None)
            for row in whole["results"]
            if abs(row["memory_bytes"] - size["memory_bytes"]) < 0.01 * size["memory_bytes"]
        ]
        for report in reports:
            report.ttft, report.tpot = SimpleNamespace(**report.ttft), SimpleNamespace(**report.tpot)
            report.cache = SimpleNamespace(**report.cache)
        sizes.append(
            SimpleNamespace(memory_bytes=size["memory_bytes"], reports=reports, oracle=SimpleNamespace(**size))
        )
    study: Any = SimpleNamespace(sizes=sizes, bound=SimpleNamespace(state_rate=whole["infinite"]["states"]))
    console = Console(file=io.StringIO(), width=80)
    console.print(result_table(study))
    console.print(lost_table(study))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _lost_tokens(row: dict[str, Any]) -> dict[str, int]:
    return {name.removeprefix("lost_"): count for name, count in row["cache"].items() if name.startswith("lost_")}


def test_the_tables_of_the_page_are_the_committed_result() -> None:
    [block] = [one for one in blocks_of("simulate.md", PAGE) if one.shown.startswith("sample:")]
    on_page = [line.split() for line in block.shown.split("\n\n", 1)[1].splitlines() if line]
    assert on_page == [line.split() for line in committed_tables("sample").splitlines()]
    assert len(on_page) == 24


@pytest.mark.parametrize("arm", ["value", "lru", "every:2048", "value+compressed", "value+compressed4"])
def test_the_conversation_trace_of_the_page_is_the_committed_result(arm: str) -> None:
    [cells] = re.findall(rf"^\| `{re.escape(arm)}` \| ([\d.| ]+) \|$", PAGE, re.MULTILINE)
    assert cells.split(" | ") == percentages("conversation", arm)


def test_the_stores_of_the_page_are_the_committed_result() -> None:
    rows = []
    for row in results("store")["results"]:
        store, tokens = row.get("store"), row["prompt_tokens"]
        restored = store["restored_tokens"] if store else 0
        name = f"`{store['name']}`" if store else "none"
        rows.append(
            f"| {row['memory_bytes'] / GB:.0f} GB | `{row['arm']}` | {name} | "
            f"{100 * row['cached_tokens'] / tokens:.1f} | {100 * restored / tokens:.1f} | "
            f"{row['saved_s']:.0f} | {row.get('net_saved_s', row['saved_s']):.0f} | "
            f"{row['ttft']['p50']:.2f} | {row['ttft']['p99']:.2f} |"
        )
    assert re.findall(r"^\| \d+ GB \| [`n].*\|$", PAGE, re.MULTILINE) == rows


def test_the_roles_of_the_page_are_the_committed_result() -> None:
    rows = []
    for rate, whole in results("roles").items():
        for row, name in ((whole["results"][0], whole["roles"]), (whole["unsplit"][0], "no roles")):
            splits, sent_GB = row["splits"] / row["requests"], row["sent_bytes"] / GB
            split = f"{splits:.0%} | {sent_GB:.0f} GB" if splits else "|"
            ttft, gaps = row["ttft"], row["gaps"]
            rows.append(
                f"| {rate} | {name} | {split} | {row['hit_rate']:.1%} | {ttft['p50']:.2f} | "
                f"{ttft['p99']:.2f} | {1e3 * gaps['p50']:.0f} | {1e3 * gaps['p99']:.0f} |"
            )
    assert re.findall(r"^\| \d+ \| (?:2p2d|no roles) .*\|$", PAGE, re.MULTILINE) == rows


def test_the_readme_has_the_same_figures() -> None:
    [line] = [line for line in README.splitlines() if line.startswith("| prompt tokens found")]
    assert " / ".join(percentages("conversation", "value")) in line
    assert " / ".join(percentages("conversation", "lru")) in line


@pytest.mark.parametrize(
    ("policy", "variables"),
    [("lru", {}), ("value", {"OMP_NUM_THREADS": "2", "NPY_DISABLE_CPU_FEATURES": NO_SIMD})],
    ids=["lru", "value without SIMD"],
)
def test_the_sample_gives_the_committed_numbers_on_any_machine(policy: str, variables: dict[str, str]) -> None:
    row = replayed(policy, "4GB", **variables)
    [committed] = [
        one
        for one in results("sample")["results"]
        if one["arm"] == policy and abs(one["memory_bytes"] - 4 * GB) < 0.01 * GB
    ]
    assert row["cached_tokens"] == committed["cached_tokens"]
    assert row["hash"] == committed["hash"]


def test_another_policy_has_another_hash() -> None:
    """The control: the hash tells two replays apart."""
    rows = results("sample")["results"]
    assert len({row["hash"] for row in rows}) == len(rows)


# ---------------------------------------------------------------------- replicas


def fleet_rows() -> dict[str, dict[str, Any]]:
    """By router, and ``one engine`` with the memory of all replicas."""
    study = results("fleet")
    return {**{row["router"]: row for row in study["results"]}, "one engine": study["one_engine"][0]}


def test_the_routers_of_the_page_are_the_committed_result() -> None:
    on_page = {
        cells[0].strip("`"): cells[1:]
        for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines())
        if len(cells) == 5
    }
    for name, row in fleet_rows().items():
        load = f"{row['load_max_share']:.2f}" if "load_max_share" in row else ""
        assert on_page[name] == [
            f"{row['hit_rate']:.1%}",
            f"{row['ttft']['p50']:.2f}",
            f"{row['ttft']['p99']:.2f}",
            load,
        ], name


def test_seconds_keeps_the_promises_of_the_page() -> None:
    rows = fleet_rows()
    seconds = rows["seconds"]
    assert seconds["hit_rate"] >= 0.95 * rows["one engine"]["hit_rate"]
    assert seconds["load_max_share"] <= 1.3
    for other in ("prefix-hash", "round-robin", "least-loaded"):
        assert seconds["hit_rate"] > rows[other]["hit_rate"]
        assert seconds["ttft"]["p99"] < rows[other]["ttft"]["p99"]
    over_expected = {
        name: rows[name]["predicted_tokens"] / rows[name]["cached_tokens"] - 1 for name in ("seconds", "kv-only")
    }
    assert abs(over_expected["seconds"]) < 0.001
    assert f"{over_expected['kv-only']:.0%}" == "3%"
    assert rows["kv-only"]["load_max_share"] > seconds["load_max_share"]
