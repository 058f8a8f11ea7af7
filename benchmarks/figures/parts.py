"""Parts of ``make figures``: a benchmark each, the numbers that are read from its JSON, and their rows of the README.

A part's numbers are stored as they were measured; rows round them. A row that says "x" is a ratio of two sides that ran
in turns in one process or one run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the README's table.

    what: the first cell.
    cell: text of the figures, for each kind of CPU.
    repeat: the last cell: a command, or a link to the page that explains it.
    """

    what: str
    cell: Callable[[Mapping[str, float]], str]
    repeat: str


@dataclass(frozen=True, slots=True)
class Part:
    """A benchmark and its rows. ``words`` are its command line, in which {json} and {env} are paths."""

    name: str
    words: str
    read: Callable[[Any], Figures]
    rows: tuple[Row, ...]
    needs_peers: bool = False

    def command(self, file: Path, env: Path) -> list[str]:
        """Return the command line that writes its result to ``file`` or prints it."""
        return [sys.executable, "-m", *(word.format(json=file, env=env) for word in self.words.split())]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _prefix(result: Any) -> Figures:
    def ratio(pair: Any, key: str) -> float:
        return median(off[key] / on[key] for off, on in zip(pair["off"], pair["on"], strict=True))

    at_once = result["shared"][0]
    turns = [ratio(turn, "first_token_s") for turn in result["conversation"][1:]]
    return {
        "less_time": ratio(at_once, "seconds"),
        "fewer_tokens": ratio(at_once, "computed_tokens"),
        "turn_least": min(turns),
        "turn_most": max(turns),
    }


def _restart(result: Any) -> Figures:
    [row] = [row for row in result if row["tokens"] == 4000 and row["life"] == "restart"]
    return {"of_cold": row["of_cold"]}


def _serve(result: Any) -> Figures:
    [comparisons] = result["results"].values()
    figures: Figures = {}
    for one in comparisons:
        for engine in ("weft", "transformers"):
            figures[f"{one['workload']}_{engine}"] = one[engine]["output_tokens_per_s"]
    return figures


def _peers(result: Any) -> Figures:
    figures: Figures = {}
    for name, model in result.items():
        if name in ("machine", "arguments"):
            continue
        family = name.split("-")[0]
        for engine, lines in model["figures"].items():
            figures |= {f"{family}_{key}_{engine}": value for key, value in _medians(lines).items()}
    return figures


def _medians(lines: Mapping[str, Sequence[Mapping[str, float]]]) -> Figures:
    """Return the median over rounds of each figure of each line, as ``a_output_tokens_per_s``."""
    return {
        f"{line}_{name}": median(each[name] for each in rounds) for line, rounds in lines.items() for name in rounds[0]
    }


def _real(result: Any) -> Figures:
    return {
        f"{key}_{engine}": value
        for engine, lines in result["figures"].items()
        for key, value in _medians(lines).items()
    }


def _times(figures: Mapping[str, float], key: str, ours: str, theirs: str) -> str:
    return f"{figures[f'{key}_{ours}'] / figures[f'{key}_{theirs}']:.2f} x"


def _peer_row(family: str, title: str) -> Row:
    def cell(figures: Mapping[str, float]) -> str:
        lines = ("a_output_tokens_per_s", "b_decode_tokens_per_s", "b_prefill_tokens_per_s")
        ratios = [
            " / ".join(f"{figures[f'{family}_{line}_weft'] / figures[f'{family}_{line}_{peer}']:.2f}" for line in lines)
            for peer in ("vllm", "llama")
        ]
        return f"vLLM {ratios[0]}; llama.cpp {ratios[1]}"

    repeat = "[other engines](docs/benchmarks.md#other-engines-python--m-benchmarkspeersserve)"
    return Row(f"{title}: 32 requests / one stream / its prompt, x the rate of", cell, repeat)


