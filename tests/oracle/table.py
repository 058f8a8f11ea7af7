"""Writes a section of docs/models.md: every checkpoint of the table against transformers, and what came out.

    python -m tests.oracle.table             runs them all and writes it
    python -m tests.oracle.table lfm3 kimi_linear       runs these and prints their rows

It runs what the oracle tests run, for longer: prompts of 1 to 900 tokens in one step, then 64 greedy decode steps of
all of them together, and every logit of every position against one forward pass of transformers.
"""

from __future__ import annotations

import platform
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from tests.fixtures.checkpoints import CHECKPOINTS, checkpoint
from tests.oracle.model_driver import ModelDriver
from tests.oracle.test_models_against_transformers import TOLERANCE, expected, prefill_and_decode, prompt
from tests.support.naive_model import NAIVE_TYPES
from weft.families.architecture import Architecture
from weft.families.mixers.feed_forward import Experts
from weft.models.loading import load_model

LENGTHS = (1, 5, 37, 300, 900)
DECODE_STEPS = 64
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TITLE = "## Comparisons with transformers\n"
"""The section of ``PAGE`` that begins so goes to its end."""


@dataclass(frozen=True, slots=True)
class Row:
    """``error``: the largest difference of any logit at any position; ``scale``: the largest logit."""

    name: str
    model_type: str
    mixers: str
    form: str
    error: float
    scale: float
    same_tokens: bool

    def line(self) -> str:
        tokens = "yes" if self.same_tokens else "**no**"
        return (
            f"| `{self.name}` | `{self.model_type}` | {self.mixers} | {self.form} | {self.error:.1e} | "
            f"{self.scale:.1f} | {tokens} |"
        )


HEAD = (
    "| checkpoint | `model_type` | layers | form | largest difference | largest logit | same tokens |\n"
    "|---|---|---|---|---|---|---|"
)


def compare(name: str) -> Row:
    """Load, prefill, decode and compare one checkpoint."""
    loaded = load_model(checkpoint(name))
    driver = ModelDriver(loaded.model, sequences=len(LENGTHS), length=max(LENGTHS) + DECODE_STEPS)
    outputs = prefill_and_decode(driver, [prompt(n) for n in LENGTHS], DECODE_STEPS)
    error, scale, same = 0.0, 0.0, True
    for sequence, logits, length in zip(driver.sequences, outputs, LENGTHS, strict=True):
        truth = expected(name, sequence.tokens)
        error = max(error, (logits - truth).abs().max().item())
        scale = max(scale, truth.abs().max().item())
        same = same and torch.equal(logits.argmax(-1)[length - 1 :], truth.argmax(-1)[length - 1 :])
    architecture = loaded.model.architecture
    return Row(name, CHECKPOINTS[name][0], _mixers(architecture), _form(architecture), error, scale, same)


def _mixers(architecture: Architecture) -> str:
    kinds = Counter(layer.kind for layer in architecture.spec().layers)
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds.items())


def _form(architecture: Architecture) -> str:
    words = ["float32"]
    if any(isinstance(feed, Experts) for feed in architecture.feed_forwards):
        words.append("experts")
    if architecture.tied_embeddings:
        words.append("tied")
    return ", ".join(words)


NAIVE = f"""transformers has no class of {", ".join(f"`{kind}`" for kind in sorted(NAIVE_TYPES))}: naive ones of the
tests' own stand in their place (`tests/support`)."""


def section(rows: Sequence[Row]) -> str:
    lengths = f"{', '.join(map(str, LENGTHS[:-1]))} and {LENGTHS[-1]}"
    return f"""{TITLE}
`python -m tests.oracle.table` writes this section, with transformers {version("transformers")} and torch
{version("torch").split("+")[0]} on a CPU ({platform.machine()}).

Each row is a tiny checkpoint with random weights, written by transformers and loaded by weft. Prompts of
{lengths} tokens are computed in one step, then {DECODE_STEPS} greedy decode steps of all of them
together; every logit of every position is compared with one forward pass of transformers. The tests fail
from {TOLERANCE:.0e} on. This shows that the computation is the same, not how well a release answers.
{textwrap.fill(NAIVE, 119)}

{HEAD}
{chr(10).join(row.line() for row in rows)}
"""


def main(names: Sequence[str]) -> int:
    rows = []
    for name in names or CHECKPOINTS:
        row = compare(name)
        print(row.line(), flush=True)
        rows.append(row)
    if not names:
        above = PAGE.read_text(encoding="utf-8").partition(TITLE)[0]
        PAGE.write_text(above + section(rows), encoding="utf-8")
        print(f"wrote {PAGE}")
    return 0 if all(row.same_tokens and row.error < TOLERANCE for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
