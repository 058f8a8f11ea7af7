"""The tokenizer of the shipped checkpoints: byte-level BPE of 1,024 entries, trained on generated chats.

Two choices serve recall. Every digit is its own token, so that numbers are copied digit by digit. A word that
starts with a capital letter never joins the space before it. So a name has the same tokens at the start of a
line, after a bullet and in the middle of a question. Otherwise the model would have to learn two spellings of
each name.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from train.chat import small_talk, story_turn
from weft.eval.codes import make_codes_episode
from weft.eval.recall import Episode, make_episode

VOCAB_SIZE = 1024
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]
PIECES = (
    r"'(?:s|t|re|ve|m|ll|d)|\p{Lu}\p{L}*| ?\p{Ll}\p{L}*| ?\p{Lo}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def _texts(seed: int) -> list[str]:
    rng = random.Random(f"tokenizer {seed}")
    texts = []
    for _ in range(400):
        episodes: list[Episode] = [
            make_episode(rng, 512, lambda text: len(text) // 3 + 1, split="training", absent_rate=0.1),
            make_codes_episode(rng, 256, lambda text: len(text) // 4 + 1, split="training"),
        ]
        turns = [turn for episode in episodes for turn in episode.turns]
        turns += [story_turn(rng), small_talk(rng), small_talk(rng)]
        texts += [text for turn in turns for text in ("user\n" + turn.user, "assistant\n" + turn.reply)]
        texts += ["system\n" + episode.system for episode in episodes if episode.system]
    return texts


def train_tokenizer(seed: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, tokens_max: int) -> None:
    """The four files that make a tokenizer directory with a chat template."""
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n")
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": tokens_max,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")
