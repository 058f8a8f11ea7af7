"""Families x compositions: each promise of the oracle suites, on any family, as one table.

    python -m tests.oracle.compositions                  a family of each structure
    python -m tests.oracle.compositions ling gpt_oss     these

The suites run most promises on a few families and all of them together on none, for the time that it takes.
This runs the tests themselves, with other families: ``asked`` in ``tests.fixtures.checkpoints``. A cell says
"yes", "no", or "-" where a family has no pages, or no states. It takes about half a minute a family.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Sequence

import pytest

from tests.fixtures.checkpoint_families_attention import MORE_FAMILIES
from tests.fixtures.checkpoint_families_mamba import MAMBA_FAMILIES
from tests.fixtures.checkpoints import ASKED, FAMILIES
from tests.oracle.serving import loaded

_EVERY = "oracle/test_engine_every_family.py::test_"
COMPOSITIONS: dict[str, str] = {
    "logits": "oracle/test_models_against_transformers.py::test_prefill_and_24_decode_steps_equal_transformers",
    "company, chunks": f"{_EVERY}company_small_chunks_and_pad_rows_change_nothing",
    "tight memory": f"{_EVERY}memory_in_other_hands_changes_nothing",
    "preemption": f"{_EVERY}preemption_changes_nothing",
    "hits": f"{_EVERY}a_prefix_hit_changes_nothing",
    "a damaged hit shows": f"{_EVERY}a_cached_prefix_that_is_damaged_is_noticed",
    "compaction": "oracle/test_engine_compaction.py::test_moving_what_is_in_use_changes_nothing",
    "states in 8 bits": "oracle/test_engine_compressed_state.py::test_states_from_eight_bits_change_logits_a_little",
    "KV in 8, 4 bits": "oracle/test_engine_compressed_kv.py::test_kv_from_fewer_bits_changes_logits_a_little",
    "drafts": "oracle/test_engine_speculation.py::test_drafts_change_no_token_and_on_the_kernels_no_bit",
    "two ranks": "ranks/test_families.py::test_two_ranks_say_what_one_says",
    "store": "oracle/test_engine_store.py::test_a_restart_finds_the_prefix_and_changes_nothing",
    "kill -9": "oracle/test_store_killed.py::test_what_was_durable_is_a_hit_and_every_token_is_right",
}
"""What a column says -> the test behind it."""


OF_PAGES = ("compaction", "states in 8 bits", "KV in 8, 4 bits")
"""What takes pages: small states are compressed into them. A model of states alone has nothing to move."""
OF_STATES = ("states in 8 bits", "KV in 8, 4 bits")
"""What takes states: KV is compressed where snapshots say what it is worth (``with_compressed_kv``). A model of
attention alone compresses nothing."""


class Outcomes:
    """Of each family and composition, the outcomes of its tests: a plugin of pytest."""

    def __init__(self) -> None:
        self.of: defaultdict[tuple[str, str], set[str]] = defaultdict(set)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self._is_of(*self._of(item.nodeid))]

    @staticmethod
    def _is_of(family: str, name: str) -> bool:
        """Whether the family has what the composition is about."""
        spec = loaded(family).spec
        return bool(
            (name not in OF_PAGES or spec.attention_layers) and (name not in OF_STATES or spec.recurrent_layers)
        )

    @staticmethod
    def _of(nodeid: str) -> tuple[str, str]:
        """Family and composition of a test."""
        node, _, settings = nodeid.removeprefix("tests/").partition("[")
        return (
            next(one for one in families() if one in re.split(r"[\]-]", settings)),
            next(name for name, test in COMPOSITIONS.items() if test == node),
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.of[self._of(report.nodeid)].add(report.outcome)

    def cell(self, family: str, name: str) -> str:
        seen = self.of[family, name]
        return "**no**" if "failed" in seen else "yes" if "passed" in seen else "-"


def families() -> list[str]:
    return os.environ[ASKED].split(",")


def main(names: Sequence[str]) -> int:
    os.environ[ASKED] = ",".join(names or (*FAMILIES, *MORE_FAMILIES, *MAMBA_FAMILIES))
    outcomes = Outcomes()
    code = pytest.main(
        ["-q", "--no-header", "-p", "no:cacheprovider", *(f"tests/{test}" for test in COMPOSITIONS.values())],
        plugins=[outcomes],
    )
    print(f"| family | {' | '.join(COMPOSITIONS)} |\n|---|{'---|' * len(COMPOSITIONS)}")
    for family in families():
        print(f"| `{family}` | {' | '.join(outcomes.cell(family, name) for name in COMPOSITIONS)} |")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
