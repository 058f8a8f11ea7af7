"""Kimi K3 and AliceAI from their formulas, token by token, as models of transformers, which has no class for them.

    config = AutoConfig.for_model("kimi_k3", ...)
    model = AutoModelForCausalLM.from_config(config)          once this module is imported

Names of parameters are those of the releases. Nothing is cached, and nothing is fast.

    Kimi delta    S <- Diag(decay) S;  S <- S + beta k (v - S^T k)^T;  y = out(norm(S^T q / sqrt(D)) sigmoid(gate))
                  decay = exp(-exp(A) softplus(f + dt)), or with a floor exp(floor sigmoid(exp(A) (f + dt)))
    residuals     a block reads softmax(w . norm(s)) of the sums s: the embedding, each complete group of layers, and
                  the group so far. The first block of a group ends the group before it.
    situ          b tanh(gate / b) sigmoid(gate) * c tanh(up / c)

Sources, read for their formulas: mlx-lm 0.32.2's ``kimi_k3.py``, vLLM 0.33's ``alice_ai.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.support.ling_2_5 import LatentAttention, RmsNorm, Router, turned
from tests.support.naive_model import NaiveModel, register


class KimiK3Config(transformers.PreTrainedConfig):
    model_type = "kimi_k3"


class AliceAIConfig(transformers.PreTrainedConfig):
    model_type = "alice_ai"


class OffsetNorm(RmsNorm):
    """Norm whose stored weight is the distance from 1."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * (1 + self.weight)


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


class Convolution(nn.Module):
    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1, kernel))

    def forward(self, x_TC: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x_TC.T[None], (self.weight.shape[-1] - 1, 0))
        return F.silu(F.conv1d(padded, self.weight, groups=len(self.weight)))[0].T


class KimiDelta(nn.Module):
    """Kimi delta attention. ``wide``: the output gate has no bottleneck. ``padding``: rows after the decays."""

    def __init__(
        self, hidden: int, heads: int, dim: int, kernel: int, eps: float, *, log: str = "A_log", wide: bool = False,
        floor: float | None = None, padding: int = 0
    ) -> None:  # fmt: skip
        super().__init__()
        width = heads * dim
        self.heads, self.dim, self.floor, self.log = heads, dim, floor, log
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, width, bias=False) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (Convolution(width, kernel) for _ in range(3))
        self.f_a_proj, self.f_b_proj = nn.Linear(hidden, dim, bias=False), nn.Linear(dim, width, bias=False)
        self.b_proj = nn.Linear(hidden, heads, bias=False)
        if wide:
            self.g_proj = nn.Linear(hidden, width, bias=False)
        else:
            self.g_a_proj, self.g_b_proj = nn.Linear(hidden, dim, bias=False), nn.Linear(dim, width, bias=False)
        self.register_parameter(log, nn.Parameter(torch.zeros(heads + padding)))
        self.dt_bias = nn.Parameter(torch.zeros(width))
        self.o_norm, self.o_proj = RmsNorm(dim, eps), nn.Linear(width, hidden, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        shape = (len(x_TD), self.heads, self.dim)
        q, k, v = (
            conv(project(x_TD)).view(shape)
            for project, conv in (
                (self.q_proj, self.q_conv1d), (self.k_proj, self.k_conv1d), (self.v_proj, self.v_conv1d))
        )  # fmt: skip
        q, k = unit(q) * self.dim**-0.5, unit(k)
        rates = getattr(self, self.log)[: self.heads].exp()[:, None]
        steps = (self.f_b_proj(self.f_a_proj(x_TD)) + self.dt_bias).view(shape)
        decays = -rates * F.softplus(steps) if self.floor is None else self.floor * torch.sigmoid(rates * steps)
        betas, state, read = torch.sigmoid(self.b_proj(x_TD)), x_TD.new_zeros(self.heads, self.dim, self.dim), []
        for t in range(len(x_TD)):
            state = state * decays[t].exp()[..., None]
            wrong = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t] * betas[t, :, None], wrong)
            read.append(torch.einsum("hkv,hk->hv", state, q[t]))
        gate = self.g_proj(x_TD) if hasattr(self, "g_proj") else self.g_b_proj(self.g_a_proj(x_TD))
        return self.o_proj((self.o_norm(torch.stack(read)) * torch.sigmoid(gate.view(shape))).flatten(1))


