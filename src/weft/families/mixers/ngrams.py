"""N-grams that a layer of Qwen4 adds before its mixer. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from weft import spec
from weft.families.mixers import Mixer
from weft.families.mixers.delta import GatedDelta
from weft.families.tensors import Table, Tensor, Units, conv, product
from weft.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class Ngrams:
    """Rows of tables that a layer adds for the last tokens (Qwen4). Each n-gram of 2 to ``size`` tokens has a row of
    ``width`` numbers in some tables, of ``rows`` rows each. A hash with ``multipliers`` finds it. A
    token ``end`` cuts n-grams. Values of the rows, gated by the streams (``stream_width`` numbers in all),
    pass a convolution of ``conv_kernel`` tokens that are ``size`` apart. ``table_rows``: of all tables, and
    padding."""

    size: int
    width: int
    rows: tuple[int, ...]
    table_rows: int
    multipliers: tuple[int, ...]
    end: int
    stream_width: int
    conv_kernel: int

    @property
    def reach(self) -> int:
        """Number of earlier tokens that the convolution sees."""
        return (self.conv_kernel - 1) * self.size

    def layer_spec(self) -> LayerSpec:
        return spec.ngrams(self.size, self.stream_width, self.reach)

    def table(self, hidden: int, *, shards: int = 0) -> Table:
        """Return the tensors. Ranks divide the columns of the tables. ``shards``: number of parts that the tables are
        stored in; 0: one tensor."""
        name, width = "ple_embedding.ngram_embedding", Units(self.width)
        parts = [f"{name}.shard_{number}.weight" for number in range(shards)] or [f"{name}.weight"]
        rows = self.table_rows // len(parts)
        all_tables = (width,) * len(self.rows)
        return {
            "table": tuple(Tensor(part, (rows, width), "plain") for part in parts),
            **product("project", all_tables, ("key_proj", self.stream_width), ("value_proj", hidden)),
            **conv(self.stream_width, self.conv_kernel),
            **{
                f"{norm}_norm": (Tensor(f"norm_{norm}.weight", (self.stream_width,), "plain"),)
                for norm in ("key", "query", "conv")
            },
        }


@dataclass(frozen=True, slots=True)
class WithNgrams(Mixer):
    """A mixer before which ``ngrams`` are added to the streams."""

    reader = ""  # its parts are read one by one

    mixer: GatedDelta
    ngrams: Ngrams

    def layer_spec(self) -> LayerSpec:
        return spec.together("gated_delta", self.mixer.layer_spec(), self.ngrams.layer_spec())

    def table(self, hidden: int) -> Table:
        return self.mixer.table(hidden)

    def tables(self, hidden: int) -> list[Table]:
        return [self.table(hidden), self.ngrams.table(hidden)]
