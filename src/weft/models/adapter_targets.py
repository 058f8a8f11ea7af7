"""Map from each stored matrix of a checkpoint to the rows of a product that an adapter of that matrix changes.

    the build of the model      linear([q_proj, k_proj, v_proj])  ->  one product
                                '-- notes a Target for each: the product, its first row, its rows, their order

    an adapter's module         base_model.model.model.layers.3.self_attn.k_proj
    without wrappers            layers.3.self_attn.k_proj         ->  rows [512, 640) of the product

The tables of tensors that become one product (``families.tensors``) also serve adapters, so a family gets adapters
without further code. Factors are treated like the weights: rows of B are cut and ordered like rows of W, and columns of
A are cut like columns of W.

A matrix that is stored as one may be trained in parts, and the other way round. ``other_spellings`` has these names in
addition to the stored ones: gate and up, q, k and v, the projections of a gated delta net. Source: modules of
transformers and of vLLM, and tensors of hub checkpoints.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from weft.errors import CheckpointError
from weft.models.sharding import Shard

Order = Callable[[torch.Tensor], torch.Tensor]
Product = TypeVar("Product")
_WRAPPERS = (
    "base_model.model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.backbone.",
    "language_model.",
    "backbone.",
    "transformer.",
    "model.",
)
"""Prefixes before the names of a language model, in adapters of one wrapped model or another."""
_NEAREST = 3
_SYNONYMS = {
    word: words[0]
    for words in (
        ("self_attn", "attention"),
        ("mlp", "block_sparse_moe"),
        ("embed_tokens", "embeddings", "word_embeddings"),
        ("g_proj", "gate_proj"),
        ("o_proj", "dense"),
    )
    for word in words
}
"""Words of stored names with other spellings in transformers -> one spelling."""
_LEFT_OUT = "forget_gate"
"""Module of Kimi Linear: transformers keeps some matrices in a module of this name, hub files do not."""


@dataclass(frozen=True, slots=True)
class Target:
    """Rows of one product that a stored matrix became. ``product``: a ``Linear``, or a block with a matrix that is not
    a product by itself (``kind``: experts, the expansion of latent attention, the model for its embedding), or None
    for a tensor that is stored and never used. ``rows`` from ``first`` on and ``columns``: of this rank. ``order``: of
    rows as they are stored. ``shard``: of the stored matrix, None for all. ``experts``: the number of an expert, or
    all of a stack.
    """

    product: Any
    rows: int
    columns: int
    first: int = 0
    order: Order | None = None
    shard: Shard | None = None
    kind: str = "product"
    experts: range | None = None
    role: str = ""
    slices: tuple[tuple[Target, int, int], ...] = ()
    """Targets that rows [begin, end) of a fused spelling belong to."""

    @property
    def whole_shape(self) -> tuple[int, int]:
        """Shape of the stored matrix, over all ranks."""
        if self.slices:
            return self.slices[-1][2], self.columns
        rows, columns = self.rows, self.columns
        if self.shard is not None and not self.shard.absent:
            if self.shard.dim == 0:
                rows = self.shard.total
            elif self.shard.dim == 1:
                columns = self.shard.total
        return rows, columns


class Targets:
    """Targets of one model, by stored names without the model's prefix. ``name_here``: from the name of a tensor in
    released files to its name here.
    """

    def __init__(self, stored: Mapping[str, Target], name_here: Callable[[str], str] = str) -> None:
        self._name_here = name_here
        self.stored = frozenset(stored)
        """Names in the checkpoint itself."""
        self._by_name: dict[str, Target] = dict(stored)
        for name, target in other_spellings(stored).items():
            self._by_name.setdefault(name, target)
        self._by_plain_name = {_plain(name): target for name, target in self._by_name.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def products(self, kind: type[Product]) -> list[Product]:
        """Return each product of class ``kind``, once."""
        return list(
            {
                id(target.product): target.product
                for target in self._by_name.values()
                if isinstance(target.product, kind)
            }.values()
        )

    def find(self, module: str) -> Target:
        """Return the target of the module that an adapter calls ``module``. Raises CheckpointError with the nearest
        known names.
        """
        released = f"{module.removeprefix(_WRAPPERS[0])}.weight"
        name = unwrapped(self._name_here(released).removesuffix(".weight"))
        target = self._by_name.get(name) or self._by_plain_name.get(_plain(name))
        if target is not None:
            return target
        near = difflib.get_close_matches(name, self._by_name, n=_NEAREST, cutoff=0.4)
        raise CheckpointError(
            f"the adapter changes {module}, and this model has no such matrix"
            + (f"; the nearest are {', '.join(near)}" if near else ""),
            param="lora",
        )


def _plain(name: str) -> str:
    return ".".join(_SYNONYMS.get(word, word) for word in name.split(".") if word != _LEFT_OUT)


def unwrapped(module: str) -> str:
    """Return ``module`` without the prefixes before the language model's own names."""
    name = module
    while (wrapper := next((prefix for prefix in _WRAPPERS if name.startswith(prefix)), None)) is not None:
        name = name.removeprefix(wrapper)
    return name


def other_spellings(stored: Mapping[str, Target]) -> dict[str, Target]:
    """Return further names for rows of the same products: names of parts of a stored matrix, and names of several
    matrices as one.
    """
    groups: dict[str, dict[str, Target]] = {}
    for name, target in stored.items():
        home, _, leaf = name.rpartition(".")
        groups.setdefault(home, {})[leaf] = target
    spellings: dict[str, Target] = {}
    for home, leaves in groups.items():
        spelled = {leaf: target for parts, whole in _FUSED for leaf, target in _spelled(leaves, parts, whole)}
        spellings |= {f"{home}.{leaf}": target for leaf, target in spelled.items()}
    return spellings


_FUSED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "gate_up_proj"),
    (("w1", "w3"), "w13"),
    (("w1", "w3"), "gate_up_proj"),
    (("gate_proj", "up_proj"), "input_linear"),
    (("q_proj", "k_proj", "v_proj"), "qkv_proj"),
)
"""(the parts, the one matrix that others store or train instead). Names of a gated delta net, whose rows have another
order then, are added by its reader.
"""


def _spelled(leaves: Mapping[str, Target], parts: tuple[str, ...], whole: str) -> list[tuple[str, Target]]:
    if all(part in leaves for part in parts):
        return _as_one([leaves[part] for part in parts], whole)
    target = leaves.get(whole)
    if target is None or target.experts is not None:
        return []
    return _in_parts(target, parts)


def _as_one(parts: list[Target], whole: str) -> list[tuple[str, Target]]:
    if len({id(part.product) for part in parts}) != 1 or parts[0].experts is not None:
        return []
    slices, begin = [], 0
    for part in parts:
        slices.append((part, begin, begin + part.whole_shape[0]))
        begin += part.whole_shape[0]
    return [
        (whole, replace(parts[0], rows=sum(part.rows for part in parts), order=None, shard=None, slices=tuple(slices)))
    ]


def _in_parts(target: Target, parts: tuple[str, ...]) -> list[tuple[str, Target]]:
    if target.shard is not None or len(parts) != 2:
        return []  # a rank's spans are of the undivided matrix, and q, k and v differ in rows
    each = target.rows // 2
    return [(part, replace(target, rows=each, first=target.first + index * each)) for index, part in enumerate(parts)]
