"""Which matrices of a model feel int4: each role is rounded alone, and all roles but one.

    python -m benchmarks.rounded_parts [--model DIRECTORY] [--tokens 2000] [--families qwen3_5 granite]

A role's matrices are rounded as ``--quantize int4`` rounds them and written back as values; all else stays
as stored. Columns are those of ``benchmarks.quantised_logits``; *share* is the role's part of all weights.
Without --model it is the embedded model on its own task; ``--families`` are the tiny random checkpoints of
the tests, on random tokens: they say what a family's shape does, not what training does.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import load_file, save_file

from benchmarks.quantised_logits import conversations, scores
from weft.api import Engine
from weft.models.hub import resolve_model
from weft.tensor.weights.rounded import rounded

ROLES: dict[str, str] = {
    "beta and decay rows": r"in_proj_(a|b|ba)\.|\.(a|b)_proj\.|f_[ab]_proj\.",
    "steps of Mamba-1": r"(x_proj|dt_proj)\.weight",
    "recurrent, in": r"(in_proj(_qkv|_z|_qkvz)?|linear_attn\.(q|k|v|g)_proj)\.weight",
    "recurrent, out": r"(linear_attn|mamba|mixer|conv)\.(\w+\.)*out_proj\.weight",
    "attention": r"(self_attn|attention|attn)\.(q|k|v|o|out)_proj\.weight",
    "routers": r"(router|mlp\.gate|shared_expert_gate|feed_forward\.gate)\.\w*\.?weight",
    "convolutions": r"conv1d\.weight|conv\.conv\.weight",
    "feed-forward": r"(mlp|feed_forward|shared_mlp|experts)\..*(proj|linear|w[123])\.?.*",
    "head": r"lm_head\.weight|embed_tokens\.weight",
}


def role_of(name: str) -> str | None:
    return next((role for role, names in ROLES.items() if re.search(names, name)), None)


def written(source: Path, to: Path, roles: set[str]) -> float:
    """``source`` with the matrices of ``roles`` rounded; returns the share of their elements."""
    shutil.copytree(source, to, dirs_exist_ok=True)
    counted, total = 0, 0
    for file in to.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            role = role_of(name)
            total += tensor.numel() * (role is not None)
            if role in roles:
                counted += tensor.numel()
                rows = tensor.flatten(1) if role == "convolutions" else tensor.flatten(0, -2)
                tensors[name] = rounded(rows, 4).dense().view(tensor.shape).to(tensor.dtype)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return counted / max(total, 1)


def measure(name: str, source: Path, tokens: int, *, random_tokens: bool) -> None:
    with Engine(str(source), prefix_cache=False) as engine:
        generator = random.Random(7)
        pieces = (
            [[generator.randrange(5, 500) for _ in range(128)] for _ in range(tokens // 128)]
            if random_tokens
            else conversations(engine, tokens)
        )
        truth = scores(engine, pieces)
    roles = sorted(
        {role for file in source.glob("*.safetensors") for key in load_file(file) if (role := role_of(key)) is not None}
    )
    print(f"{name:<28}{'share':>8}{'nats':>9}{'moved':>9}{'same':>8}")
    for label, chosen in [
        ("all", set(roles)),
        *((role, {role}) for role in roles),
        *((f"all but {role}", set(roles) - {role}) for role in roles),
    ]:
        with tempfile.TemporaryDirectory() as directory:
            share = written(source, Path(directory), chosen)
            with Engine(directory, prefix_cache=False) as engine:
                found = scores(engine, pieces)
        moved = fmean(abs(one.logprob - other.logprob) for one, other in zip(found, truth, strict=True))
        same = fmean(one.top[0][0] == other.top[0][0] for one, other in zip(found, truth, strict=True))
        nats = fmean(-one.logprob for one in found)
        print(f"  {label:<26}{share:>8.1%}{nats:>9.4f}{moved:>9.4f}{same:>8.1%}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory; default: the embedded model")
    parser.add_argument("--families", nargs="*", default=[], help="tiny checkpoints of tests/fixtures")
    parser.add_argument("--tokens", type=int, default=2000)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    if args.families:
        from tests.fixtures.checkpoints import checkpoint

        for family in args.families:
            measure(family, checkpoint(family), args.tokens, random_tokens=True)
    else:
        import weft

        embedded = Path(weft.__file__).parent / "embedded" / "weft-recall"
        measure(
            args.model or "embedded",
            resolve_model(args.model) if args.model else embedded,
            args.tokens,
            random_tokens=False,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
