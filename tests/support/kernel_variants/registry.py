"""Kernel modules of weft -> their variants."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.kernel_variants import attention, dense, recurrent, step
from tests.support.kernel_variants.compilation import Compilation

VARIANTS: dict[str, Callable[[], list[Compilation]]] = {
    "weft.tensor.kernels.paged_attention": attention.of_paged_attention,
    "weft.tensor.kernels.latent_attention": attention.of_latent_attention,
    "weft.tensor.kernels.window_attention": attention.of_window_attention,
    "weft.tensor.kernels.attention_layer": attention.of_attention_layer,
    "weft.tensor.kernels.write_kv": attention.of_write_kv,
    "weft.tensor.gpu.decode_kernels": attention.of_decode_kernels,
    "weft.tensor.kernels.delta_rule": recurrent.of_delta_rule,
    "weft.tensor.kernels.delta_gates": recurrent.of_delta_gates,
    "weft.tensor.kernels.conv_and_gates": recurrent.of_conv_and_gates,
    "weft.tensor.kernels.wkv7": recurrent.of_wkv7,
    "weft.tensor.kernels.mamba1": recurrent.of_mamba1,
    "weft.tensor.kernels.mamba2": recurrent.of_mamba2,
    "weft.tensor.kernels.running_max": recurrent.of_running_max,
    "weft.tensor.kernels.causal_conv": recurrent.of_causal_conv,
    "weft.tensor.kernels.norm": dense.of_norm,
    "weft.tensor.kernels.elementwise": dense.of_elementwise,
    "weft.tensor.kernels.quantized_linear": dense.of_quantized_linear,
    "weft.tensor.kernels.byte_inputs": dense.of_byte_inputs,
    "weft.tensor.kernels.moe": dense.of_moe,
    "weft.tensor.kernels.adapters": dense.of_adapters,
    "weft.tensor.kernels.expert_choice": dense.of_expert_choice,
    "weft.runner.arena_kernels": step.of_arena_kernels,
    "weft.runner.compressed_kv_kernels": step.of_compressed_kv_kernels,
    "weft.runner.sampling_kernels": step.of_sampling_kernels,
}
