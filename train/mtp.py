"""The head for multi-token prediction: it reads the trunk's last hidden state and one more token.

    hidden of t (after the trunk's last norm)  -> norm \\
    embedding of token t + 1                   -> norm -> join -> fc -> attention layer -> norm -> token t + 2

The layout and the names are those of the public Qwen3.5 checkpoints (`mtp.*`); embedding and output matrix
are the trunk's. The hidden state comes after the trunk's last norm. A second draft reads the head's own
output after `mtp.norm` in its place. That is how vLLM runs these heads.

The trunk is frozen, so no answer changes. Two drafts in a row are trained: the loss of the second one counts
a half. At the second draft, training reads the head's output at every earlier position too. A server has the
trunk's hidden states there, so the measured second acceptance is an estimate.

    python -m train.mtp                                      # trains the head of the embedded model
    python -m train.mtp --score src/weft/embedded/weft-recall
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.batches import Chats, make_batch, skills_episode
from train.checkpoint import load, load_mtp, save_mtp
from train.model import CHUNK, FULL, Corruption, Layer, Model, Norm, Projection, Shape, linear, rotary_tables
from train.muon import Float32Muon
from train.native import keep_freed_memory, round_in_kernels
from train.run import EMBEDDED
from weft_tools.eval.facts import make_facts_episodes
from weft_tools.eval.recall import make_episodes
from weft_tools.eval.tool_calls import make_tools_episodes

STEPS, WARM_UP, RATE, DECAY_SHARE = 300, 20, 3e-3, 0.5
LENGTHS = ((256, 0.3), (512, 0.3), (1024, 0.25), (2048, 0.15))
BATCH_TOKENS = 4096
SECOND_DRAFT = 0.5
SEED = 20


class MtpHead(nn.Module):
    """One attention layer over the joined inputs."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = replace(shape, layer_types=(FULL,))
        hidden = shape.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(hidden), Norm(hidden)
        self.fc = Projection(hidden, 2 * hidden)
        self.layers = nn.ModuleList([Layer(self.shape, 0)])
        self.norm = Norm(hidden)

    def forward(self, hidden_BLD: Tensor, embedded_BLD: Tensor) -> Tensor:
        """The hidden states from which token t + 2 is predicted, and which the next draft reads."""
        embedded = self.pre_fc_norm_embedding(embedded_BLD, torch.float32)
        hidden = self.pre_fc_norm_hidden(hidden_BLD, torch.float32)
        joined = self.fc(torch.cat([embedded, hidden], -1))
        rotary = rotary_tables(self.shape, joined.shape[1], torch.float32)
        return self.norm(self.layers[0](joined, rotary, torch.float32, Corruption()), torch.float32)


@torch.no_grad()
def trunk_hidden(model: Model, tokens_BL: Tensor) -> Tensor:
    """The trunk's hidden states after its last norm."""
    padded = F.pad(tokens_BL, (0, -tokens_BL.shape[1] % CHUNK))
    rotary = rotary_tables(model.shape, padded.shape[1], torch.float32)
    x = F.embedding(padded, model.embed_tokens.weight)
    for layer in model.layers:
        x = layer(x, rotary, torch.float32, Corruption())
    return model.norm(x, torch.float32)[:, : tokens_BL.shape[1]]


def drafts(model: Model, head: MtpHead, tokens_BL: Tensor, count: int = 2) -> list[Tensor]:
    """For each draft the hidden states at t: of draft n they predict token t + 1 + n."""
    hidden = trunk_hidden(model, tokens_BL)
    embedded = F.embedding(tokens_BL, model.embed_tokens.weight).detach()
    predicted = []
    for number in range(1, count + 1):
        shifted = F.pad(embedded[:, number:], (0, 0, 0, number))
        hidden = head(hidden, shifted)
        predicted.append(hidden)
    return predicted


def loss_of(model: Model, head: MtpHead, tokens_BL: Tensor, weights_BL: Tensor) -> Tensor:
    """Cross entropy of both drafts; `weights_BL` are those of the tokens themselves."""
    table, losses = model.embed_tokens.weight.detach(), []
    for number, hidden in enumerate(drafts(model, head, tokens_BL), start=1):
        targets, weights = tokens_BL[:, number + 1 :], weights_BL[:, number + 1 :]
        wanted = (weights >= SECOND_DRAFT / 10).flatten().nonzero()[:, 0]
        states = hidden[:, : targets.shape[1]].reshape(-1, hidden.shape[-1])[wanted]
        loss = F.cross_entropy(linear(states, table), targets.flatten()[wanted], reduction="none")
        chosen = weights.flatten()[wanted]
        losses.append((loss * chosen).sum() / chosen.sum() * (1.0 if number == 1 else SECOND_DRAFT))
    return torch.stack(losses).sum()


