"""Pictures a second of a vision tower, beside transformers, in one process.

    python -m benchmarks.images [--towers base so400m] [--size 512x512 1024x1024] [--rounds 3] [--threads N]

    base      the tower of LFM2-VL-450M: 12 layers of 768
    so400m    that of LFM2-VL-1.6B and 3B: 26 layers of 1,152
    qwen3_5   that of Qwen3.5 by transformers' defaults: 27 layers of 1,152
    lfm3      that of LFM3-VL by transformers' defaults: 14 layers of 1,024, eight of them convolutions

Both sides have the same random weights in ``--dtype``, the same patches and the same threads, and take turns
within a round; shown are medians. ``rows`` is what a picture takes of the prompt. ``piece ms`` is the longest
piece of weft's encoder: a step of decodes waits for one piece and no longer. ``prepare ms`` is decoding,
resizing and tiles of a PNG, which is before the tower and the same for both. CPU seconds stand beside wall
seconds. ``--busy``: one thread and its own time, for a machine that others use as well.

    python -m benchmarks.images --engine [--max-step-ms 100]

A whole engine with that tower and a text part of eight layers. Four sequences decode while a picture of
1,024 x 1,024 is read: shown is the longest time of the engine's loop between two tokens of theirs. The same
picture comes twice, under different questions: seconds to the first token each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from tests.fixtures.vision_checkpoints import make_vision_checkpoint, picture_inputs, vision_tokenizer
from tests.support.pictures import drawn, encoded
from weft.assemble import assemble
from weft.config import EngineConfig
from weft.host import cpu_name_and_flags, usable_cores
from weft.images.decoding import ImageLimits, decode
from weft.images.lfm2_vl import prepare
from weft.images.picture import Picture
from weft.images.settings import ImageSettings
from weft.images.worker import PREPARE, start_of
from weft.models.loading import load_model
from weft.models.vision.encoder import VisionEncoder
from weft.request import PlacedPicture, Request, SamplingParams
from weft.tensor import native

TOWERS: dict[str, dict[str, Any]] = {
    "base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "text": 1024,
    },
    "so400m": {
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "num_attention_heads": 16,
        "intermediate_size": 4304,
        "text": 2048,
    },
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_vl", {"out_hidden_size": 64}),
    "lfm3": ("lfm3_vl", {}),
}
"""Towers of transformers' defaults over the text part of a tiny checkpoint; what is not of the defaults."""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 1 << 16, "longest_edge": 1 << 24},
}


def checkpoint(directory: Path, tower: str, dtype: str, layers: int = 1) -> Path:
    """Random weights under a text part of some layers."""
    if tower in WHOLE:
        name, vision = WHOLE[tower]
        make_vision_checkpoint(directory, name, vision_config=vision)
        (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
        return directory
    vision = {"model_type": "siglip2_vision_model", "vision_use_head": False, **TOWERS[tower]}
    hidden = vision.pop("text")
    text = {
        "model_type": "lfm2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "layer_types": [*["conv"] * (layers - 1), "full_attention"],
        "intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 1024,
    }
    config = transformers.AutoConfig.for_model("lfm2_vl", vision_config=vision, text_config=text)
    config.dtype = dtype
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).to(getattr(torch, dtype))
    model.save_pretrained(directory)
    vision_tokenizer().save_pretrained(directory)
    return directory