def _real_cell(figures: Mapping[str, float]) -> str:
    a, b, c = (
        _times(figures, key, "weft", "llama")
        for key in ("a_output_tokens_per_s", "b_decode_tokens_per_s", "b_prefill_tokens_per_s")
    )
    sooner = figures["f_second_turn_ms_llama"] / figures["f_second_turn_ms_weft"]
    return f"{a} for 32 requests, {b} for one stream, {c} for prompts; second turns {sooner:.1f} x sooner"


PARTS = (
    Part(
        "prefix",
        "benchmarks.prefix --json {json}",
        _prefix,
        (
            Row(
                "32 requests sharing 1,000 tokens: cache on, against off",
                lambda f: f"{f['less_time']:.1f} x faster, {f['fewer_tokens']:.1f} x fewer tokens computed",
                "`python -m benchmarks.prefix`",
            ),
            Row(
                "turns 2 to 6 of a conversation: first token, cache on",
                lambda f: f"{f['turn_least']:.1f} to {f['turn_most']:.1f} x sooner",
                "same run",
            ),
        ),
    ),
    Part(
        "memory",
        "benchmarks.useful_bytes --json {json}",
        lambda result: {"least_useful": min(row["churned"] for rows in result.values() for row in rows)},
        (
            Row(
                "useful bytes of a full arena after rounds of random lengths, six models",
                lambda f: f"at least {_percent(f['least_useful'])}",
                "`python -m benchmarks.useful_bytes`",
            ),
        ),
    ),
    Part(
        "recall",
        "weft eval recall --length 2048 --questions 50 --json",
        lambda result: {"accuracy": result["accuracy"], "asked": result["asked"]},
        (
            Row(
                "recall of the embedded model at 2,048 tokens, exact answers",
                lambda f: _percent(f["accuracy"]),
                "`weft eval recall --length 2048 --questions 50`",
            ),
        ),
    ),
    Part(
        "restart",
        "benchmarks.restart --json {json}",
        _restart,
        (
            Row(
                "first token of 4,000 after a restart, with a store",
                lambda f: f"{f['of_cold']:.2f} of the cold one",
                "`python -m benchmarks.restart`",
            ),
        ),
    ),
    Part(
        "speculation",
        "benchmarks.speculation --family lfm2 --bits 16 --tokens 300 --json {json}",
        lambda result: {"ratio": result["ratio"]},
        (
            Row(
                "a text written again with edits at 5 % of its places, `prediction`",
                lambda f: f"{f['ratio']:.1f} x faster, the same tokens",
                "[speculation](docs/speculation.md#a-model-of-real-size)",
            ),
        ),
    ),
    Part(
        "serve",
        "benchmarks.serve --json {json}",
        _serve,
        (
            Row(
                "32 requests at once, LFM2-350M-like",
                lambda f: f"{f['burst_weft']:.0f} tokens/s; transformers {f['burst_transformers']:.1f}",
                "`make bench`",
            ),
            Row(
                "one stream, same model; weft drafts from the text, as it does by default",
                lambda f: f"{f['single_weft']:.1f} tokens/s; transformers {f['single_transformers']:.1f}",
                "same run",
            ),
        ),
    ),
    Part(
        "peers",
        "benchmarks.peers.serve --only a,b --engines weft,vllm,llama --rounds 1 --env {env} --json {json}",
        _peers,
        (
            _peer_row("lfm2", "LFM2-350M-like"),
            _peer_row("qwen", "Qwen3.5-350M-like"),
            _peer_row("granite", "Granite-4-H-350M-like"),
        ),
        needs_peers=True,
    ),
    Part(
        "real",
        "benchmarks.peers.real --engines weft,llama --env {env} --json {json}",
        _real,
        (
            Row(
                "a released GGUF file (SmolLM2, Q4_1) against llama.cpp",
                _real_cell,
                "[a released model](docs/benchmarks.md#a-released-model-python--m-benchmarkspeersreal)",
            ),
        ),
        needs_peers=True,
    ),
)
"""All parts, in the order of the README's rows."""
