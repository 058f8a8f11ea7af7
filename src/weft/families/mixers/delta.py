"""Delta nets: gated, and with a decay for each key channel (Kimi). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft import spec
from weft.families.mixers import Mixer
from weft.families.tensors import Dim, Table, Tensor, Units, conv, exact, norm_weight, product
from weft.spec import LayerSpec

DeltaNames = Literal["fused", "by_key_head", "each", "joined"]
"""Forms in which the input projection of a gated delta net is stored: Qwen3.5, Qwen3-Next, OLMo hybrid, Lara 4 Mini."""


@dataclass(frozen=True, slots=True)
class GatedDelta(Mixer):
    """Gated delta net (Yang et al., 2024). ``beta_scale``: the write strength is sigmoid times this; 2 lets
    the state's eigenvalues be negative (OLMo hybrid). ``sigmoid_gate``: the output's gate is a sigmoid, not a
    silu (Qwen4). ``gate_scale``: a factor on a sigmoid gate; ``norm_plus_one``: the weight of the gated norm is
    stored as the distance from 1 (GigaChat 3.5)."""

    reader = "weft.models.blocks.delta:read_gated_delta"

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int
    beta_scale: float = 1.0
    sigmoid_gate: bool = False
    gate_scale: float = 1.0
    norm_plus_one: bool = False

    @property
    def key_width(self) -> int:
        return self.k_heads * self.k_dim

    @property
    def value_width(self) -> int:
        return self.v_heads * self.v_dim

    def layer_spec(self) -> LayerSpec:
        return spec.gated_delta(self.k_heads, self.v_heads, self.k_dim, self.v_dim, self.conv_kernel)

    def table(
        self,
        hidden: int,
        *,
        names: DeltaNames = "fused",
        norm: str = "norm",
        out: str = "out_proj",
        gate: str = "in_proj_z",
    ) -> Table:
        """Return the tensors. The rows of beta and decay are never quantised in files. ``gate``: the name of z in
        "fused"."""
        key, value = Units(self.k_heads, self.k_dim), Units(self.v_heads, self.v_dim)
        heads, ratio = Units(self.v_heads), self.v_heads // self.k_heads
        matrices: dict[DeltaNames, dict[str, Dim]] = {
            # Unit by unit: one span of all of it would give rank 0 all queries and rank 1 all values.
            "fused": {"in_proj_qkv": (key, key, value), gate: value},
            "by_key_head": {"in_proj_qkvz": Units(self.k_heads, 2 * (self.k_dim + ratio * self.v_dim))},
            "each": {"q_proj": key, "k_proj": key, "v_proj": value, "g_proj": value},
            "joined": {"in_proj": (key, key, value, value, heads, heads)},
        }
        gates: dict[DeltaNames, dict[str, Dim]] = {
            "fused": {"in_proj_b": heads, "in_proj_a": heads},
            "by_key_head": {"in_proj_ba": Units(self.k_heads, 2 * ratio)},
            "each": {"b_proj": heads, "a_proj": heads},
            "joined": {},
        }
        table = product("project", hidden, *matrices[names].items())
        table["project"] += tuple(
            Tensor(f"{name}.weight", (rows, hidden), "plain") for name, rows in gates[names].items()
        )
        return (
            table
            | conv((key, key, value), self.conv_kernel)
            | exact("A_log", "dt_bias", dims=(heads,))
            | norm_weight("norm", self.v_dim, norm)
            | product("out", value, (out, hidden))
        )


@dataclass(frozen=True, slots=True)
class KimiDelta(Mixer):
    """Kimi delta attention (2025): the gated delta rule with a decay for each key channel. ``wide_forget`` and
    ``wide_gate``: the forget gate, or the output gate, is one matrix without a bottleneck; ``decay_floor``: the least
    log decay, None for none (Ling 3 has all three, Kimi K3 the last two)."""

    reader = "weft.models.blocks.delta:read_kimi_delta"

    heads: int
    head_dim: int
    conv_kernel: int
    wide_forget: bool = False
    wide_gate: bool = False
    decay_floor: float | None = None

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def layer_spec(self) -> LayerSpec:
        return spec.kimi_delta(self.heads, self.head_dim, self.conv_kernel)

    def table(self, hidden: int, *, forget: str = "", out: str = "o_proj", decays: tuple[Dim, ...] = ()) -> Table:
        """Return the tensors. ``forget``: prefix of the names of the forget gate. ``decays``: dims of the decays, as
        they are stored; by default those of transformers."""
        width, heads, rank = Units(self.heads, self.head_dim), Units(self.heads), self.head_dim
        table = product("project", hidden, ("q_proj", width), ("k_proj", width), ("v_proj", width))
        table["project"] += (Tensor("b_proj.weight", (heads, hidden), "plain"),)
        for role, name, wide in (("forget", f"{forget}f", self.wide_forget), ("gate", "g", self.wide_gate)):
            into, rows = ("proj", width) if wide else ("a_proj", rank)
            table["project"] += (Tensor(f"{name}_{into}.weight", (rows, hidden)),)
            if not wide:
                table |= product(role, rank, (f"{name}_b_proj", width))
        decays = decays or ((heads,) if self.wide_forget else (1, 1, heads, 1))
        table["A_log"] = (Tensor(f"{forget}A_log", decays, "float32"),)
        table["dt_bias"] = (Tensor(f"{forget}dt_bias", (width,), "float32"),)
        return (
            table
            | conv((width, width, width), self.conv_kernel)
            | norm_weight("norm", rank, "o_norm")
            | product("out", width, (out, hidden))
        )