def inputs_of(picture: Picture, settings: ImageSettings, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """As transformers' processor gives them: normalised, those of LFM2-VL padded to one length."""
    if settings.kind != "siglip2":
        given = picture_inputs(settings, [picture])
        return {name: values.to(dtype) if values.is_floating_point() else values for name, values in given.items()}
    most = max(1024, *(len(tile.patches) for tile in picture.tiles))
    values = torch.zeros(len(picture.tiles), most, picture.tiles[0].patches.shape[1])
    mask = torch.zeros(len(picture.tiles), most, dtype=torch.int32)
    for number, tile in enumerate(picture.tiles):
        values[number, : len(tile.patches)] = torch.tensor(tile.patches) / 127.5 - 1
        mask[number, : len(tile.patches)] = 1
    shapes = torch.tensor([[tile.rows, tile.columns] for tile in picture.tiles])
    return {"pixel_values": values.to(dtype), "pixel_attention_mask": mask, "spatial_shapes": shapes}


def pieces_of(encoder: VisionEncoder, picture: Picture, longest: list[float], threads: int) -> torch.Tensor:
    """The rows; ``longest`` gets the seconds of the longest piece."""
    pieces, worst = encoder.encode(picture), 0.0
    clock = time.thread_time if threads == 1 else time.perf_counter
    while True:
        began = clock()
        try:
            next(pieces)
        except StopIteration as end:
            longest.append(worst)
            rows: torch.Tensor = end.value
            return rows
        worst = max(worst, clock() - began)


def timed(run: Callable[[], object], threads: int) -> tuple[float, float]:
    """Wall and CPU seconds."""
    cpu = time.thread_time if threads == 1 else time.process_time
    began, began_cpu = time.perf_counter(), cpu()
    run()
    return time.perf_counter() - began, cpu() - began_cpu


def measure(
    name: str, sizes: Sequence[tuple[int, int]], args: argparse.Namespace, threads: int
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place:
        directory = checkpoint(Path(place), name, args.dtype)
        encoder = load_model(directory, args.dtype).model.vision
        assert encoder is not None
        settings = start_of(directory, ImageLimits()).settings
        prepare_one = PREPARE[settings.kind]
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            directory, dtype=getattr(torch, args.dtype), attn_implementation="sdpa"
        ).eval()
    rows = []
    for width, height in sizes:
        file = encoded(drawn("photo", width, height))
        prepared = [
            timed(lambda: prepare_one(decode(file), settings), threads)[0]  # noqa: B023
            for _ in range(3)
        ]
        picture = prepare_one(decode(file), settings)
        given = inputs_of(picture, settings, getattr(torch, args.dtype))
        longest: list[float] = []
        sides: dict[str, Callable[[], torch.Tensor]] = {
            "weft": lambda: pieces_of(encoder, picture, longest, threads),  # noqa: B023
            "transformers": lambda: torch.cat(
                model.get_image_features(**given, return_dict=True).pooler_output  # noqa: B023
            ),
        }
        with torch.inference_mode():
            ours, theirs = (side().float() for side in sides.values())
        apart = float((ours - theirs).abs().max() / theirs.abs().max())
        longest.clear()
        samples: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for number in range(args.rounds):
            for side in list(sides) if number % 2 else list(sides)[::-1]:
                with torch.inference_mode():
                    samples[side].append(timed(sides[side], threads))
        wall, cpu = ({side: median(one[index] for one in samples[side]) for side in sides} for index in (0, 1))
        rows.append(
            {
                "tower": name,
                "size": [width, height],
                "tiles": len(picture.tiles),
                "rows": picture.rows,
                "seconds": wall,
                "cpu_seconds": cpu,
                "longest_piece_s": median(longest),
                "prepare_s": median(prepared),
                "apart": apart,
            }
        )
        print(
            f"{name:>8} {f'{width}x{height}':>10} {len(picture.tiles):>5} {picture.rows:>5}"
            f"{wall['weft']:>8.2f}{wall['transformers']:>8.2f}{wall['transformers'] / wall['weft']:>7.2f}"
            f"{cpu['weft']:>9.2f}{cpu['transformers']:>8.2f}{cpu['transformers'] / cpu['weft']:>7.2f}"
            f"{median(longest) * 1e3:>9.1f}{median(prepared) * 1e3:>11.0f}{apart:>9.0e}",
            flush=True,
        )
    return rows


def in_an_engine(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Seconds: gaps of other sequences beside a picture, and to the first token of requests with it."""
    clock = time.thread_time if args.busy else time.perf_counter
    picture = prepare(decode(encoded(drawn("photo", 1024, 1024))), ImageSettings())
    with tempfile.TemporaryDirectory() as place:
        directory = checkpoint(Path(place), name, args.dtype, layers=8)
        core = assemble(
            EngineConfig(
                model=str(directory),
                dtype=args.dtype,
                memory="512MiB",
                max_model_len=4096,
                speculate="off",
                threads=1 if args.busy else args.threads,
                max_step_ms=args.max_step_ms,
            )
        ).core
    token, numbers = core.executor.pictures.picture_tokens[0], itertools.count()  # type: ignore[attr-defined]

    def submit(prompt: list[int], new: int, placed: Sequence[PlacedPicture] = ()) -> str:
        request_id = str(next(numbers))
        core.submit(
            Request(
                request_id=request_id,
                prompt_tokens=prompt,
                pictures=list(placed),
                sampling=SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True),
            )
        )
        return request_id

    def shown(before: int) -> tuple[list[int], list[PlacedPicture]]:
        tokens, places = [5 + (at * before) % 300 for at in range(before)], []
        for rows in (part for part in picture.text if isinstance(part, int)):
            places.append((len(tokens), rows))
            tokens += [token] * rows + [7]
        return tokens + [9] * 20, [PlacedPicture(digest=picture.digest, places=places, data=picture.to_bytes())]

    def first_token(before: int, watched: Sequence[str] = ()) -> tuple[float, list[float]]:
        begun, gaps = clock(), []
        asked = submit(shown(before)[0], 1, shown(before)[1])
        last = begun
        while True:
            names = {event.request_id for event in core.step() if event.tokens}
            if names & set(watched):
                gaps.append(clock() - last)
                last = clock()
            if asked in names:
                return clock() - begun, gaps

    first_token(33)  # what is allocated once
    core.pictures.forget()
    first, _ = first_token(41)
    again, _ = first_token(47)
    others = [submit([11 + number] * 40, 3000) for number in range(4)]
    while sum(bool(event.tokens) for event in core.step()) < len(others):
        pass
    plain = []
    for _ in range(50):
        begun = clock()
        core.step()
        plain.append(clock() - begun)
    core.pictures.forget()
    beside, gaps = first_token(53, others)
    core.close()
    return {
        "first_s": first,
        "again_s": again,
        "times": first / again,
        "decode_step_s": median(plain),
        "beside_s": beside,
        "gap_median_s": median(gaps),
        "gap_longest_s": max(gaps),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.images", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--towers", choices=[*TOWERS, *WHOLE], nargs="+", default=list(TOWERS))
    parser.add_argument("--size", nargs="+", default=["512x512", "1024x1024"])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--max-step-ms", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write the table to this file")
    args = parser.parse_args(argv)
    if args.engine and not set(args.towers) <= set(TOWERS):
        parser.error(f"--engine measures {', '.join(TOWERS)}")
    transformers.utils.logging.disable_progress_bar()
    threads = 1 if args.busy else args.threads
    torch.set_num_threads(threads)
    native.set_threads(threads)
    facts = {
        "processor": cpu_name_and_flags()[0],
        "threads": threads,
        "dtype": args.dtype,
        "kernels": native.describe(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rounds": args.rounds,
    }
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    if args.engine:
        for name in args.towers:
            figures = in_an_engine(name, args)
            print(name, ", ".join(f"{key} {value:.3f}" for key, value in figures.items()), flush=True)
        return 0
    print(
        f"{'tower':>8} {'picture':>10} {'tiles':>5} {'rows':>5}{'weft s':>8}{'tf. s':>8}{'ratio':>7}"
        f"{'weft CPU':>9}{'tf. CPU':>8}{'ratio':>7}{'piece ms':>9}{'prepare ms':>11}{'apart':>9}"
    )
    sizes = [(int(width), int(height)) for width, _, height in (size.partition("x") for size in args.size)]
    table = [row for name in args.towers for row in measure(name, sizes, args, threads)]
    if args.json is not None:
        args.json.write_text(json.dumps({"facts": facts, "results": table}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