class UnturnedLatent(LatentAttention):
    """Latent attention without positions, with a gate for each number of its output."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.dense
        width = config.num_attention_heads * config.v_head_dim
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        if config.mla_use_output_gate:
            self.g_proj = nn.Linear(config.hidden_size, width, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        config, tokens, heads = self.config, len(x_TD), self.config.num_attention_heads
        asked = (
            self.q_proj(x_TD) if config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))
        )
        q_THK = asked.view(tokens, heads, -1)
        latent, shared = self.kv_a_proj_with_mqa(x_TD).split([config.kv_lora_rank, self.shared], dim=-1)
        made = self.kv_b_proj(self.kv_a_layernorm(latent)).view(tokens, heads, -1)
        own, v = made.split([self.own, self.value], dim=-1)
        k_THK = torch.cat((own, shared[:, None].expand(-1, heads, -1)), -1)
        o_TC = attended(q_THK, k_THK, v).flatten(1)
        return self.o_proj(o_TC * torch.sigmoid(self.g_proj(x_TD)) if config.mla_use_output_gate else o_TC)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


class GatedAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, dim = config, config.head_dim
        heads, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
        self.q_proj = nn.Linear(config.hidden_size, 2 * heads, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(config.hidden_size, kv, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (OffsetNorm(dim, config.rms_norm_eps) for _ in range(2))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        config, tokens = self.config, len(x_TD)
        q, gate = self.q_proj(x_TD).view(tokens, -1, 2 * config.head_dim).chunk(2, -1)
        k, v = (project(x_TD).view(tokens, -1, config.head_dim) for project in (self.k_proj, self.v_proj))
        q, k = self._turned(self.q_norm(q)), self._turned(self.k_norm(k))
        each = q.shape[1] // k.shape[1]
        o_THD = attended(q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1))
        return self.o_proj((o_THD * torch.sigmoid(gate)).flatten(1))

    def _turned(self, x_THD: torch.Tensor) -> torch.Tensor:
        part = int(self.config.head_dim * self.config.partial_rotary_factor)
        first = turned(x_THD[..., :part], len(x_THD), self.config.rope_theta, neighbours=False)
        return torch.cat((first, x_THD[..., part:]), dim=-1)


class FeedForward(nn.Module):
    """Feed-forward. ``caps``: of situ; None for silu. ``names``: of gate, up and down."""

    def __init__(
        self, hidden: int, width: int, caps: tuple[float, float | None] | None,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> None:  # fmt: skip
        super().__init__()
        self.caps, self.names = caps, names
        for name in names[:2]:
            setattr(self, name, nn.Linear(hidden, width, bias=False))
        setattr(self, names[2], nn.Linear(width, hidden, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(activated(gate(x), up(x), self.caps))


def activated(gate: torch.Tensor, up: torch.Tensor, caps: tuple[float, float | None] | None) -> torch.Tensor:
    if caps is None:
        return F.silu(gate) * up
    most, most_up = caps
    up = up if most_up is None else most_up * torch.tanh(up / most_up)
    return most * torch.tanh(gate / most) * torch.sigmoid(gate) * up


class Experts(nn.Module):
    """Experts of Kimi K3."""

    def __init__(self, config: Any, caps: tuple[float, float | None]) -> None:
        super().__init__()
        self.config, hidden, width = config, config.hidden_size, config.moe_intermediate_size
        latent, names = config.routed_expert_hidden_size, ("w1", "w3", "w2")
        self.experts = nn.ModuleList(
            FeedForward(latent or hidden, width, caps, names) for _ in range(config.num_experts)
        )
        self.gate = Router(config.num_experts, hidden, "e_score_correction_bias")
        self.shared_experts = FeedForward(hidden, width * config.num_shared_experts, caps)
        if latent is not None:
            self.routed_expert_down_proj = nn.Linear(hidden, latent, bias=False)
            self.routed_expert_up_proj = nn.Linear(latent, hidden, bias=False)
            if config.latent_moe_use_norm:
                self.routed_expert_norm = RmsNorm(latent, config.rms_norm_eps)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        config, narrow = self.config, hasattr(self, "routed_expert_down_proj")
        seen = self.routed_expert_down_proj(x_TD) if narrow else x_TD
        scores_TE = torch.sigmoid(x_TD @ self.gate.weight.T)
        y = weighed(self.experts, seen, scores_TE, self.gate.e_score_correction_bias, config.num_experts_per_token,
                    normalized=config.moe_renormalize, scale=config.routed_scaling_factor)  # fmt: skip
        y = self.routed_expert_norm(y) if hasattr(self, "routed_expert_norm") else y
        return (self.routed_expert_up_proj(y) if narrow else y) + self.shared_experts(x_TD)


def weighed(
    experts: nn.ModuleList, x: torch.Tensor, scores_TE: torch.Tensor, bias: torch.Tensor, count: int, *,
    normalized: bool, scale: float
) -> torch.Tensor:  # fmt: skip
    """Return the sum of the chosen experts' outputs: those of the largest scores with the bias, which weights lack."""
    chosen_TK = (scores_TE + bias).topk(count).indices
    weights_TK = scores_TE.gather(1, chosen_TK)
    weights_TK = scale * (weights_TK / weights_TK.sum(-1, keepdim=True) if normalized else weights_TK)
    y = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        tokens, places = (chosen_TK == number).nonzero(as_tuple=True)
        y = y.index_add(0, tokens, expert(x[tokens]) * weights_TK[tokens, places, None])
    return y


