"""What rounding weights, and the inputs of their products, does to a model's answers.

    python -m benchmarks.quantised_logits [--model DIRECTORY] [--text FILE] [--tokens 2000]

Every form reads the same text, in pieces; each token is scored by what came before it in its piece:

    nats      minus the log probability of the text's own token, the mean of all (perplexity is e to it)
    moved     how far that log probability is from the unrounded model's, the mean of the absolute distances
    same      how often the likeliest next token is the unrounded model's

Without a text, the embedded model's task is read: lists of names and numbers, and questions about them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from weft.api import Engine
from weft.request import TokenLogprobs
from weft_tools.eval.recall import make_episodes

FORMS: tuple[tuple[str, dict[str, object]], ...] = (
    ("as stored", {}),
    ("int8", {"quantize": "int8"}),
    ("int8, inputs exact", {"quantize": "int8", "quantize_inputs": False}),
    ("w8a8", {"quantize": "w8a8"}),
    ("int4", {"quantize": "int4"}),
    ("int4, inputs exact", {"quantize": "int4", "quantize_inputs": False}),
)
_PIECE_TOKENS = 512


def conversations(engine: Engine, tokens: int) -> list[list[int]]:
    """The recall task with its right answers, as the chat template writes it."""
    episodes = make_episodes(
        0, _PIECE_TOKENS, -(-tokens // _PIECE_TOKENS), lambda text: len(engine.tokenizer.encode(text))
    )
    return [engine.render_chat(episode.messages_before(len(episode.turns) - 1)) for episode in episodes]


def cut(engine: Engine, text: str, tokens: int) -> list[list[int]]:
    ids = engine.tokenizer.encode(text)[:tokens]
    return [ids[first : first + _PIECE_TOKENS] for first in range(0, len(ids), _PIECE_TOKENS)]


def scores(engine: Engine, pieces: Sequence[Sequence[int]]) -> list[TokenLogprobs]:
    done = engine.generate(pieces, progress=False, max_tokens=1, temperature=0.0, prompt_logprobs=1)
    return [scored for answer in done for scored in answer.prompt_logprobs if scored is not None]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory; default: the embedded model")
    parser.add_argument("--text", type=Path, help="a file of text; default: the recall task")
    parser.add_argument("--tokens", type=int, default=2000)
    args = parser.parse_args(argv)
    truth: list[TokenLogprobs] = []
    pieces: list[list[int]] = []
    print(f"{'':<20}{'weights MB':>12}{'nats':>10}{'moved':>10}{'same':>10}")
    for name, config in FORMS:
        with Engine(args.model, prefix_cache=False, **config) as engine:
            if not pieces:
                pieces = (
                    cut(engine, args.text.read_text(encoding="utf-8"), args.tokens)
                    if args.text
                    else conversations(engine, args.tokens)
                )
            found = scores(engine, pieces)
            truth = truth or found
            moved = fmean(abs(one.logprob - other.logprob) for one, other in zip(found, truth, strict=True))
            same = fmean(one.top[0][0] == other.top[0][0] for one, other in zip(found, truth, strict=True))
            nats = fmean(-one.logprob for one in found)
            print(
                f"{name:<20}{engine.info.weights_bytes / 1e6:>12.1f}{nats:>10.4f}{moved:>10.4f}{same:>10.1%}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
