"""Trains a checkpoint from nothing: `python -m train.run recall` or `python -m train.run states-only`.

The curriculum is the heart of it. Recall is learned in one jump, and the jump comes when most of the loss
is about short lists. So rows start short and grow when the exact match of the stage is reached. 30 % of the
batches always come from earlier stages. The last part of the run adds rows of full length while the learning
rate falls.

The matrices are moved by Muon, the rest by AdamW. Everything is drawn from the seed and runs on one
thread, so on the same machine the same command writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from train.batches import (
    PROMPT_WEIGHT,
    Batch,
    Chats,
    MakeEpisode,
    codes_episode,
    ends_episode,
    exact_match,
    make_batch,
    skills_episode,
    wide_episode,
)
from train.checkpoint import export, load
from train.model import FULL, LINEAR, Model, Shape
from train.muon import Float32Muon
from train.native import keep_freed_memory, round_in_kernels
from train.tokenizer import SECOND_VOCAB_SIZE, VOCAB_SIZE, first_tokenizer, grown_tokenizer, train_tokenizer


@dataclass(frozen=True)
class Stage:
    """Batches of rows of `length` tokens until this share of the answers is right."""

    length: int
    until: float
    batch_tokens: int
    rate: float = 2.5e-3


@dataclass(frozen=True)
class Recipe:
    shape: Shape
    episodes: MakeEpisode
    stages: tuple[Stage, ...]
    final_length: int
    steps: int
    directory: Path
    tokens_max: int
    warm_up_steps: int = 30
    decay_share: float = 0.3
    earlier_share: float = 0.3
    final_share: float = 0.35
    seed: int = 20
    start: Path | None = None
    """The checkpoint that the run begins with; None begins with random weights."""
    ends_weigh: bool = False
    """See `Chats`."""
    dtype: torch.dtype = torch.bfloat16
    """Of the matmuls. float32 is the faster one on a CPU without bfloat16 units."""


ROOT = Path(__file__).resolve().parent.parent
EMBEDDED = ROOT / "src" / "weft" / "embedded" / "weft-recall"
FIRST_STAGE = Path("train_runs") / "recall" / "checkpoint"
SECOND_STAGE = Path("train_runs") / "skills" / "checkpoint"
RECIPES = {
    "recall": Recipe(
        shape=Shape(VOCAB_SIZE, (LINEAR, FULL, LINEAR, FULL), 256, 512, 4, 4, 64, 64),
        episodes=wide_episode,
        stages=(Stage(128, 0.80, 4096), Stage(256, 0.85, 4096), Stage(512, 0.90, 4096), Stage(1024, 2.0, 4096)),
        final_length=2048,
        steps=1500,
        directory=FIRST_STAGE,
        tokens_max=4096,
    ),
    "skills": Recipe(
        shape=Shape(SECOND_VOCAB_SIZE, (LINEAR, FULL, LINEAR, FULL), 256, 512, 4, 4, 64, 64),
        episodes=skills_episode,
        stages=(Stage(256, 0.55, 4096, 1.5e-3), Stage(512, 0.70, 4096, 1.5e-3), Stage(1024, 2.0, 4096, 1.5e-3)),
        final_length=2048,
        steps=1600,
        directory=SECOND_STAGE,
        tokens_max=4096,
        decay_share=0.4,
        start=FIRST_STAGE,
        dtype=torch.float32,
    ),
    "ends": Recipe(
        shape=Shape(SECOND_VOCAB_SIZE, (LINEAR, FULL, LINEAR, FULL), 256, 512, 4, 4, 64, 64),
        episodes=ends_episode,
        stages=(Stage(256, 0.0, 4096, 8e-4), Stage(512, 0.0, 4096, 8e-4), Stage(1024, 2.0, 4096, 8e-4)),
        final_length=2048,
        steps=200,
        directory=EMBEDDED,
        tokens_max=4096,
        warm_up_steps=10,
        decay_share=1.0,
        start=SECOND_STAGE,
        dtype=torch.float32,
        ends_weigh=True,
    ),
    "states-only": Recipe(
        shape=Shape(VOCAB_SIZE, (LINEAR,) * 3, 128, 256, 4, 4, 32, 32),
        episodes=codes_episode,
        stages=(Stage(128, 0.90, 4096), Stage(256, 2.0, 4096)),
        final_length=256,
        steps=1600,
        directory=ROOT / "tests" / "data" / "states-only",
        tokens_max=1024,
    ),
}


class Curriculum:
    """Chooses the length of the next batch, and moves on when a stage is learned."""

    def __init__(self, recipe: Recipe, rng: random.Random) -> None:
        self.recipe, self.rng = recipe, rng
        self.stage = 0
        self.score = 0.0

    def next_length(self, step: int) -> int:
        stages, recipe = self.recipe.stages, self.recipe
        decaying = step >= recipe.steps * (1 - recipe.decay_share)
        if decaying and self.stage == len(stages) - 1 and self.rng.random() < recipe.final_share:
            return recipe.final_length
        if self.stage and self.rng.random() < recipe.earlier_share:
            return stages[self.rng.randrange(self.stage)].length
        return stages[self.stage].length

    def report(self, length: int, right: int, asked: int) -> None:
        stage = self.recipe.stages[self.stage]
        if length != stage.length or not asked:
            return
        self.score = 0.8 * self.score + 0.2 * right / asked
        if self.score >= stage.until:
            self.stage, self.score = self.stage + 1, 0.0


def learning_rate(recipe: Recipe, stage: int, step: int) -> float:
    rise = min(1.0, (step + 1) / recipe.warm_up_steps)
    fall = min(1.0, (recipe.steps - step) / (recipe.steps * recipe.decay_share))
    return recipe.stages[stage].rate * rise * fall


def make_optimisers(model: Model, rate: float, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() == 2 and min(parameter.shape) > 8 and "embed" not in name
        (matrices if is_matrix else rest).append(parameter)
    others = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    if dtype == torch.float32:
        return [Float32Muon(matrices, rate, weight_decay=0.01, momentum=0.95), others]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return [muon, others]


def loss_of(model: Model, batch: Batch, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, int, int]:
    """The weighted loss, and how many scored answers were right.

    Of the many prompt tokens a random third is predicted with three times the weight: the same
    gradient on average, and a good part of the logits is never computed.
    """
    weights = batch.weights_BL.flatten()
    is_prompt = weights == PROMPT_WEIGHT
    weights = torch.where(is_prompt & (torch.rand(weights.shape) > 1 / 3), 0.0, weights)
    weights = torch.where(is_prompt, 3 * weights, weights)
    wanted = weights.nonzero()[:, 0]
    logits = model(batch.tokens_BL, dtype=dtype, wanted=wanted)
    targets, weights = batch.targets_BL.flatten()[wanted], weights[wanted]
    losses = F.cross_entropy(logits, targets, reduction="none")
    right, asked = exact_match(logits.detach().argmax(-1), targets, batch.answers_BL.flatten()[wanted])
    return (losses * weights).sum() / weights.sum(), right, asked


def grown_model(recipe: Recipe, tokenizer: Tokenizer) -> Model:
    """The model of the stage before, with rows for the tokens that are new.

    The row of a new token begins as the mean of the tokens that its text had.
    """
    assert recipe.start is not None
    before, old_tokenizer = load(recipe.start)
    model = Model(recipe.shape)
    state = before.state_dict()
    old_rows = state["embed_tokens.weight"]
    new_rows = []
    for number in range(len(old_rows), recipe.shape.vocab_size):
        text = tokenizer.decode([number], skip_special_tokens=False)
        new_rows.append(old_rows[old_tokenizer.encode(text, add_special_tokens=False).ids].mean(0))
    state["embed_tokens.weight"] = torch.cat([old_rows, *(row[None] for row in new_rows)])
    model.load_state_dict(state)
    return model.train()


@dataclass
class Run:
    """All that a run is at one step; it can be written, and read back to go on as if never stopped."""

    recipe: Recipe
    model: Model
    optimisers: list[torch.optim.Optimizer]
    rng: random.Random
    curriculum: Curriculum
    step: int = 0
    seconds: float = 0.0

    @classmethod
    def new(cls, recipe: Recipe, tokenizer: Tokenizer) -> Run:
        torch.manual_seed(recipe.seed)
        rng = random.Random(f"batches {recipe.seed}")
        model = Model(recipe.shape) if recipe.start is None else grown_model(recipe, tokenizer)
        optimisers = make_optimisers(model, recipe.stages[0].rate, recipe.dtype)
        return cls(recipe, model, optimisers, rng, Curriculum(recipe, rng))

    def save(self, path: Path) -> None:
        parts = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "rng": self.rng.getstate(),
            "torch_rng": torch.get_rng_state(),
            "curriculum": (self.curriculum.stage, self.curriculum.score),
            "progress": (self.step, self.seconds),
        }
        torch.save(parts, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)

    def restore(self, path: Path) -> None:
        parts = torch.load(path, weights_only=False)
        self.model.load_state_dict(parts["model"])
        for optimiser, state in zip(self.optimisers, parts["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.rng.setstate(parts["rng"])
        torch.set_rng_state(parts["torch_rng"])
        self.curriculum.stage, self.curriculum.score = parts["curriculum"]
        self.step, self.seconds = parts["progress"]

    def one_step(self, chats: Chats) -> dict[str, float]:
        """A batch, its gradient, an update; returns the line for the log."""
        started = time.monotonic()
        recipe, length = self.recipe, self.curriculum.next_length(self.step)
        rows = max(1, recipe.stages[self.curriculum.stage].batch_tokens // length)
        batch = make_batch(chats, recipe.episodes, self.rng, rows, length)
        loss, right, asked = loss_of(self.model, batch, recipe.dtype)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(recipe, self.curriculum.stage, self.step)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.curriculum.report(length, right, asked)
        self.step += 1
        self.seconds += time.monotonic() - started
        counts = {"step": self.step, "length": length, "right": right, "asked": asked}
        return counts | {"loss": round(loss.item(), 4), "seconds": round(self.seconds, 1)}


def tokenizer_for(recipe: Recipe, kept: Path) -> Tokenizer:
    """The tokenizer of this run: its own, else that of the checkpoint that is shipped, else a new one.

    The shipped one first, because merges hang on every word of the generated text: a change of one
    sentence somewhere would give every token a new number, and no old run could be repeated.
    """
    shipped = (recipe.directory if recipe.directory.is_absolute() else EMBEDDED) / "tokenizer.json"
    if kept.exists():
        tokenizer = Tokenizer.from_file(str(kept))
    elif shipped.exists():
        tokenizer = Tokenizer.from_file(str(shipped))
        if recipe.shape.vocab_size == VOCAB_SIZE:
            tokenizer = first_tokenizer(tokenizer)
        elif tokenizer.get_vocab_size() == VOCAB_SIZE:
            tokenizer = grown_tokenizer(tokenizer, recipe.seed)
    else:
        tokenizer = train_tokenizer(recipe.seed)
        if recipe.shape.vocab_size != VOCAB_SIZE:
            tokenizer = grown_tokenizer(tokenizer, recipe.seed)
    tokenizer.save(str(kept))
    return tokenizer


def train(recipe: Recipe, log: Path, save_steps: int) -> None:
    """Runs a recipe to its end, or on to its end from the last save in `log`, and exports it."""
    log.mkdir(parents=True, exist_ok=True)
    round_in_kernels(True)
    tokenizer = tokenizer_for(recipe, log / "tokenizer.json")
    chats, run = Chats(tokenizer, ends_weigh=recipe.ends_weigh), Run.new(recipe, tokenizer)
    if (log / "run.pt").exists():
        run.restore(log / "run.pt")
    with (log / "log.jsonl").open("a") as lines:
        while run.step < recipe.steps:
            lines.write(json.dumps(run.one_step(chats)) + "\n")
            lines.flush()
            if run.step % save_steps == 0:
                run.save(log / "run.pt")
                export(run.model, tokenizer, log / "last-save", recipe.tokens_max)
    export(run.model, tokenizer, recipe.directory, recipe.tokens_max)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.run", description=__doc__.splitlines()[0])
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--log", type=Path, default=Path("train_runs"), help="folder for the log and saves")
    parser.add_argument("--save-steps", type=int, default=100)
    parser.add_argument("--steps", type=int, help="another length of the run than the recipe has")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    recipe = RECIPES[chosen.recipe]
    recipe = replace(recipe, steps=chosen.steps or recipe.steps)
    train(recipe, chosen.log / chosen.recipe, chosen.save_steps)


if __name__ == "__main__":
    main()
