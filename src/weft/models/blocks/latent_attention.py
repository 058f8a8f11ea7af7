"""Multi-head latent attention, absorbed: heads meet the cached latents and make no keys or values of them.

    x_TD --query--> q = [ own | shared ] per head          x_TD --latent--> [ latent | shared key ]
                     |                                                   norm |
        q_own W_k^T  (into the latent's space)                              pages (all that is cached)
                     +--- latent_attention ---> o in the latent's space --W_v--> value per head --out--> y_TD

    q_own . (W_k c) = (W_k^T q_own) . c         sum_s p_s (W_v c_s) = W_v sum_s p_s c_s

Source: DeepSeek-V2 (2024), section 2.1; without positions as transformers ``KimiLinearAttention``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.families.architecture import LatentAttention
from weft.models.blocks.attention import CosSin
from weft.models.blocks.linear import Linear, Norm, Projection, by_head
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.latent_attention import latent_attention


@dataclass(slots=True)
class LatentAttentionBlock:
    """``latent``: rows latent, shared key; with a query bottleneck in front of them the bottleneck's rows,
    and then ``query`` reads its norm, ``query_norm``. ``keys_HOC`` [heads, own, latent] and ``values_HVC``
    [heads, value, latent] make a head's keys and values of a latent."""

    shape: LatentAttention
    query: Projection
    latent: Projection
    latent_norm: Norm
    keys_HOC: torch.Tensor
    values_HVC: torch.Tensor
    out: Linear
    query_norm: Norm | None = None

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache,
                 cos_sin: CosSin | None) -> torch.Tensor:
        assert cache.k is not None, "a latent attention layer without pages"
        shape = self.shape
        bottleneck, latent_TC, shared_TS = torch.split(
            self.latent(x_TD), [shape.query_rank or 0, shape.latent_dim, shape.shared_dim], dim=-1)
        q_TC = self.query(x_TD if self.query_norm is None else self.query_norm(bottleneck))
        q_THK = by_head(q_TC, shape.heads)
        own_THO, shared_THS = torch.split(q_THK, [shape.own_dim, shape.shared_dim], dim=-1)
        q_THW = torch.cat((torch.einsum("tho,hoc->thc", own_THO, self.keys_HOC), shared_THS), dim=-1)
        row_TW = torch.cat((self.latent_norm(latent_TC), shared_TS), dim=-1)
        scale = None if cache.head_scales is None else cache.head_scales[0, 0]
        if scale is not None:
            # Powers of two: the row is divided by its scale, and queries and outputs are multiplied, exactly.
            q_THW, row_TW = q_THW * scale, row_TW / scale
        o_THC = latent_attention(q_THW, row_TW, cache.k, inputs.positions_T, inputs.runs, shape.scale,
                                 shape.latent_dim, cache.token_scales)
        if scale is not None:
            o_THC = o_THC * scale
        return self.out(torch.einsum("thc,hvc->thv", inputs.asked_of(o_THC), self.values_HVC).flatten(1))
