"""Jet-Nemotron's reference (``tests.support.jet_nemotron``) against numbers of the released code.

transformers has no class of this family, so the oracle suites compare with that reference. Its own proof is
here: logits of NVIDIA's code (``modeling_jet_nemotron.py``, transformers 4.51, float32) from a checkpoint of
sines, which any machine makes alike. Of that code three kernels for GPUs were replaced: the convolution by
its own form in torch, the delta rule by the recurrence of the flash-linear-attention library, the gated norm
by its formula.
"""

from __future__ import annotations

import torch

from tests.support.jet_nemotron import JetNemotronConfig, JetNemotronForCausalLM
from tests.support.naive_model import sine_of_places

CONFIG = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 40, "layer_types": ["jet", "swa", "attn"], "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "efficient_attention_config": {
        "swa": {"window_size": 9}, "jet": {
            "conv_size": 4, "dconv_generator_reduction": 8, "expand_v": 2.6666666667, "head_dim": 24,
            "num_heads": 2, "norm_eps": "1e-3"}}}  # fmt: skip
TOKENS = [(7 * place * place + 3 * place + 1) % 40 for place in range(24)]


def patterned() -> JetNemotronForCausalLM:
    """Every weight is a sine of its place; rows of matrices as small as their widths ask."""
    model = JetNemotronForCausalLM(JetNemotronConfig(**CONFIG)).eval()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
            wave = sine_of_places(parameter, number)
            if parameter.ndim == 2:
                wave = wave * (2 / parameter.shape[1]) ** 0.5
            elif name.endswith("norm.weight"):
                wave = 1 + 0.3 * wave
            elif name.endswith("A_log"):
                wave = wave - 2
            parameter.copy_(wave)
    return model


PUBLISHED = [
    [-0.1835, -0.04134, -0.13113, 1.87645, -0.36004, 1.72818],
    [0.18738, 0.41616, -1.68903, -1.15356, 0.24291, 0.31128],
    [-1.29162, -0.95614, -1.38787, 0.62759, -0.35463, 0.52504],
    [1.25535, 1.76886, -0.17715, 0.63483, 0.9989, -1.80279],
]
"""Of tokens 0, 1, 5 and 23: the first six logits."""
TOLERANCE = 5e-5


def distance(model: JetNemotronForCausalLM) -> float:
    logits = model(torch.tensor([TOKENS])).logits
    assert logits is not None
    return float((logits[0, [0, 1, 5, -1], :6] - torch.tensor(PUBLISHED)).abs().max())


@torch.inference_mode()
def test_the_reference_computes_what_the_released_code_does() -> None:
    model = patterned()
    assert distance(model) < TOLERANCE
    for name, parameter in model.named_parameters():  # the control: all of them take part
        held = parameter.clone()
        parameter.copy_(held.flatten().roll(1).view(held.shape))
        assert distance(model) > 2 * TOLERANCE, name
        parameter.copy_(held)
    assert distance(model) < TOLERANCE