def train(directory: Path, log: Path, steps: int) -> None:
    torch.manual_seed(SEED)
    model, tokenizer = load(directory)
    model.requires_grad_(False)
    chats, rng = Chats(tokenizer), random.Random(f"mtp {SEED}")
    head = MtpHead(model.shape)
    matrices = [p for p in head.parameters() if p.dim() == 2]
    optimisers: list[torch.optim.Optimizer] = [
        Float32Muon(matrices, RATE),
        torch.optim.AdamW([p for p in head.parameters() if p.dim() == 1], lr=RATE, weight_decay=0.0),
    ]
    log.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with (log / "log.jsonl").open("w") as lines:
        for step in range(steps):
            length = rng.choices([n for n, _ in LENGTHS], [share for _, share in LENGTHS])[0]
            batch = make_batch(chats, skills_episode, rng, BATCH_TOKENS // length, length)
            weights = F.pad(batch.weights_BL[:, :-1], (1, 0))  # of the tokens, not of the targets
            loss = loss_of(model, head, batch.tokens_BL, weights)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            rate = RATE * min(1.0, (step + 1) / WARM_UP) * min(1.0, (steps - step) / (steps * DECAY_SHARE))
            for optimiser in optimisers:
                for group in optimiser.param_groups:
                    group["lr"] = rate
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
            line = {"step": step + 1, "length": length, "loss": round(loss.item(), 4)}
            lines.write(json.dumps(line | {"seconds": round(time.monotonic() - started, 1)}) + "\n")
            lines.flush()
            if (step + 1) % 100 == 0:
                torch.save(head.state_dict(), log / "head.pt")
    save_mtp(head, directory)


@torch.no_grad()
def acceptance(model: Model, head: MtpHead, chats: Chats, skill: str, length: int, rows: int = 24) -> list[float]:
    """The share of scored answers' tokens that draft 1, and draft 2 behind a right draft 1, has right."""
    make = {"recall": make_episodes, "tools": make_tools_episodes, "json": make_facts_episodes}[skill]
    right, asked = [0, 0], [0, 0]
    for episode in make(1, length, rows, chats.count):
        ids, _, answers = chats.rows(episode)
        tokens = torch.tensor([ids])
        table, before = model.embed_tokens.weight, torch.ones(0)
        for number, hidden in enumerate(drafts(model, head, tokens), start=1):
            best = linear(hidden[0, : len(ids) - number - 1], table).argmax(-1)
            hits = best == tokens[0, number + 1 :]
            counted = torch.tensor(answers)[number + 1 :] >= 0
            if number == 2:
                counted &= before[: len(counted)]  # draft 1 at the same position was right
            right[number - 1] += int((hits & counted).sum())
            asked[number - 1] += int(counted.sum())
            before = hits
    return [good / max(1, all_of_them) for good, all_of_them in zip(right, asked, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.mtp", description=__doc__.splitlines()[0])
    parser.add_argument("--score", type=Path, help="measure the head of this checkpoint instead of training")
    parser.add_argument("--directory", type=Path, default=EMBEDDED)
    parser.add_argument("--log", type=Path, default=Path("train_runs") / "mtp")
    parser.add_argument("--steps", type=int, default=STEPS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if chosen.score is None:
        round_in_kernels(True)
        train(chosen.directory, chosen.log, chosen.steps)
    directory = chosen.score or chosen.directory
    round_in_kernels(False)
    model, tokenizer = load(directory)
    head = MtpHead(model.shape)
    load_mtp(head, directory)
    for skill, length in (("recall", 512), ("recall", 2048), ("tools", 512), ("json", 512)):
        first, second = acceptance(model, head, Chats(tokenizer), skill, length)
        tokens = 1 + first + first * second
        print(
            f"{skill:7} {length:5} tokens  draft 1 {first:6.1%}  draft 2 {second:6.1%}  "
            f"tokens per step {1 + first:.2f} with one draft, {tokens:.2f} with two",
            flush=True,
        )


if __name__ == "__main__":
    main()
