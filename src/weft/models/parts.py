"""Pieces that several families read from a checkpoint under the same names.

A family file says which block sits under which name; where two families agree on a name's meaning, the
reading of it is here once. All take a ``TensorSource`` and are run twice: against the check, then for real.
"""

from __future__ import annotations

from weft.architecture import Architecture, Attention, Experts
from weft.models.blocks.attention import AttentionBlock, separate_gate
from weft.models.blocks.experts import ExpertsBlock
from weft.models.blocks.linear import Linear, Norm, SwiGlu
from weft.models.decoder import CausalModel, DecoderLayer
from weft.models.weights import TensorSource


def model(architecture: Architecture, source: TensorSource, layers: list[DecoderLayer], *,
          final_norm: str = "norm.weight", plus_one: bool = False) -> CausalModel:
    """Embedding, final norm and head around ``layers``."""
    vocab, hidden = architecture.vocab_size, architecture.hidden_size
    embedding = source.tensor("embed_tokens.weight", vocab, hidden)
    head = embedding if architecture.tied_embeddings else source.head(vocab, hidden)
    norm = Norm(source.tensor(final_norm, hidden), architecture.norm_eps, plus_one)
    return CausalModel(architecture, embedding=embedding, layers=layers, final_norm=norm, head=Linear(head))


def attention(architecture: Architecture, source: TensorSource, shape: Attention, name: str, *,
              out: str = "o_proj", norms: tuple[str, str] = ("q_norm", "k_norm"),
              plus_one: bool = False) -> AttentionBlock:
    """``name``.{q,k,v}_proj fused into one projection, with the gate's rows moved behind the query's."""
    hidden, eps = architecture.hidden_size, architecture.norm_eps
    q_width = shape.heads * shape.head_dim
    q_rows = q_width * 2 if shape.gated else q_width
    kv_rows = shape.kv_heads * shape.head_dim
    widths = (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows))
    weight = source.rows([(f"{name}.{part}.weight", rows) for part, rows in widths], hidden)
    bias = source.rows([(f"{name}.{part}.bias", rows) for part, rows in widths]) if shape.bias else None
    if shape.gated:
        weight[:q_rows] = separate_gate(weight[:q_rows], shape.heads, shape.head_dim)
        if bias is not None:
            bias[:q_rows] = separate_gate(bias[:q_rows], shape.heads, shape.head_dim)
    out_bias = source.tensor(f"{name}.{out}.bias", hidden) if shape.bias else None
    block = AttentionBlock(shape, Linear(weight, bias),
                           Linear(source.tensor(f"{name}.{out}.weight", hidden, q_width), out_bias))
    if shape.qk_norm:
        block.q_norm, block.k_norm = (
            Norm(source.tensor(f"{name}.{norm}.weight", shape.head_dim), eps, plus_one) for norm in norms)
    return block


def swiglu(source: TensorSource, name: str, hidden: int, width: int, *,
           names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> SwiGlu:
    """``name``.{gate,up}_proj fused, and down_proj."""
    gate, up, down = names
    gate_up = source.rows([(f"{name}.{gate}.weight", width), (f"{name}.{up}.weight", width)], hidden)
    return SwiGlu(Linear(gate_up), Linear(source.tensor(f"{name}.{down}.weight", hidden, width)))


def qwen_experts(source: TensorSource, name: str, hidden: int, shape: Experts) -> ExpertsBlock:
    """Router, experts and gated shared expert of Qwen's sparse block.

    Hub releases store each expert by itself (``experts.3.gate_proj.weight``); transformers may save them
    as two tensors of all experts (``experts.gate_up_proj``). Both are read.
    """
    count, width = shape.count, shape.width
    if source.has(f"{name}.experts.gate_up_proj"):
        gate_up = source.tensor(f"{name}.experts.gate_up_proj", count, 2 * width, hidden)
        down = source.tensor(f"{name}.experts.down_proj", count, hidden, width)
    else:
        each = [f"{name}.experts.{expert}" for expert in range(count)]
        gate_up = source.stack([(f"{e}.gate_proj.weight", f"{e}.up_proj.weight") for e in each],
                               width, hidden)
        down = source.stack([(f"{e}.down_proj.weight",) for e in each], hidden, width)
    return ExpertsBlock(
        shape, Linear(source.tensor(f"{name}.gate.weight", count, hidden)), gate_up, down,
        shared=swiglu(source, f"{name}.shared_expert", hidden, shape.shared_width),
        shared_gate=Linear(source.tensor(f"{name}.shared_expert_gate.weight", 1, hidden)))
