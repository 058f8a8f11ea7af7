"""The tokenizer of the shipped checkpoints: byte-level BPE of 1,024 entries, trained on generated chats.

Two choices serve recall. Every digit is its own token, so that numbers are copied digit by digit. A word that
starts with a capital letter never joins the space before it. So a name has the same tokens at the start of a
line, after a bullet and in the middle of a question. Otherwise the model would have to learn two spellings of
each name.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from train.chat import small_talk, story_turn
from train.codes import make_codes_episode
from weft_tools.eval.facts import make_facts_episode
from weft_tools.eval.recall import Episode, make_episode
from weft_tools.eval.tool_calls import CALL_CLOSE, CALL_OPEN, RESULT_CLOSE, RESULT_OPEN, make_tools_episode, system_text

VOCAB_SIZE = 1024
SECOND_VOCAB_SIZE = 1280
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]
PIECES = (
    r"'(?:s|t|re|ve|m|ll|d)|\p{Lu}\p{L}*| ?\p{Ll}\p{L}*| ?\p{Lo}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+"
)

TAGS = [CALL_OPEN, CALL_CLOSE, RESULT_OPEN, RESULT_CLOSE, "<tools>", "</tools>"]

CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text()


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


def first_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer of the first stage, cut out of a grown one."""
    described = json.loads(tokenizer.to_str())
    model = described["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < VOCAB_SIZE}
    count = VOCAB_SIZE - len(SPECIAL_TOKENS) - len(pre_tokenizers.ByteLevel.alphabet())
    model["merges"] = model["merges"][:count]
    described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < VOCAB_SIZE]
    return Tokenizer.from_str(json.dumps(described))


def _second_pieces(tokenizer: Tokenizer, seed: int) -> Counter[str]:
    """The pieces of chats with tools and JSON that may become tokens: words in small letters and marks."""
    rng = random.Random(f"second tokenizer {seed}")
    pieces: Counter[str] = Counter()
    for _ in range(1500):
        episodes = [
            make(rng, 256, lambda text: len(text) // 3 + 1, split="training")
            for make in (make_tools_episode, make_facts_episode)
        ]
        texts = [text for episode in episodes for turn in episode.turns for text in (turn.user, turn.reply)]
        texts += [system_text(episode.system, episode.tools) for episode in episodes]
        for text in texts:
            for tag in TAGS:
                text = text.replace(tag, "\n")
            pieces.update(piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    words = {piece: piece.strip("Ġ") for piece in pieces}
    return Counter(
        {piece: count for piece, count in pieces.items() if words[piece].islower() or not words[piece].isalnum()}
    )


def grown_tokenizer(tokenizer: Tokenizer, seed: int) -> Tokenizer:
    """`tokenizer` with the tags of the chat template, and with merges for the words of tools and JSON.

    The merges come behind the old ones. So text of the first stage keeps its tokens but for a few words.
    """
    described = json.loads(tokenizer.to_str())
    model = described["model"]
    for tag in TAGS:
        number = len(model["vocab"])
        model["vocab"][tag] = number
        described["added_tokens"].append(
            {"id": number, "content": tag, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": False}
        )  # fmt: skip
    pieces = _second_pieces(tokenizer, seed)
    words = {piece: _tokens_of(tokenizer, piece) for piece in pieces}
    while len(model["vocab"]) < SECOND_VOCAB_SIZE:
        pairs: Counter[tuple[str, str]] = Counter()
        for piece, tokens in words.items():
            for pair in pairwise(tokens):
                pairs[pair] += pieces[piece]
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        model["vocab"]["".join(best)] = len(model["vocab"])
        model["merges"].append(list(best))
        words = {piece: _merged(tokens, best) for piece, tokens in words.items()}
    return Tokenizer.from_str(json.dumps(described))


def _tokens_of(tokenizer: Tokenizer, piece: str) -> list[str]:
    text = piece.replace("Ġ", " ").replace("Ċ", "\n")
    return list(tokenizer.encode(text, add_special_tokens=False).tokens)


def _merged(tokens: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for token in tokens:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


def save_tokenizer(tokenizer: Tokenizer, directory: Path, tokens_max: int) -> None:
    """The four files that make a tokenizer directory with a chat template."""
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
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
