"""The head for multi-token prediction: it sees one token more than the trunk, and never the future."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from train.checkpoint import export, load, load_mtp, save_mtp
from train.model import FULL, LINEAR, Model, Shape
from train.mtp import MtpHead, drafts, loss_of
from train.tokenizer import VOCAB_SIZE, train_tokenizer
from weft.models.checkpoint_files import DRAFT_PREFIXES

SMALL = Shape(VOCAB_SIZE, (LINEAR, FULL), 32, 48, 2, 4, 8, 8, head_dim=16)


def test_a_draft_depends_on_one_token_more_than_the_trunk_and_on_no_later_one() -> None:
    torch.manual_seed(1)
    model, head = Model(SMALL).eval(), MtpHead(SMALL).eval()
    tokens = torch.randint(3, VOCAB_SIZE, (1, 40))
    with torch.no_grad():
        before = drafts(model, head, tokens)
        changed = tokens.clone()
        changed[0, 20] = (changed[0, 20] + 1) % VOCAB_SIZE
        after = drafts(model, head, changed)
    for number, (ours, theirs) in enumerate(zip(before, after, strict=True), start=1):
        same = (ours - theirs).abs().amax(-1)[0] < 1e-6
        assert bool(same[: 20 - number].all())
        assert not bool(same[20 - number])


def test_the_trunk_stays_frozen_and_the_head_learns() -> None:
    torch.manual_seed(2)
    model, head = Model(SMALL), MtpHead(SMALL)
    model.requires_grad_(False)
    tokens = torch.randint(3, VOCAB_SIZE, (2, 64))
    loss_of(model, head, tokens, torch.ones(2, 64)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in head.parameters())


def test_a_checkpoint_with_a_head_loads_as_one_without(tmp_path: Path) -> None:
    torch.manual_seed(3)
    export(Model(SMALL), train_tokenizer(1), tmp_path, 512)
    before, _ = load(tmp_path)
    head = MtpHead(SMALL)
    save_mtp(head, tmp_path)
    again = MtpHead(SMALL)
    load_mtp(again, tmp_path)
    for name, value in head.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, atol=1e-2, rtol=1e-2)
    after, _ = load(tmp_path)
    tokens = torch.randint(3, VOCAB_SIZE, (1, 32))
    with torch.no_grad():
        ours = after(tokens, dtype=torch.float32)
        assert torch.equal(ours, before(tokens, dtype=torch.float32))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_the_names_are_those_of_the_public_checkpoints() -> None:
    names = {f"mtp.{name}" for name in MtpHead(SMALL).state_dict()}
    assert all(name.startswith(DRAFT_PREFIXES) for name in names)
    attention = {f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    mlp = {f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")}
    layer = {"input_layernorm", "post_attention_layernorm", *attention, *mlp}
    around = {"fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"}
    assert names == {f"mtp.{n}.weight" for n in {*around, *(f"layers.0.{part}" for part in layer)}}