class GatedShared(nn.Module):
    """Experts of AliceAI."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden_size
        self.experts = nn.ModuleList(
            FeedForward(hidden, config.moe_intermediate_size, None) for _ in range(config.num_experts)
        )
        self.gate = Router(config.num_experts, hidden, "e_score_correction_bias")
        self.shared_expert = FeedForward(hidden, config.shared_expert_intermediate_size, None)
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        scores_TE = torch.sigmoid(x_TD @ self.gate.weight.T)
        y_TD = weighed(self.experts, x_TD, scores_TE, self.gate.e_score_correction_bias,
                       self.config.num_experts_per_tok, normalized=self.config.norm_topk_prob, scale=1.0)  # fmt: skip
        return y_TD + torch.sigmoid(self.shared_expert_gate(x_TD)) * self.shared_expert(x_TD)


def seen(sums: list[torch.Tensor], query: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return what a block reads of ``sums``."""
    stacked = torch.stack(sums)
    keys = stacked / (stacked.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return ((keys @ query.flatten()).softmax(0)[..., None] * stacked).sum(0)


class K3Layer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer, self.config, linear, hidden = layer, config, config.linear_attn_config, config.hidden_size
        caps = config.activation_situ_beta, config.activation_situ_linear_beta
        self.self_attn = (
            KimiDelta(hidden, linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"],
                      config.rms_norm_eps, wide=linear["use_full_rank_gate"], floor=linear["gate_lower_bound"],
                      padding=3)
            if layer + 1 in linear["kda_layers"] else UnturnedLatent(config)
        )  # fmt: skip
        if layer < config.first_k_dense_replace:
            self.mlp = FeedForward(hidden, config.intermediate_size, caps)
        else:
            self.block_sparse_moe = Experts(config, caps)
        self.input_layernorm, self.post_attention_layernorm = (RmsNorm(hidden, config.rms_norm_eps) for _ in range(2))
        if config.attn_res_block_size is not None:
            for name in ("self_attention_res", "mlp_res"):
                setattr(self, f"{name}_proj", nn.Linear(hidden, 1, bias=False))
                setattr(self, f"{name}_norm", RmsNorm(hidden, config.rms_norm_eps))

    def read(self, sums: list[torch.Tensor], name: str) -> torch.Tensor:
        query, norm = getattr(self, f"{name}_proj").weight, getattr(self, f"{name}_norm")
        return seen(sums, query, norm.weight, norm.eps)

    def mix(self, sums: list[torch.Tensor]) -> torch.Tensor:
        return self.self_attn(self.input_layernorm(self.read(sums, "self_attention_res")))

    def feed(self, sums: list[torch.Tensor]) -> torch.Tensor:
        block = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        return block(self.post_attention_layernorm(self.read(sums, "mlp_res")))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the stream of a model without attention residuals."""
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD))
        block = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        return x_TD + block(self.post_attention_layernorm(x_TD))


class AliceLayer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer, hidden, eps = layer, config.hidden_size, config.rms_norm_eps
        if config.layer_types[layer] == "linear_attention":
            self.linear_attn = KimiDelta(
                hidden, config.linear_num_key_heads, config.linear_key_head_dim, config.linear_conv_kernel_dim, eps,
                log="a_log_bias")  # fmt: skip
        else:
            self.self_attn = GatedAttention(config)
        self.mlp = GatedShared(config)
        self.input_layernorm, self.post_attention_layernorm = (OffsetNorm(hidden, eps) for _ in range(2))
        for name in ("attn_res", "mlp_res")[not layer :]:
            setattr(self, f"{name}_proj", nn.Linear(hidden, 1, bias=False))
            setattr(self, f"{name}_norm_weight", nn.Parameter(torch.ones(hidden)))
        self.eps = eps

    def read(self, sums: list[torch.Tensor], name: str) -> torch.Tensor:
        query, weight = getattr(self, f"{name}_proj").weight, getattr(self, f"{name}_norm_weight")
        return seen(sums, query, weight, self.eps)

    def mix(self, sums: list[torch.Tensor]) -> torch.Tensor:
        block = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
        return block(self.input_layernorm(self.read(sums, "attn_res") if self.layer else sums[0]))

    def feed(self, sums: list[torch.Tensor]) -> torch.Tensor:
        return self.mlp(self.post_attention_layernorm(self.read(sums, "mlp_res")))


def last_sums(layers: nn.ModuleList, x_TD: torch.Tensor, every: int) -> list[torch.Tensor]:
    """Return the sums after all layers, ``every`` of which are a group."""
    complete: list[torch.Tensor] = []
    for number, layer in enumerate(layers):
        mixed = layer.mix([*complete, x_TD])
        if number % every == 0:
            complete.append(x_TD)
        x_TD = mixed if number % every == 0 else x_TD + mixed
        x_TD = x_TD + layer.feed([*complete, x_TD])
    return [*complete, x_TD]


class K3Trunk(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(K3Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        if config.attn_res_block_size is not None:
            self.output_attn_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
            self.output_attn_res_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class KimiK3ForCausalLM(NaiveModel):
    config_class, trunk = KimiK3Config, K3Trunk

    def stream(self, x_TD: torch.Tensor) -> torch.Tensor:
        model, every = self.model, self.config.attn_res_block_size
        if every is None:
            return super().stream(x_TD)
        norm = model.output_attn_res_norm
        return seen(last_sums(model.layers, x_TD, every), model.output_attn_res_proj.weight, norm.weight, norm.eps)


class LastQuery(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.res_proj = nn.Linear(hidden, 1, bias=False)
        self.res_norm_weight = nn.Parameter(torch.ones(hidden))


class AliceTrunk(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(AliceLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = OffsetNorm(config.hidden_size, config.rms_norm_eps)
        self.attnres_final = LastQuery(config.hidden_size)


class AliceAIForCausalLM(NaiveModel):
    config_class, trunk = AliceAIConfig, AliceTrunk

    def stream(self, x_TD: torch.Tensor) -> torch.Tensor:
        last, config = self.model.attnres_final, self.config
        sums = last_sums(self.model.layers, x_TD, config.block_attn_res_block_size)
        return seen(sums, last.res_proj.weight, last.res_norm_weight, config.rms_norm_eps)


register(KimiK3Config, KimiK3ForCausalLM)
register(AliceAIConfig, AliceAIForCausalLM)
