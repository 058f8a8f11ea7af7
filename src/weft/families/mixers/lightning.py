"""Lightning attention. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from weft import spec
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Rope
from weft.families.tensors import Dim, Table, Units, norm_weight, product
from weft.spec import LayerSpec

LightningNames = tuple[str | tuple[str, str, str], str, str, str]
"""Names of q, k and v, in one tensor or in three, of the gate, of the norm and of the output."""


@dataclass(frozen=True, slots=True)
class Lightning(Mixer):
    """Lightning attention (Qin et al., 2024): a state for each head that decays by exp(-slope) a token. The slope of
    head h of n is 2 ^ (-8 (h + 1) / n) times ``factor``, which differs by layer. Queries, keys and values pass a
    silu (``silu``); or queries and keys pass a norm of each head, and ``rope`` rotates them (Ling 2.5). ``scale``:
    factor on queries. ``norm_groups``: number of groups of heads, over all ranks, whose outputs are normed
    separately.
    """

    reader = "weft.models.blocks.lightning:read_lightning"

    heads: int
    head_dim: int
    factor: float
    silu: bool = True
    qk_norm: bool = False
    rope: Rope | None = None
    scale: float = 1.0
    norm_groups: int = 1

    def layer_spec(self) -> LayerSpec:
        return spec.lightning(self.heads, self.head_dim)

    def table(
        self,
        hidden: int,
        *,
        names: LightningNames = ("qkv_proj", "output_gate", "norm", "out_proj"),
        by_head: bool = True,
        norms: tuple[str, str] = ("query_layernorm", "key_layernorm"),
    ) -> Table:
        """Return the tensors. ``by_head``: rows of q, k and v in one tensor are head by head. Files may also store the
        numbers from which decays are computed; these are not read."""
        qkv, gate, norm, out = names
        width = Units(self.heads, self.head_dim)
        rows: Dim = Units(self.heads, 3 * self.head_dim) if by_head else (width,) * 3
        inputs = ((qkv, rows),) if isinstance(qkv, str) else tuple((name, width) for name in qkv)
        table = (
            product("project", hidden, *inputs, (gate, width))
            | norm_weight("norm", width, norm)
            | product("out", width, (out, hidden))
        )
        if self.qk_norm:
            for role, norm in zip(("q_norm", "k_norm"), norms, strict=True):
                table |= norm_weight(role, self.head_dim, norm)
        return table
