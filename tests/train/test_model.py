"""The training model computes what the checkpoint format means, and the damage of the controls is real."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from train.checkpoint import export, load
from train.model import CHUNK, FULL, LINEAR, Model, Shape, chunked_delta_rule
from train.native import conv_heads, conv_heads_torch, unit_lower_inverse
from train.score import KV_CONTROLS, ROWS, STATE_CONTROLS, corruption
from train.tokenizer import VOCAB_SIZE, train_tokenizer

SMALL = Shape(VOCAB_SIZE, (LINEAR, FULL), 32, 48, 2, 4, 8, 8, head_dim=16)


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The delta rule as it is written on paper; q, k, v are [B, L, H, K]."""
    state = torch.zeros(q.shape[0], q.shape[2], k.shape[3], v.shape[3], dtype=q.dtype)
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        known = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - known))
        out[:, t] = torch.einsum("bhkv,bhk->bhv", state, q[:, t])
    return out


def test_the_chunked_delta_rule_equals_the_rule_token_by_token() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 2, 3 * CHUNK, 2, 8).unbind(0)
    k = torch.nn.functional.normalize(k, dim=-1)
    g, beta = -torch.rand(2, 3 * CHUNK, 2) * 0.2, torch.rand(2, 3 * CHUNK, 2)
    chunked = chunked_delta_rule(q, k, v, g, beta, None, 0)
    torch.testing.assert_close(chunked, token_by_token(q, k, v, g, beta), atol=2e-5, rtol=1e-4)


def test_the_compiled_convolution_equals_its_torch_twin_forward_and_backward() -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 9, 24).bfloat16().requires_grad_()
    weight = torch.randn(4, 24, requires_grad=True)
    grad = torch.randn(2, 9, 24).bfloat16()
    results = []
    for function in (conv_heads, conv_heads_torch):
        out = function(x, weight, 16, 8, 4, 0.5)
        results.append((out, *torch.autograd.grad(out, (x, weight), grad)))
    for ours, twin in zip(*results, strict=True):
        torch.testing.assert_close(ours, twin, atol=2e-2, rtol=1e-2)


def test_the_triangular_inverse_is_an_inverse_and_has_its_gradient() -> None:
    torch.manual_seed(3)
    lower = (0.2 * torch.randn(3, 16, 16)).tril(-1)
    exact = lower.clone().requires_grad_()
    fast = lower.clone().requires_grad_()
    product = unit_lower_inverse(exact, exact=True) @ (lower + torch.eye(16))
    torch.testing.assert_close(product, torch.eye(16).expand(3, 16, 16), atol=1e-4, rtol=1e-4)
    weight = torch.randn(3, 16, 16)
    (unit_lower_inverse(exact, exact=True) * weight).sum().backward()
    (unit_lower_inverse(fast).float() * weight).sum().backward()
    assert exact.grad is not None
    assert fast.grad is not None
    torch.testing.assert_close(fast.grad.tril(-1), exact.grad.tril(-1), atol=0.1, rtol=0.05)


def test_an_exported_model_has_the_same_logits_in_transformers(tmp_path: Path) -> None:
    torch.manual_seed(4)
    export(Model(SMALL), train_tokenizer(1), tmp_path, 512)
    ours, _ = load(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert next(theirs.parameters()).dtype == torch.float32
    tokens = torch.randint(3, VOCAB_SIZE, (2, 150))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens, dtype=torch.float32), theirs(tokens).logits, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("control", [*KV_CONTROLS, *STATE_CONTROLS])
def test_damage_changes_what_comes_after_it_and_nothing_before(control: str) -> None:
    torch.manual_seed(5)
    model = Model(SMALL).eval()
    tokens = torch.randint(3, VOCAB_SIZE, (ROWS, 3 * CHUNK))
    border = 2 * CHUNK
    with torch.no_grad():
        healthy = model(tokens, dtype=torch.float32)
        spoilt = model(tokens, dtype=torch.float32, spoil=corruption(control, border))
    assert not torch.allclose(healthy[:, border:], spoilt[:, border:], atol=1e-4)
    if control in STATE_CONTROLS:
        torch.testing.assert_close(healthy[:, :border], spoilt[:, :border])
