"""RWKV-7's reference (``tests.support.rwkv7_reference``) against numbers of the published code.

transformers has no class of this family, so the oracle suites compare with that reference. Its own proof is
here: logits that the package ``rwkv`` 0.8.32 (BlinkDL) computes in float32 from a checkpoint of sines, which
any machine makes alike. There the checkpoint
has that package's names.
"""

from __future__ import annotations

import torch

from tests.support.naive_model import sine_of_places
from tests.support.rwkv7_reference import Rwkv7Config, Rwkv7ForCausalLM

CONFIG = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "intermediate_size": 192,
    "vocab_size": 40,
    "decay_low_rank_dim": 16,
    "a_low_rank_dim": 12,
    "gate_low_rank_dim": 20,
    "v_low_rank_dim": 8,
}
TOKENS = [(7 * place * place + 3 * place + 1) % 40 for place in range(24)]


def patterned() -> Rwkv7ForCausalLM:
    """Every weight is a sine of its place; rows of matrices as small as their widths ask."""
    model = Rwkv7ForCausalLM(Rwkv7Config(**CONFIG)).eval()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
            wave = sine_of_places(parameter, number)
            if parameter.ndim == 2 and not name.endswith("r_k"):
                wave = wave * (2 / parameter.shape[1]) ** 0.5
            elif ".x_" in name:
                wave = 0.5 + 0.5 * wave
            elif name.endswith(("norm.weight", "k_k", "k_a")):
                wave = 1 + 0.3 * wave
            parameter.copy_(wave)
    return model


PUBLISHED = [
    [0.88932, -5.03669, 0.17563, 0.74372, -0.09973, 1.44111],
    [1.09311, -0.63453, -0.00234, -0.3721, -0.04022, 2.14925],
    [-1.08793, -0.50681, -1.24419, 1.18227, -0.20114, -0.15564],
    [-2.00487, -0.08198, -0.65469, 0.76977, 0.24676, 0.16497],
]
"""Of tokens 0, 1, 5 and 23: the first six logits."""
TOLERANCE = 5e-5


def distance(model: Rwkv7ForCausalLM) -> float:
    logits = model(torch.tensor([TOKENS])).logits[0]
    return float((logits[[0, 1, 5, -1], :6] - torch.tensor(PUBLISHED)).abs().max())


@torch.inference_mode()
def test_the_reference_computes_what_the_published_code_does() -> None:
    model = patterned()
    assert distance(model) < TOLERANCE
    for name, parameter in model.named_parameters():  # the control: all of them take part
        held = parameter.clone()
        parameter.copy_(held.flatten().roll(1).view(held.shape))
        assert distance(model) > 2 * TOLERANCE, name
        parameter.copy_(held)
    assert distance(model) < TOLERANCE
