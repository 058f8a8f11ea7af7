"""Makes ``tests/fixtures/library_pictures.npz``: results of transformers' processors of LFM2-VL and Qwen3.5 for drawn
pictures.

    python -m tests.support.library_pictures      where transformers' processor runs: it needs torchvision

The table has a row for each picture: its grid, the grid of patches of each tile, the prompt's text, and some thousand
pixel values of each tile at drawn places, in 8 bits. The row of a video also has the sampled frames. Tests only read
the file: torchvision's builds need the libraries of a GPU, which the tests' environment does not have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.pictures import drawn

FILE = Path(__file__).resolve().parents[1] / "fixtures" / "library_pictures.npz"
PLACES = 1500
SIZES = (
    (32, 32),
    (1, 1),
    (17, 300),
    (300, 17),
    (256, 256),
    (640, 480),
    (480, 640),
    (512, 512),
    (1000, 400),
    (723, 724),
    (724, 724),
    (1024, 1024),
    (1000, 800),
    (1250, 1000),
    (2000, 1400),
    (900, 1800),
    (3000, 700),
    (500, 2600),
    (2100, 2100),
    (4000, 3000),
    (2600, 400),
)
"""(width, height). Small, long, tall; just below and above the size that is divided into tiles; equally near grids."""
KIND_OF = ("photo", "noise", "text", "gradient")
OTHERS: tuple[dict[str, Any], ...] = (
    {"use_thumbnail": False},
    {"do_image_splitting": False},
    {"min_tiles": 4, "max_tiles": 6},
    {"resample": 3},
    {"min_image_tokens": 16, "max_image_tokens": 64, "tile_size": 256},
    {"use_image_special_tokens": False},
)
"""Settings that are not the defaults, each on one large picture."""
OTHER_SIZE = (1300, 900)


def cases() -> list[dict[str, Any]]:
    """Return the case of each row."""
    plain = [{"kind": KIND_OF[index % 4], "size": size, "settings": {}} for index, size in enumerate(SIZES)]
    return plain + [{"kind": "photo", "size": OTHER_SIZE, "settings": one} for one in OTHERS]


QWEN_SIZES = (
    (1, 1),
    (17, 300),
    (300, 17),
    (256, 256),
    (640, 480),
    (1000, 400),
    (723, 724),
    (2000, 1400),
    (2600, 13),
    (15, 3000),
    (4000, 3000),
    (5000, 4200),
)
"""Small ones grow to 65,536 pixels; the last is shrunk to 16,777,216; two are at the longest shape."""
QWEN_OTHERS: tuple[dict[str, Any], ...] = (
    {"size": {"shortest_edge": 4096, "longest_edge": 100_000}},
    {"size": {"shortest_edge": 3_000_000, "longest_edge": 4_000_000}},
    {"resample": 2},
)


def qwen_cases() -> list[dict[str, Any]]:
    plain = [{"kind": KIND_OF[index % 4], "size": size, "settings": {}} for index, size in enumerate(QWEN_SIZES)]
    return plain + [{"kind": "photo", "size": OTHER_SIZE, "settings": one} for one in QWEN_OTHERS]


def places(values: int, tile: int) -> np.ndarray:
    """Return the places at which a tile with this number of values is compared."""
    return np.random.default_rng(tile).integers(0, values, PLACES)


def main() -> None:
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
    from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

    rows, samples = [], {}
    for number, case in enumerate(cases()):
        settings = dict(case["settings"])
        special = settings.pop("use_image_special_tokens", True)
        images = Lfm2VlImageProcessor(**settings)
        processor = object.__new__(Lfm2VlProcessor)
        processor.image_processor = images
        processor.image_token, processor.image_start_token = "<image>", "<|image_start|>"
        processor.image_end_token, processor.image_thumbnail_token = "<|image_end|>", "<|img_thumbnail|>"
        rgb = drawn(case["kind"], *case["size"], seed=number)
        output = images([[rgb]], return_row_col_info=True, return_tensors="pt", input_data_format="channels_last")
        text = processor.replace_image_token(output, 0, use_image_special_tokens=special)
        grids = output["spatial_shapes"].tolist()
        rows.append(
            {
                **case,
                "grids": grids,
                "text": text.replace("<image>", "."),
                "rows": int(output["image_rows"][0]),
                "columns": int(output["image_cols"][0]),
            }
        )
        for tile, (tall, wide) in enumerate(grids):
            values = output["pixel_values"][tile][: tall * wide].numpy().reshape(-1)
            exact = np.round((values * 0.5 + 0.5) * 255).astype(np.uint8)
            samples[f"{number}.{tile}"] = exact[places(exact.size, tile)]
    qwen_rows, qwen_samples = of_qwen()
    video_rows, video_samples = of_videos()
    np.savez_compressed(
        FILE,
        rows=np.frombuffer(json.dumps(rows).encode(), np.uint8),
        qwen_rows=np.frombuffer(json.dumps(qwen_rows).encode(), np.uint8),
        video_rows=np.frombuffer(json.dumps(video_rows).encode(), np.uint8),
        **samples,
        **qwen_samples,
        **video_samples,
    )


def of_qwen() -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    rows, samples = [], {}
    release: dict[str, Any] = {
        "size": {"shortest_edge": 1 << 16, "longest_edge": 1 << 24},
        "patch_size": 16,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    for number, case in enumerate(qwen_cases()):
        output = Qwen2VLImageProcessor(**{**release, **case["settings"]})(
            [drawn(case["kind"], *case["size"], seed=number)], return_tensors="pt", input_data_format="channels_last"
        )
        [[_, tall, wide]] = output["image_grid_thw"].tolist()
        # Neighbours, channels, frames -> patches row by row, red, green and blue of each pixel.
        values = output["pixel_values"].numpy().reshape(tall // 2, wide // 2, 2, 2, 3, 2, 256)
        assert (values[..., 0, :] == values[..., 1, :]).all()
        patches = values[..., 0, :].transpose(0, 2, 1, 3, 5, 4).reshape(-1)
        exact = np.round((patches * 0.5 + 0.5) * 255).astype(np.uint8)
        rows.append({**case, "grid": [tall, wide]})
        samples[f"qwen.{number}"] = exact[places(exact.size, number)]
    return rows, samples


VIDEOS: tuple[dict[str, Any], ...] = (
    {"frames": 8, "size": (200, 120), "fps": 30.0}, {"frames": 100, "size": (64, 48), "fps": 25.0},
    {"frames": 7, "size": (20, 90), "fps": 2.0, "asked": {"fps": 2}},
    {"frames": 90, "size": (48, 64), "fps": 29.97, "asked": {"fps": 5}},
    {"frames": 400, "size": (32, 40), "fps": 10.0},
    {"frames": 12, "size": (640, 480), "fps": 24.0, "asked": {"fps": 24}},
    {"frames": 9, "size": (640, 480), "fps": 3.0, "settings": {
        "cap_pixels_per_frame": True, "max_frames": 5}},
    {"frames": 30, "size": (320, 200), "fps": 15.0, "settings": {
        "size": {"shortest_edge": 4096, "longest_edge": 65_536}, "min_frames": 2, "resample": 2}},
    {"frames": 30, "size": (64, 64), "fps": 15.0, "settings": {
        "size": {"shortest_edge": 4_000_000, "longest_edge": 8_000_000}, "fps": 4}})  # fmt: skip
"""Frames and their rate in the file, the requested sampling, and settings that are not the defaults."""


def frames_of(case: dict[str, Any]) -> list[np.ndarray]:
    return [drawn(("photo", "gradient", "noise")[at % 3], *case["size"], seed=at) for at in range(case["frames"])]


def of_videos() -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    rows, samples = [], {}
    for number, case in enumerate(VIDEOS):
        videos = Qwen3VLVideoProcessor(**case.get("settings", {}))
        known = VideoMetadata(total_num_frames=case["frames"], fps=case["fps"])
        output = videos(
            [np.stack(frames_of(case))],
            video_metadata=[known],
            return_metadata=True,
            return_tensors="pt",
            input_data_format="channels_last",
            **case.get("asked", {}),
        )
        processor = object.__new__(Qwen3VLProcessor)
        processor.video_processor, processor.video_token = videos, "."
        processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
        text = processor.replace_video_token(output, 0)
        [[times, tall, wide]] = output["video_grid_thw"].tolist()
        # Neighbours, channels, frames -> tiles of patches row by row, frame by frame, colours of each pixel.
        values = output["pixel_values_videos"].numpy().reshape(times, tall // 2, wide // 2, 2, 2, 3, 2, 256)
        patches = values.transpose(0, 1, 3, 2, 4, 6, 7, 5).reshape(-1)
        exact = np.round((patches * 0.5 + 0.5) * 255).astype(np.uint8)
        rows.append(
            {
                **case,
                "grid": [times, tall, wide],
                "text": text,
                "sampled": [int(at) for at in output["video_metadata"][0].frames_indices],
            }
        )
        samples[f"video.{number}"] = exact[places(exact.size, number)]
    return rows, samples


if __name__ == "__main__":
    main()
