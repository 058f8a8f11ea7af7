"""Feed-forwards: SwiGLU and its less usual forms, and mixtures of experts.

    dense      down(act(gate(x)) * up(x))      or, without a gate,      down(act(up(x)))
    experts    scores = softmax(x @ router)  ->  top k  ->  sum of weight_e * expert_e(x)
               (+ shared(x), maybe gated); later routers score each expert by a sigmoid

Sources: Shazeer (2020) for SwiGLU; Primer (So et al., 2021) for squared relu; transformers ``FalconH1MLP``,
``NemotronHMLP``, ``Zamba2MLP``, ``Qwen2MoeSparseMoeBlock``, ``GraniteMoeHybridMoE``, ``NemotronHMoE``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F

from weft.families.mixers.feed_forward import GATED, JOINED, Dense, Experts
from weft.families.tensors import Names
from weft.models.block_reader import BlockReader
from weft.models.blocks.adapted import AdaptedBlock, ExpertsChange
from weft.models.blocks.linear import Linear, Norm, NormOfScaled, Projection, by_turns, fused_block_of
from weft.models.table_reader import TableReader
from weft.models.weights import Order
from weft.tensor import gpu
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.ops.elementwise import XIELU_BETA, XIELU_EPS, activate, silu_mul, staged, xielu
from weft.tensor.ops.moe import (
    ChoiceRule,
    ExpertBiases,
    ExpertWeights,
    SharedOutput,
    activated,
    by_expert,
    choose_experts,
    moe,
    rows_alone,
    weigh_experts,
)
from weft.units import PAD


@dataclass(slots=True)
class SwiGlu:
    """SwiGLU: down(silu(gate(x)) * up(x)); ``gate_up`` has the gate's rows first."""

    gate_up: Linear
    down: Linear
    fused: FusedBlock | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.fused = fused_block_of(self.gate_up, self.down)

    def __call__(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None) -> torch.Tensor:
        return self.down(self.gate_up.gated(x_TD))

    def staged(self, x_TD: torch.Tensor) -> FusedLayer | None:
        """Return the block as a part of a stack; ``x_TD`` is its input."""
        return None if self.fused is None else staged(self.fused, x_TD)


@dataclass(slots=True)
class GaussianTopK:
    """Cut of a gate: what exceeds the mean of its columns by ``factor`` standard deviations, less that cut, and 0 in
    place of the rest. ``columns``: on all ranks; ``add``: sum over ranks.

    Source: transformers ``Gemma3nTextMLP``.
    """

    factor: float
    columns: int
    add: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, gate_TI: torch.Tensor) -> torch.Tensor:
        wide = gate_TI.float()
        sums_T2 = self.add(torch.stack((wide.sum(-1), wide.square().sum(-1)), dim=-1))
        mean_T1, square_T1 = torch.split(sums_T2 / self.columns, 1, dim=-1)
        deviation_T1 = (square_T1 - mean_T1.square()).clamp_min(0.0).sqrt()
        return F.relu(wide - (mean_T1 + deviation_T1 * self.factor)).to(gate_TI.dtype)


