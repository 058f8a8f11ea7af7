"""Feed-forwards: dense ones, and mixtures of experts. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from weft.families.mixers import BlockShape
from weft.families.tensors import Dim, Names, Numbered, Table, Tensor, Units, all_plain, norm_weight, product

Activation = Literal["silu", "gelu", "relu", "relu2", "clamped_swiglu", "gelu_tanh", "xielu", "situ"]
"""Activations. ``relu2``: the square of relu. ``clamped_swiglu``: that of gpt-oss's experts, over gate and up.
``xielu``: an activation with two learned numbers (Apertus). ``situ``: silu whose linear factor has a cap, and so has
up (Kimi K3, Inkling 2)."""


Scoring = Literal["softmax", "sigmoid", "late_sigmoid", "sparsemixer", "sqrtsoftplus"]
GATED: Names = ("gate_proj", "up_proj", "down_proj")
JOINED: Names = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Dense(BlockShape):
    """Feed-forward; ``width`` is the inner size. ``gated``: down(act(gate(x)) * up(x)), else
    down(act(up(x))). ``multipliers``: factors on gate(x) and on the result, Falcon-H1's. ``limit``: gate(x)
    is at most this, and up(x) at most this on both sides (GLM 5); 0 for none. ``caps``: of "situ" on gate(x) and up(x):
    c tanh(x / c) replaces x; 0 for none. ``sparsity``: share of the numbers of gate(x) that are cut to 0, if these are
    normally distributed; of the others the cut is subtracted (Gemma 3n)."""

    reader = "weft.models.blocks.feed_forward:read_dense"
    part = "feed-forward"

    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    multipliers: tuple[float, float] = (1.0, 1.0)
    limit: float = 0.0
    caps: tuple[float, float] = (0.0, 0.0)
    sparsity: float = 0.0

    def table(self, hidden: int, *, names: Names = GATED, whole: bool = False, paired: bool = False) -> Table:
        """Return the tensors. ``names``: of the input products, then of the output product; one name of gate and up
        where they are one tensor. ``whole``: ranks do not divide it. ``paired``: rows of gate and up take turns in the
        one tensor."""
        *into, down = names if self.gated else names[-2:]
        width: Dim = self.width if whole else Units(self.width)
        rows = width
        if self.gated and len(into) == 1:
            rows = 2 * width if isinstance(width, int) else (Units(self.width), Units(self.width))
            rows = Units(self.width, 2) if paired else rows
        learned: Table = {}
        if self.activation == "xielu":
            learned = {part: (Tensor(f"act_fn.alpha_{part[0]}", (1,), "plain"),) for part in ("positive", "negative")}
        return (
            product("into", hidden, *((name, rows) for name in into), bias=self.bias)
            | product("down", width, (down, hidden), bias=self.bias)
            | learned
        )


@dataclass(frozen=True, slots=True)
class Experts(BlockShape):
    """Mixture of experts: each token passes the ``per_token`` best of ``count`` experts, and the shared ones.

    Experts:
        width             inner size of one expert
        limit, caps       as in ``Dense``; ``limits_shared`` False: the shared expert has no limit (Hy4)
        bias              the router and both products of an expert have biases
        latent_width      routed experts work on a projection of this width; 0: on the stream itself
        latent_normed     an RMS norm of the sum of the routed experts, before it is expanded (Kimi K3)
        each_normed       an RMS norm of that projection, and one of the output of each expert, which is scaled first;
                          the epsilon of the second is that of norms after blocks (Muse Spark)
        own_count         most experts of one rank, if ranks divide experts by number; 0: each rank has a part of all
        normed_apart      shared expert, routed experts and router have separate norms, and the weight of each expert
                          has a factor (Gemma 4)
        out_normed        an RMS norm of the output of all experts (A.X K1)
        sum_bias          a bias of the sum of all experts (JetMoE)
        identities        further choices of the router, after the experts, which give the input back (LongCat)
        late              the sum of the routed experts joins the stream after the next layer; the shared expert joins
                          it at once (LongCat)
        bank              number of the router and experts, which layers may share; None: the layer has its own
                          (Intern-S2-Mobius)

    Shared experts, which every token passes:
        shared_width      inner size of the shared expert; 0: there is none
        shared_gate       its output is multiplied by the sigmoid of a learned gate
        shared_factor     factor on its output
        shared_count      number of shared experts that the router scores too; weights are then shares of the sum over
                          shared and chosen experts (Inkling)

    Choice and weights:
        scoring           function from a router's score to a weight; "late_sigmoid" chooses by scores and weighs by
                          the sigmoids of the chosen ones (Kolibri); "sparsemixer" weighs an expert by its share among
                          the scores within ``band`` of it, those of better experts left out (Phi 3.5); "sqrtsoftplus"
                          is the root of a softplus (DeepSeek V4)
        hashed            tokens of a table that names the experts of each token; 0: scores choose (DeepSeek V4)
        choice_bias       a learned number per expert is added for the choice, and not to the weight
        groups            number of groups of experts; experts are chosen from the ``groups_chosen`` groups with the
                          largest sum of their ``group_best`` best scores; ``others_zero``: the choice has 0 for the
                          experts of other groups, which a negative score loses to (A.X K2)
        normalized        the weights of the chosen experts sum to 1; ``normalizer_eps`` is added to the sum
        scale             factor on the weights
        score_factor      factor on the router's scores (Muse Spark)
        weighs_input      a weight multiplies the input of an expert, not the output (Llama 4)
        router_width      inner size of a router that is a feed-forward over a state from layer to layer, and may
                          choose no expert (ZAYA); 0: the router is one product
        router_continues  the router reads the state of the layer before
    """

    reader = "weft.models.blocks.feed_forward:read_experts"
    part = "experts"

    count: int
    per_token: int
    width: int
    normalized: bool
    shared_width: int = 0
    shared_gate: bool = False
    scoring: Scoring = "softmax"
    choice_bias: bool = False
    scale: float = 1.0
    normalizer_eps: float = 0.0
    groups: int = 1
    groups_chosen: int = 1
    activation: Activation = "silu"
    gated: bool = True
    latent_width: int = 0
    own_count: int = 0
    bias: bool = False
    normed_apart: bool = False
    limit: float = 0.0
    limits_shared: bool = True
    router_width: int = 0
    router_continues: bool = False
    shared_count: int = 0
    group_best: int = 2
    others_zero: bool = False
    weighs_input: bool = False
    shared_factor: float = 1.0
    out_normed: bool = False
    band: float = 0.0
    caps: tuple[float, float] = (0.0, 0.0)
    hashed: int = 0
    bank: int | None = None
    latent_normed: bool = False
    sum_bias: bool = False
    identities: int = 0
    late: bool = False
    each_normed: bool = False
    score_factor: float = 1.0

    @property
    def choices(self) -> int:
        """Number of choices of the router, shared experts left out."""
        return self.count + self.identities

    @property
    def further_norms(self) -> int:
        return 3 * self.normed_apart + self.out_normed

    @property
    def shared(self) -> Dense:
        """The expert that every token passes."""
        factors, limit = (1.0, self.shared_factor), self.limit if self.limits_shared else 0.0
        return Dense(self.shared_width, self.activation, self.gated, multipliers=factors, limit=limit, caps=self.caps)

    def table(
        self,
        hidden: int,
        *,
        names: Names = GATED,
        router: str = "gate.weight",
        choice_bias: str = "gate.e_score_correction_bias",
        choice_row: bool = False,
        stacks: tuple[str, str] | None = None,
        paired: bool = False,
        transposed: bool = False,
    ) -> Table:
        """Return the tensors of the routed experts and the router, without the shared expert. The matrices of all
        experts are one tensor for each role, even if the files store each expert separately. ``stacks``: names of
        these tensors in files that have them. ``paired``: rows of gate and up alternate. ``transposed``: each matrix
        is stored as [columns, rows]. ``choice_row``: the bias on the choice is a matrix of one row (ERNIE)."""
        count: Dim = Numbered("experts", self.count) if self.own_count else self.count
        into, down = stacks or ("experts.gate_up_proj" if self.gated else "experts.up_proj", "experts.down_proj")
        fused = self.expert_table(hidden, names=("into", "down"))
        dims = {role: tensor.dims for role, [tensor] in fused.items()}
        if paired:
            dims["into"] = (2 * self.width if self.own_count else Units(self.width, 2), dims["into"][1])
        table: Table = (
            self._router_over_layers(hidden)
            if self.router_width
            else {"router": (Tensor(router, (self.choices + self.shared_count, hidden), "plain"),)}
        )
        for role, name in (("into", into), ("down", down)):
            table[role] = (Tensor(name, (count, *(dims[role][::-1] if transposed else dims[role]))),)
            if self.bias and (paired or role == "down"):
                of_first = role == "down" and not self.own_count
                table[f"{role}.bias"] = (Tensor(f"{name}_bias", (count, dims[role][0]), "float32", of_first),)
            elif self.bias:
                for part in ("gate", "up"):
                    table[f"{part}.bias"] = (
                        Tensor(
                            f"experts.{part}_proj_bias",
                            (count, self.width if self.own_count else Units(self.width)),
                            "float32",
                        ),
                    )
        if self.bias:
            table["router.bias"] = (Tensor(router.replace("weight", "bias"), (self.count,), "plain"),)
        if self.choice_bias and not self.router_width:
            biases = (1, self.choices) if choice_row else (self.choices,)
            table["choice_bias"] = (Tensor(choice_bias, biases, "float32"),)
        if self.hashed:
            table["by_token"] = (Tensor("gate.tid2eid", (self.hashed, self.per_token), "float32"),)
        if self.sum_bias:
            table["sum_bias"] = (Tensor("bias", (hidden,), "plain", of_first=True),)
        if self.shared_gate:
            table |= self.own_table(hidden)
        if self.latent_width:
            table |= product("latent_in", hidden, ("fc1_latent_proj", self.latent_width)) | product(
                "latent_out", self.latent_width, ("fc2_latent_proj", hidden)
            )
        if self.latent_normed:
            table |= norm_weight("latent_norm", self.latent_width, "latent_norm")
        if self.each_normed:
            table |= norm_weight("narrow_norm", self.latent_width, "pre_expert_norm")
            table |= norm_weight("each_norm", self.latent_width, "experts.post_expert_norm")
        return table

    @property
    def routed(self) -> Experts:
        """The routed experts and the router, alone."""
        return replace(self, shared_width=0, shared_gate=False)

    def own_table(self, hidden: int) -> Table:
        """Return the tensors of a layer whose experts are in a bank, without the shared expert."""
        return {"shared_gate": (Tensor("shared_expert_gate.weight", (1, hidden), "plain"),)}

    def tables(self, hidden: int) -> list[Table]:
        if self.bank is not None:  # without the bank, which is no layer's own
            return [self.own_table(hidden), self.shared.table(hidden)]
        if self.shared_count:
            return [self.table(hidden), self.shared_table(hidden)]
        shared = [self.shared.table(hidden)] if self.shared_width else []
        apart = [self.apart_table(hidden)] if self.normed_apart else []
        return [self.table(hidden), *shared, *apart]

    def _router_over_layers(self, hidden: int) -> Table:
        """Return the tensors of a router that has one choice more than experts: none."""
        width, inner = self.router_width, "gate.router_mlp"
        table = (
            product("router", hidden, ("gate.down_proj", width), bias=True)
            | product("fc1", width, (f"{inner}.fc1", width), bias=True)
            | product("fc2", width, (f"{inner}.fc2", width), bias=True)
            | product("choice", width, (f"{inner}.out_proj", self.count + 1))
        )
        if self.router_continues:
            table["continued"] = (Tensor("gate.router_states_scale", (width,)),)
        biases = Tensor("gate.balancing_biases", (self.count + 1,), "float32")
        return all_plain(table) | norm_weight("router_norm", width, f"{inner}.norm") | {"choice_bias": (biases,)}

    def shared_table(self, hidden: int, *, paired: bool = False) -> Table:
        """Return the tensors of ``shared_count`` experts, always divided by their width. ``paired``: rows of gate and
        up take turns."""
        count, width = self.shared_count, Units(self.shared_width)
        into = tuple(Tensor(f"shared_experts.{part}_proj", (count, width, hidden)) for part in ("gate", "up"))
        if paired:
            into = (Tensor("shared_experts.shared_w13_weight", (count, Units(self.shared_width, 2), hidden)),)
        down = f"shared_experts.{'shared_w2_weight' if paired else 'down_proj'}"
        return {"into": into, "down": (Tensor(down, (count, hidden, width)),)}

    def apart_table(self, hidden: int) -> Table:
        """Return the tensors of Gemma 4's router, without its product."""
        return {
            "scale": (Tensor("scale", (hidden,), "plain"),),
            "factors": (Tensor("per_expert_scale", (self.count,), "plain"),),
        }

    def expert_table(self, hidden: int, *, names: Names = GATED) -> Table:
        """Return the tensors of one expert. Its width is divided, unless experts are divided by their number."""
        expert = Dense(self.width, self.activation, self.gated)
        return expert.table(self.latent_width or hidden, names=names, whole=bool(self.own_count))


FeedForward = Dense | Experts


def banks(feeds: Iterable[FeedForward | None]) -> list[Experts]:
    """Return the feed-forward of one layer for each bank of experts."""
    return list({feed.bank: feed for feed in feeds if isinstance(feed, Experts) and feed.bank is not None}.values())
