"""Scores a checkpoint directory without a server, and spoils its memory to see the score fall.

    python -m train.score src/weft/embedded/weft-recall --skill recall --controls
    python -m train.score src/weft/embedded/weft-recall --skill tools
    python -m train.score tests/data/states-only --skill codes --controls

An answer is right when every one of its tokens is the greedy choice, its end included, after the right
earlier answers. That is what greedy decoding does at the first question and, as long as the model has
made no mistake, at all later ones; `weft eval recall` measures the rest through the server.

Of JSON answers, the tokens that only a schema decides are not compared: a grammar writes them.

A score means something only if damage shows, so the controls are part of it. All of them strike at one place,
a chunk border near 60 % of the text. Only answers that must come from before it count: the question stands
behind the border, and the number does not stand between the two.

    kv zeroed      all keys and values before the border are zero: the memory was handed to no reader
    kv swapped     they are those of another conversation: a page table points at the wrong row
    kv one range   only the first 64 tokens of them are swapped: one block is wrong
    state zeroed   every recurrent state is zero at the border: a checkpoint was lost
    state swapped  it is that of another conversation: a slot was given to two
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from train.batches import Chats, exact_match
from train.checkpoint import load
from train.codes import make_codes_episodes
from train.model import CHUNK, Corruption, Model
from train.native import keep_freed_memory
from weft_tools.eval.facts import make_facts_episodes
from weft_tools.eval.recall import CountTokens, Episode, make_episodes
from weft_tools.eval.tool_calls import make_tools_episodes

HELD_OUT_SEED = 1
ROWS = 8
RANGE_TOKENS = 64
UNDAMAGED = "as it is"
KV_CONTROLS = ("kv zeroed", "kv swapped", "kv one range")
STATE_CONTROLS = ("state zeroed", "state swapped")
MakeEpisodes = Callable[[int, int, int, CountTokens], list[Episode]]
MAKERS: dict[str, MakeEpisodes] = {
    "recall": make_episodes, "codes": make_codes_episodes, "tools": make_tools_episodes,
    "json": make_facts_episodes,
}  # fmt: skip
LENGTHS = {"codes": (128, 256), "tools": (256, 512), "json": (256, 512)}


@dataclass(frozen=True)
class Score:
    length: int
    control: str
    right: int
    asked: int
    tokens_median: int

    @property
    def accuracy(self) -> float:
        return self.right / self.asked if self.asked else 0.0


def border_of(length: int) -> int:
    """Where the damage strikes: the chunk border at or before 60 % of the text."""
    return max(CHUNK, int(0.6 * length) // CHUNK * CHUNK)


def corruption(control: str, border: int) -> Corruption:
    """The hooks that do one kind of damage; rows are swapped with their neighbour in the batch."""

    def spoil_kv(_layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        end = RANGE_TOKENS if control == "kv one range" else border
        spoilt = []
        for memory in (keys, values):
            memory = memory.clone()
            memory[:, :, :end] = 0.0 if control == "kv zeroed" else memory.roll(1, 0)[:, :, :end]
            spoilt.append(memory)
        return spoilt[0], spoilt[1]

    def spoil_state(_layer: int, position: int, state: Tensor) -> Tensor:
        if position != border:
            return state
        heads = state.shape[0] // ROWS
        return torch.zeros_like(state) if control == "state zeroed" else state.roll(heads, 0)

    if control in KV_CONTROLS:
        return Corruption(kv=spoil_kv)
    return Corruption(state=spoil_state) if control in STATE_CONTROLS else Corruption()


def answers_told_before(chats: Chats, tokens: list[int], answers: list[int], border: int) -> set[int]:
    """The numbers of the answers that can be known only from the text before `border`."""
    chosen = set()
    for answer in range(max(answers) + 1):
        first, last = answers.index(answer), len(answers) - answers[::-1].index(answer)
        word = evidence(chats.tokenizer.decode(tokens[first:last]))
        if first > border and word and word not in chats.tokenizer.decode(tokens[border:first]):
            chosen.add(answer)
    return chosen


def evidence(answer: str) -> str:
    """The word of an answer that only its source tells: a call's tool, the last value of JSON, the number.

    Empty where there is none, as in "Done."
    """
    called = re.match(r'<tool_call>\s*\{"name": "(\w+)"', answer)
    if called:
        return called.group(1)
    values = re.findall(r'": "?([^",{}\[\]]+)', answer)
    return (values or re.findall(r"^[^\n]+: ?(\S+)$", answer) or [""])[-1]


@torch.no_grad()
def score_rows(
    model: Model, chats: Chats, episodes: Sequence[Episode], control: str, border: int, *, after_border: bool
) -> tuple[int, int]:
    """(right, asked) of one batch; `after_border` leaves out answers that the damage could not reach."""
    encoded = [chats.rows(episode) for episode in episodes]
    longest = max(len(tokens) for tokens, _, _ in encoded)
    tokens = torch.tensor([row[0] + [chats.end_of_text] * (longest - len(row[0])) for row in encoded])
    answers = torch.full_like(tokens, -1)
    answers_before = 0
    for index, (row, _, numbers) in enumerate(encoded):
        chosen = set(numbers)
        if after_border:
            chosen = answers_told_before(chats, row, numbers, border)
        counted = [number + answers_before if number in chosen and number >= 0 else -1 for number in numbers]
        answers[index, : len(counted)] = torch.tensor(counted)
        answers_before += max(numbers) + 1
    spoil = corruption(control, border)
    inside = (answers[:, 1:] >= 0).flatten()
    logits = model(tokens[:, :-1], dtype=torch.float32, spoil=spoil, wanted=inside.nonzero()[:, 0])
    return exact_match(logits.argmax(-1), tokens[:, 1:].flatten()[inside], answers[:, 1:].flatten()[inside])


def score(
    model: Model, chats: Chats, skill: str, length: int, answers_wanted: int, control: str, seed: int = HELD_OUT_SEED
) -> Score:
    """Asks held-out conversations until `answers_wanted` answers are counted."""
    episodes = MAKERS[skill](seed, length, 4 * answers_wanted // ROWS * ROWS, chats.count)
    right = asked = 0
    lengths: list[int] = []
    for first in range(0, len(episodes), ROWS):
        rows = episodes[first : first + ROWS]
        if asked >= answers_wanted or len(rows) < ROWS:
            break
        good, all_of_them = score_rows(
            model, chats, rows, control, border_of(length), after_border=control != UNDAMAGED
        )
        right, asked = right + good, asked + all_of_them
        lengths += [len(chats.rows(episode)[0]) for episode in rows]
    return Score(length, control, right, asked, sorted(lengths)[len(lengths) // 2])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.score", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--skill", choices=sorted(MAKERS), default="recall")
    parser.add_argument("--lengths", type=int, nargs="+", default=None)
    parser.add_argument("--answers", type=int, default=450)
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED)
    parser.add_argument("--controls", action="store_true")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    model, tokenizer = load(chosen.directory)
    has_attention = any("full" in kind for kind in model.shape.layer_types)
    controls = [UNDAMAGED]
    if chosen.controls:
        controls += [*(KV_CONTROLS if has_attention else ()), *STATE_CONTROLS]
    default = LENGTHS.get(chosen.skill, (128, 256, 512, 1024, 2048))
    for length in chosen.lengths or default:
        for control in controls:
            result = score(model, Chats(tokenizer), chosen.skill, length, chosen.answers, control, chosen.seed)
            if chosen.json:
                print(json.dumps(vars(result) | {"accuracy": result.accuracy}), flush=True)
                continue
            counts = f"{length:6} tokens  {control:14} {result.right:5} of {result.asked:5}"
            print(f"{counts}  {result.accuracy:7.2%}  (median {result.tokens_median} tokens)", flush=True)


if __name__ == "__main__":
    main()