@dataclass(slots=True)
class DenseBlock:
    """A dense feed-forward. ``into``: rows gate, up when ``shape.gated``, else only up."""

    shape: Dense
    into: Projection
    down: Linear
    learned: tuple[float, float] | None = None
    """Numbers of the activation above and below 0, of "xielu"."""
    cut: GaussianTopK | None = None
    """Cut of the gate, if ``shape.sparsity``."""

    def __call__(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None) -> torch.Tensor:
        inner = self.into(x_TD)
        gate_factor, factor = self.shape.multipliers
        if self.shape.gated and self.shape.activation == "silu" and (gate_factor == 1.0 or inner.is_cpu):
            if gate_factor != 1.0:
                inner[:, : inner.shape[1] // 2].mul_(gate_factor)
            inner = silu_mul(inner, self.shape.limit)
        elif self.shape.limit or self.shape.activation in ("situ", "clamped_swiglu"):
            shape = self.shape
            inner = activated(inner, shape.activation, gated=True, limit=shape.limit, caps=shape.caps)
        elif self.shape.gated:
            gate, up = inner.chunk(2, dim=-1)
            gate = gate if self.cut is None else self.cut(gate)
            inner = activate(gate if gate_factor == 1.0 else gate * gate_factor, self.shape.activation) * up
        elif self.learned is not None:
            inner = xielu(inner, *self.learned)
        else:
            inner = activate(inner, self.shape.activation)
        y_TD = self.down(inner)
        return y_TD if factor == 1.0 else y_TD * factor


@dataclass(slots=True)
class ExpertsBlock:
    """A mixture of experts. ``router``: [experts, D]; ``gate_up``: [experts, 2 width, D], [experts, width, D] without
    gates; ``down``: [experts, D, width]; ``choice_bias``: float32 [experts]. With ``latent_in`` and ``latent_out`` the
    D of the experts is the latent width.
    """

    shape: Experts
    router: Linear
    gate_up: ExpertWeights
    down: ExpertWeights
    shared: Projection | None = None
    shared_gate: Linear | None = None
    choice_bias: torch.Tensor | None = None
    sum_bias: torch.Tensor | None = None
    """[D], added to the sum over experts."""
    biases: ExpertBiases | None = None
    latent_in: Linear | None = None
    latent_out: Linear | None = None
    latent_norm: Norm | None = None
    """Norm of the sum over experts and ranks (``NormedLatent``)."""
    pair_norms: tuple[Norm, NormOfScaled] | None = None
    """Norms of the narrow input and of each expert's output (``NormedPairs``)."""
    own: range | None = None
    """Experts that ``gate_up`` and ``down`` hold; None for all. Choices of others are skipped."""
    choices: torch.Tensor | None = None
    """int64 [experts]: how often each was chosen, if that is counted."""
    adapted: AdaptedBlock[ExpertsChange] | None = None
    by_token: torch.Tensor | None = None
    """int32 [tokens, X]: the experts of each token, if its number chooses them."""
    gives_back: bool = False
    """Whether choices after the experts (``shape.identities``) add the input to the sum, which the first rank does."""
    _rule: ChoiceRule = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        self._rule = ChoiceRule(
            shape.per_token,
            shape.normalized,
            shape.scoring,
            shape.scale,
            shape.normalizer_eps,
            shape.groups,
            shape.groups_chosen,
            shape.group_best,
            shape.band,
            shape.others_zero,
        )

    def __call__(
        self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None, tokens_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        weights_TX, ids_TX = self.route(x_TD, positions_T, tokens_T)
        if self._sums_with_shared(x_TD):
            return self._weighed(x_TD, self._counted(ids_TX), weights_TX, self._shared_output(x_TD))
        y_TD = self.of_choices(x_TD, ids_TX, weights_TX)
        y_TD = y_TD if self.sum_bias is None else y_TD + self.sum_bias
        return y_TD if self.shared is None else self._shared_output(x_TD).added_to(y_TD)

    def _sums_with_shared(self, x_TD: torch.Tensor) -> bool:
        """Return whether the sum over choices has the shared expert too: nothing else happens to that sum."""
        shape = self.shape
        plain = not (shape.identities or shape.weighs_input) and self.latent_in is None and self.latent_out is None
        return self.shared is not None and plain and self.sum_bias is None and gpu.joins(x_TD.device)

    def _shared_output(self, x_TD: torch.Tensor) -> SharedOutput:
        assert self.shared is not None
        return SharedOutput(self.shared(x_TD), None if self.shared_gate is None else self.shared_gate(x_TD))

    def of_choices(self, x_TD: torch.Tensor, ids_TX: torch.Tensor, weights_TX: torch.Tensor) -> torch.Tensor:
        """Return the output of only the routed experts."""
        own_T1 = None
        if self.shape.identities:
            back_TX = ids_TX >= self.shape.count
            ids_TX = ids_TX.masked_fill(back_TX, PAD)
            own_T1 = weights_TX.masked_fill(~back_TX, 0.0).sum(-1, keepdim=True) if self.gives_back else None
        ids_TX = self._counted(ids_TX)
        routed = x_TD if self.latent_in is None else self.latent_in(x_TD)
        y_TD = self._routed(routed, ids_TX, weights_TX)
        y_TD = y_TD if self.latent_out is None or self.latent_norm is not None else self.latent_out(y_TD)
        return y_TD if own_T1 is None else torch.addcmul(y_TD, x_TD, own_T1)

    def of_pairs(self, x_TD: torch.Tensor, ids_TX: torch.Tensor) -> torch.Tensor:
        """Return the output of each expert of each token alone, [T X, D], zeros for those of other ranks."""
        ids_P1 = self._counted(ids_TX).reshape(-1, 1)
        ones_P1 = torch.ones(ids_P1.shape, dtype=x_TD.dtype, device=x_TD.device)
        return self._weighed(x_TD.repeat_interleave(ids_TX.shape[1], 0), ids_P1, ones_P1)

    def _counted(self, ids_TX: torch.Tensor) -> torch.Tensor:
        """Count the choices. Return them by the numbers of this rank's experts."""
        if self.choices is not None:
            # Ids start at PAD (-1), so the first count is of the choices to skip.
            counts = torch.bincount(ids_TX.flatten() - PAD, minlength=self.shape.count + 1)
            self.choices = self.choices + counts[1:]
        return ids_TX if self.own is None else _of_own(ids_TX, self.own)

    def _routed(self, x_TD: torch.Tensor, ids_TX: torch.Tensor, weights_TX: torch.Tensor) -> torch.Tensor:
        if not self.shape.weighs_input:
            return self._weighed(x_TD, ids_TX, weights_TX)
        ones_T1 = torch.ones_like(weights_TX[:, :1])
        y_XTD = [
            self._weighed(x_TD * weights_TX[:, place, None], ids_TX[:, place : place + 1], ones_T1)
            for place in range(ids_TX.shape[1])
        ]
        return y_XTD[0] if len(y_XTD) == 1 else torch.stack(y_XTD).sum(0)

    def _weighed(
        self, x_TD: torch.Tensor, ids_TX: torch.Tensor, weights_TX: torch.Tensor, shared: SharedOutput | None = None
    ) -> torch.Tensor:
        own = [] if self.adapted is None else self.adapted.of_step(len(x_TD))
        if own:
            # Rows of an adapter go through its experts below; here they are skipped.
            all_ids_TX, ids_TX = ids_TX, ids_TX.clone()
            for group, _ in own:
                ids_TX[group.rows] = PAD
        y_TD = moe(
            x_TD,
            ids_TX,
            weights_TX,
            self.gate_up,
            self.down,
            activation=self.shape.activation,
            gated=self.shape.gated,
            biases=self.biases,
            limit=self.shape.limit,
            caps=self.shape.caps,
            shared=None if own else shared,
        )
        for group, change in own:
            expert = partial(self._adapted_expert, change)
            y_TD[group.rows] = by_expert(
                x_TD[group.rows], all_ids_TX[group.rows], weights_TX[group.rows], self.gate_up.shape[0], expert
            )
        return shared.added_to(y_TD) if own and shared is not None else y_TD

    def _adapted_expert(self, change: ExpertsChange, x: torch.Tensor, number: int) -> torch.Tensor:
        inner = change.product("into", number, x, rows_alone(x, self.gate_up, number))
        if self.biases is not None:
            inner = inner + self.biases.gate_up_EJ[number].to(inner.dtype)
        shape = self.shape
        inner = activated(inner, shape.activation, gated=shape.gated, limit=shape.limit, caps=shape.caps)
        y = change.product("down", number, inner, rows_alone(inner, self.down, number))
        return y if self.biases is None else y + self.biases.down_ED[number].to(y.dtype)

    def route(
        self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None, tokens_T: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights [T, X] in the dtype of ``x_TD``, expert ids int64 [T, X], best first, PAD for rows of PAD."""
        scores_TE = self.router(x_TD.to(self.router.weight.dtype))
        if self.shape.score_factor != 1.0:
            scores_TE = scores_TE * self.shape.score_factor
        if self.by_token is not None:
            assert tokens_T is not None, "experts that tokens choose"
            ids_TX = self.by_token[tokens_T].long()
            return weigh_experts(scores_TE, ids_TX, self._rule, positions_T, dtype=x_TD.dtype)
        return choose_experts(scores_TE, self._rule, self.choice_bias, positions_T, dtype=x_TD.dtype)


@dataclass(slots=True)
class ExpertsApart:
    """The expert that every token passes (``dense``) and the routed ones, each between its own norms; the router has a
    third norm. ``factors``: on the weight of each expert.

        y = norm(dense(norm(x))) + norm(sum of factor_e weight_e expert_e(norm(x)))

    Source: transformers ``Gemma4TextDecoderLayer``, ``Gemma4TextRouter``.
    """

    experts: ExpertsBlock
    routed: Callable[..., torch.Tensor]
    dense: Projection
    norms: tuple[Norm, Norm]
    out_norms: tuple[Norm, Norm]
    router_norm: Norm
    factors: torch.Tensor

    def __call__(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None) -> torch.Tensor:
        dense_norm, norm = self.norms
        dense_out_norm, out_norm = self.out_norms
        weights_TX, ids_TX = self.experts.route(self.router_norm(x_TD), positions_T)
        weights_TX = weights_TX * self.factors[ids_TX.clamp_min(0)]  # PAD rows weigh nothing
        y_TD = self.routed(norm(x_TD), ids_TX, weights_TX)
        return dense_out_norm(self.dense(dense_norm(x_TD))) + out_norm(y_TD)


@dataclass(slots=True)
class NormedLatent:
    """Experts in a latent width, whose sum is normed. ``routed``: their sum over ranks. Each rank has all rows of the
    product that expands it.

        y = expand(norm(sum of weight_e expert_e(narrow x))) + shared(x)

    Source: mlx-lm's ``kimi_k3``.
    """

    experts: ExpertsBlock
    routed: Callable[..., torch.Tensor]
    shared: Callable[..., torch.Tensor] | None

    def __call__(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None) -> torch.Tensor:
        expand, norm = self.experts.latent_out, self.experts.latent_norm
        assert expand is not None
        assert norm is not None
        y_TD = expand(norm(self.routed(x_TD, *reversed(self.experts.route(x_TD, positions_T)))))
        return y_TD if self.shared is None else y_TD + self.shared(x_TD)


@dataclass(slots=True)
class NormedPairs:
    """Experts whose outputs are normed one by one, in a latent width that is normed too. ``pairs``: outputs of experts,
    their sum over ranks. Each rank has all rows of the product that expands the sum.

        z = norm(narrow x);   y = expand(sum of weight_e norm(expert_e(z)))

    Source: transformers ``MuseSparkMoE``.
    """

    experts: ExpertsBlock
    pairs: Callable[..., torch.Tensor]
    narrow_norm: Norm
    each_norm: NormOfScaled

    def __call__(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None) -> torch.Tensor:
        narrow, expand = self.experts.latent_in, self.experts.latent_out
        assert narrow is not None
        assert expand is not None
        weights_TX, ids_TX = self.experts.route(x_TD, positions_T)
        z_TC = self.narrow_norm(narrow(x_TD))
        y_TXC = self.each_norm(self.pairs(z_TC, ids_TX)).view(*ids_TX.shape, z_TC.shape[-1])
        sum_TC = torch.zeros(z_TC.shape, dtype=torch.float32, device=z_TC.device)
        for place in range(ids_TX.shape[1]):
            sum_TC.addcmul_(y_TXC[:, place].float(), weights_TX[:, place, None].float())
        return expand(sum_TC.to(z_TC.dtype))


def _of_own(ids_TX: torch.Tensor, own: range) -> torch.Tensor:
    """Return the indices of experts ``ids_TX`` in ``own``, PAD for experts of other ranks."""
    places_TX = ids_TX - own.start
    return places_TX.masked_fill((places_TX < 0) | (places_TX >= len(own)), PAD)


def read_swiglu(read: BlockReader, shape: Dense, name: str, names: Names = GATED, *, paired: bool = False) -> SwiGlu:
    """Read the usual feed-forward; ``names`` and ``paired`` as in its table."""
    table = read.table(shape.table(read.hidden, names=names, paired=paired), name)
    orders: dict[str, Order] = {f"{names[0]}.weight": by_turns} if paired else {}
    return SwiGlu(table.linear("into", orders=orders), table.linear("down"))


def read_dense(read: BlockReader, shape: Dense, name: str, names: Names = GATED) -> DenseBlock:
    """Read a feed-forward in any form of ``Dense``. Files may have gate and up as one tensor."""
    if names == GATED and read.source.has(f"{name}.{JOINED[0]}.weight"):
        names = JOINED
    table = read.table(shape.table(read.hidden, names=names), name)
    if shape.activation == "xielu":
        for part, number in (("beta", XIELU_BETA), ("eps", XIELU_EPS)):
            read.source.leave(f"{name}.act_fn.{part}", torch.tensor(number), "hidden_act")
    return DenseBlock(shape, table.linear("into"), table.linear("down"), _learned(table), _cut(read, shape))


def _cut(read: BlockReader, shape: Dense) -> GaussianTopK | None:
    if not shape.sparsity:
        return None
    share, factor = read.source.share, NormalDist().inv_cdf(shape.sparsity)
    if share is None:
        return GaussianTopK(factor, shape.width, lambda sums: sums)
    return GaussianTopK(factor, shape.width * share.place.size, share.collectives.add)


def _learned(table: TableReader) -> tuple[float, float] | None:
    """Return the two numbers of "xielu", which are stored as logarithms."""
    positive, negative = (table.get(part) for part in ("positive", "negative"))
    if positive is None or negative is None or positive.is_meta:
        return None
    positive, negative = (F.softplus(stored.float()) for stored in (positive, negative))
    return positive.item(), negative.item() + XIELU_BETA


def read_experts(
    read: BlockReader,
    shape: Experts,
    name: str,
    *,
    exact_router: bool = False,
    paired: bool = False,
    transposed: bool = False,
    **names: Any,
) -> ExpertsBlock:
    """Read experts, without the expert that every token passes. ``names`` and ``paired``: as ``Experts.table`` takes
    them; ``exact_router``: it is read in float32. ``transposed``: stacks of all experts are. Experts in pairs are
    stored transposed, except in blocks of codes.
    """
    known_pairs = paired
    paired = paired and read.source.has(f"{name}.experts.gate_up_proj_bias")  # GGUF has them apart
    transposed = (paired or transposed) and read.source.stored_rows(f"{name}.experts.gate_up_proj") > 0
    table = read.table(shape.table(read.hidden, paired=paired, transposed=transposed, **names), name)
    order = gate_first if paired else None
    router, each = table.plain("router", torch.float32 if exact_router else None), names.get("names", GATED)
    # With pairs, adapters of experts are not served, and refused as unknown modules.
    block = routed_block(
        read, shape, table, router, names=each, transposed=transposed, order=order,
        adapted=not (known_pairs or shape.each_normed),
    )  # fmt: skip
    choice_bias = table.get("choice_bias")
    block.choice_bias = None if choice_bias is None else choice_bias.flatten()
    block.sum_bias = table.get("sum_bias")
    if shape.hashed:
        block.by_token = table.numbers("by_token")
    if shape.bias:
        of_into = (
            torch.cat((table.tensor("gate.bias"), table.tensor("up.bias")), dim=1)
            if order is None
            else order(table.tensor("into.bias"))
        )
        block.biases = ExpertBiases(of_into, table.tensor("down.bias"))
    if shape.identities:
        block.gives_back = read.source.place.rank == 0
        for number in range(shape.count, shape.choices):  # transformers' save has matrices that nothing multiplies
            read.source.leave_all(f"{name}.experts.{number}.")
    if shape.shared_gate:
        block.shared_gate = table.plain("shared_gate")
    if shape.latent_width:
        block.latent_in, block.latent_out = table.linear("latent_in"), table.linear("latent_out")
    if shape.latent_normed:
        block.latent_norm = table.norm("latent_norm", read.eps)
    if shape.each_normed:
        factors, eps = table.tensor("each_norm"), read.architecture.residual.out_eps
        each_norm = NormOfScaled(
            factors if factors.is_meta else factors + 1.0, Norm(read.ones(shape.latent_width), eps)
        )
        block.pair_norms = table.norm("narrow_norm", read.eps, plus_one=read.plus_one), each_norm
    return block


def summed_experts(read: BlockReader, block: ExpertsBlock) -> Callable[..., torch.Tensor]:
    """Return ``block`` with its result summed over ranks, and what it norms summed before that."""
    summed = read.source.summed
    if block.pair_norms is not None:
        return NormedPairs(block, summed(block.of_pairs), *block.pair_norms)
    if block.latent_norm is None:
        return summed(block)
    shared, block.shared = block.shared, None
    return NormedLatent(block, summed(block.of_choices), None if shared is None else summed(shared))


def routed_block(
    read: BlockReader,
    shape: Experts,
    table: TableReader,
    router: Linear,
    *,
    names: Names = GATED,
    transposed: bool = False,
    order: Order | None = None,
    adapted: bool = True,
) -> ExpertsBlock:
    """Return the routed experts of ``table``. ``adapted``: adapters may change them."""
    into, down = _read_routed(read, shape, table, names, transposed, order)
    block = ExpertsBlock(shape, router, into, down)
    if read.source.place.by_expert:
        block.own = read.source.own_experts(shape.count)
        block.choices = torch.zeros(shape.count, dtype=torch.int64, device=block.router.weight.device)
    if adapted:
        _note_experts(read, shape, table, block, names)
    return block


def _note_experts(read: BlockReader, shape: Experts, table: TableReader, block: ExpertsBlock, names: Names) -> None:
    """Note the matrices that adapters may change: each expert's own, and the stacks of all."""
    source, own = read.source, read.source.own_experts(shape.count)
    source.note(f"{table.name}.experts", block, 0, 0, kind="experts", experts=own)
    for role in ("into", "down"):
        [stack] = table.table[role]
        source.declare(source.checkpoint.prefix + f"{table.name}.{stack.name}", stack)
        *_, rows, columns = stack.shape(source.place)
        stacked = f"{table.name}.experts.{'down_proj' if role == 'down' else 'gate_up_proj'}"
        for spelled in {f"{table.name}.{stack.name}", stacked}:
            source.note(spelled, block, rows, columns, tensor=stack, kind="experts", experts=own, role=role)
        each, first = shape.expert_table(read.hidden, names=names)[role], 0
        for tensor in each:
            rows, columns = tensor.shape(source.place)
            for number in range(shape.count):  # this rank notes the experts of other ranks too, and uses none of them
                source.note(
                    f"{table.name}.experts.{number}.{tensor.name}",
                    block if number in own else None,
                    rows,
                    columns,
                    first=first,
                    tensor=tensor,
                    kind="experts",
                    experts=range(number, number + 1),
                    role=role,
                )
            first += rows


def _read_routed(
    read: BlockReader, shape: Experts, table: TableReader, names: Names, transposed: bool, order: Order | None
) -> tuple[ExpertWeights, ExpertWeights]:
    """Read the input matrices of all experts, and their output matrices."""
    # Hub releases store each expert by itself (experts.3.gate_proj.weight); transformers may save them
    # as two tensors of all experts (experts.gate_up_proj).
    source, weights = read.source, []
    for role in ("into", "down"):
        [stack] = table.table[role]
        each, parts = shape.expert_table(read.hidden, names=names)[role], []
        if source.has(f"{table.name}.{stack.name}"):
            full, (count, *sides) = table.declared(stack)
            rows, columns = reversed(sides) if transposed else sides
            weights.append(
                source.all_experts(
                    [full],
                    count,
                    rows,
                    columns,
                    transposed=transposed,
                    order=order if role == "into" else None,
                    apart=[f"{table.name}.experts.{{}}.{tensor.name}" for tensor in each],
                )
            )
            continue
        for expert in source.own_experts(shape.count):
            expert_table = read.table({role: each}, f"{table.name}.experts.{expert}")
            parts.append([expert_table.declared(tensor) for tensor in each])
        rows, columns = parts[0][0][1]
        weights.append(source.experts([[full for full, _ in part] for part in parts], rows, columns))
    into, down = weights
    return into, down


def gate_first(rows: torch.Tensor) -> torch.Tensor:
    """Return all rows of the gate, then all of up, of [experts, rows, ...] whose rows of gate and up take turns."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)


def read_experts_apart(
    read: BlockReader, shape: Experts, name: str, norms: tuple[tuple[str, str], tuple[str, str]], **names: Any
) -> ExpertsApart:
    """Read experts with separate norms. ``norms``: before the dense expert and the routed ones, and after both, in the
    layer ``name``.
    """
    block = read_experts(read, shape, name, router="router.proj.weight", **names)
    own = read.table(shape.apart_table(read.hidden), f"{name}.router")
    # The router sees x / rms(x) / sqrt(D), times its own factors.
    router_norm = Norm(own.tensor("scale") * read.hidden**-0.5, read.eps)
    (before, after), summed = norms, read.source.summed
    return ExpertsApart(
        block,
        summed(block.of_choices),
        summed(read_dense(read, shape.shared, f"{name}.mlp")),
        (read.norm(f"{name}.{before[0]}"), read.norm(f"{name}.{before[1]}")),
        (read.norm(f"{name}.{after[0]}"), read.norm(f"{name}.{after[1]}")),
        router_norm,
        own.tensor("factors"),
    )
