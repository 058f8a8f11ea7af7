"""Frames, times, sizes and pixels of videos are those of transformers' processor, made by
``tests.support.library_pictures``; files are written by the library that reads them."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.video_utils import read_video_pyav

from tests.support.library_pictures import FILE, frames_of, places
from tests.support.pictures import drawn, encoded, filmed
from tests.unit.images.test_qwen3_5 import TOWER
from weft.errors import CheckpointError, RequestError
from weft.images.decoding import ImageLimits
from weft.images.picture import Picture, Pixels
from weft.images.settings import VideoSettings, read_settings, read_video_settings
from weft.images.video import Sampling, prepare, sampled
from weft.images.worker import PictureStart, read_video

STORED = np.load(FILE)
ROWS: list[dict[str, Any]] = json.loads(bytes(STORED["video_rows"]))
TOWER_OF_VIDEOS = dataclasses.replace(TOWER, video_token_id=401)
FRAMES = [drawn("photo", 96, 64, seed=seed) for seed in range(40)]


def start_of(directory: Path, written: dict[str, Any] | None = None, **limits: int) -> PictureStart:
    if written is not None:
        (directory / "video_preprocessor_config.json").write_text(json.dumps(written))
    return PictureStart(
        read_settings(directory, TOWER), ImageLimits(**limits), read_video_settings(directory, TOWER_OF_VIDEOS)
    )


def settings_of(directory: Path, written: dict[str, Any]) -> VideoSettings:
    videos = start_of(directory, written).videos
    assert videos is not None
    return videos


def made_of(row: dict[str, Any], directory: Path) -> tuple[list[int], Picture]:
    settings, frames = settings_of(directory, row.get("settings", {})), frames_of(row)
    taken = sampled(row["frames"], row["fps"], Sampling(**row.get("asked", {})), settings)
    return taken, prepare([frames[at] for at in taken], [at / row["fps"] for at in taken], settings)


def worst_step(picture: Picture, number: int) -> int:
    """In steps of 8 bits."""
    values = np.concatenate([tile.patches.reshape(-1) for tile in picture.tiles])
    stored = STORED[f"video.{number}"].astype(int)
    return int(np.abs(values[places(values.size, number)] - stored).max())


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_a_video_is_what_the_processor_makes_of_it(number: int, tmp_path: Path) -> None:
    row = ROWS[number]
    taken, video = made_of(row, tmp_path)
    assert taken == row["sampled"]
    assert [len(video.tiles), video.tiles[0].rows, video.tiles[0].columns] == row["grid"]
    assert "".join(part if isinstance(part, str) else "." * part for part in video.text) == row["text"]
    assert worst_step(video, number) == 0


def test_frames_in_another_order_are_noticed(tmp_path: Path) -> None:
    _, video = made_of(ROWS[0], tmp_path)
    assert worst_step(dataclasses.replace(video, tiles=video.tiles[::-1]), 0) > 1


def test_a_digest_is_of_all_frames_and_settings(tmp_path: Path) -> None:
    settings, seconds = settings_of(tmp_path, {}), [0.0, 0.5, 1.0]

    def digest(frames: list[Pixels], settings: VideoSettings = settings) -> bytes:
        return prepare(frames, seconds[: len(frames)], settings).digest

    other = [FRAMES[0], FRAMES[1], FRAMES[2].copy()]
    other[2][-1, -1, -1] ^= 1
    variants = [
        digest(FRAMES[:3]),
        digest(FRAMES[:2]),
        digest(other),
        digest(FRAMES[2::-1]),
        digest(FRAMES[:3], dataclasses.replace(settings, max_pixels=1 << 16)),
    ]
    assert len(set(variants)) == len(variants)
    assert digest(list(map(np.copy, FRAMES[:3]))) == variants[0]
    later = prepare(FRAMES[:3], [5.0, 6.0, 7.0], settings)
    assert later.digest == variants[0], "times are text: the rows are the same"
    assert later.text[0] == "<5.5 seconds><|vision_start|>"


def test_a_list_of_frames_is_taken_whole(tmp_path: Path) -> None:
    start = start_of(tmp_path, {})
    files: list[str | bytes] = [encoded(frame) for frame in FRAMES[:5]]
    video = read_video(files, Sampling(fps=4), start)
    assert video.kind == "video"
    assert [part for part in video.text if isinstance(part, str)] == [
        "<0.1 seconds><|vision_start|>",
        "<|vision_end|><0.6 seconds><|vision_start|>",
        "<|vision_end|><1.0 seconds><|vision_start|>",
        "<|vision_end|>",
    ]
    assert len(read_video(files, Sampling(), start).tiles) == 3
    texts = [base64.b64encode(encoded(frame)).decode() for frame in FRAMES[:5]]
    joined = read_video(f"data:video/jpeg;base64,{','.join(texts)}", Sampling(fps=4), start)
    alike = read_video([f"data:image/png;base64,{one}" for one in texts], Sampling(fps=4), start)
    assert joined.to_bytes() == alike.to_bytes()
    assert joined.digest == video.digest
    with pytest.raises(RequestError, match="frame 1 of the video has 90 x 60 pixels, the first 96 x 64"):
        read_video([files[0], encoded(drawn("photo", 90, 60))], Sampling(), start)
    with pytest.raises(RequestError, match="frame 1: the picture is in no known format"):
        read_video([files[0], b"GIF9"], Sampling(), start)
    with pytest.raises(RequestError, match="has 1 frame; it needs 2"):
        read_video(files[:1], Sampling(), start)
    with pytest.raises(RequestError, match=r"5 frames; the limit is 4 \(limits.video_frames\)"):
        read_video(files, Sampling(), start_of(tmp_path, video_frames=4))


@pytest.mark.parametrize(
    ("form", "codec"), [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4"), ("matroska", "mjpeg")]
)
def test_frames_of_a_file_are_near_those_that_were_filmed(form: str, codec: str, tmp_path: Path) -> None:
    start = start_of(tmp_path, {})
    assert start.videos is not None
    gradient = drawn("gradient", 96, 64)
    steady = [gradient] * 20 + [gradient[::-1]] * 20
    video = read_video(filmed(steady, form, codec, fps=20), Sampling(fps=3), start)
    taken = sampled(40, 20, Sampling(fps=3), start.videos)
    assert taken == [0, 8, 16, 23, 31, 39]
    whole = prepare([steady[at] for at in taken], [at / 20 for at in taken], start.videos)
    assert video.text == whole.text
    gaps = [
        float(np.abs(one.patches.astype(int) - other.patches).mean())
        for one, other in zip(video.tiles, whole.tiles, strict=True)
    ]
    assert max(gaps) < 8, "of 255: codecs lose some"
    assert float(np.abs(video.tiles[0].patches.astype(int) - whole.tiles[-1].patches).mean()) > 16
    again = read_video(filmed(steady, form, codec, fps=20), Sampling(fps=3), start)
    assert again.digest == video.digest


def test_frames_of_a_file_are_those_that_transformers_reads(tmp_path: Path) -> None:
    start, asked, data = start_of(tmp_path, {}), Sampling(fps=3), filmed(FRAMES, fps=20)
    assert start.videos is not None
    taken = sampled(40, 20, asked, start.videos)
    pixels, _ = read_video_pyav(io.BytesIO(data), lambda metadata: np.array(taken))
    truth = prepare(list(pixels), [at / 20 for at in taken], start.videos)
    assert read_video(data, asked, start).to_bytes() == truth.to_bytes()


def test_a_film_that_is_cut_short_is_read_by_the_frames_that_it_has(tmp_path: Path) -> None:
    data = filmed(FRAMES, "avi", "mpeg4", fps=20)
    index = data.rindex(b"idx1")
    cut = data[: index // 2]
    video = read_video(cut, Sampling(), start_of(tmp_path, {}))
    assert 2 <= len(video.tiles) * 2 <= 40


def test_a_phone_that_was_held_upright_films_upright(tmp_path: Path) -> None:
    video = read_video(filmed(FRAMES[:8], "mp4", "libx264", fps=4, rotation=90), Sampling(), start_of(tmp_path, {}))
    assert (video.width, video.height) == (64, 96)


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    ("data", "limits", "words"),
    [
        (PLAYLIST, {}, "no known format; MP4, MOV, WebM"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", {}, "no known format"),
        (b"\x00\x00\x00\x20ftypisom" + PLAYLIST, {}, "cannot be decoded"),
        (b"", {}, "no known format"),
        (encoded(FRAMES[0]), {}, "no known format"),
        (filmed(FRAMES[:8], fps=4), {"video_bytes": 999}, r"the limit is .* \(limits.video_bytes\)"),
        (filmed(FRAMES[:8], fps=4), {"image_side": 90}, r"the video is 96 x 64 pixels; .* \(limits.image_side\)"),
        (filmed(FRAMES[:8], fps=4), {"image_pixels": 999}, r"\(limits.image_pixels\)"),
        (
            filmed(FRAMES[:8], fps=1),
            {"video_frames": 3},
            r"4 frames of the video would be read; the limit is 3 \(limits.video_frames\): lower fps or max_frames",
        ),
        (filmed(FRAMES[:8], "mp4", "libx264rgb", fps=4)[:400], {}, "cannot be decoded"),
        (filmed(FRAMES[:8], "avi", "ffv1", fps=4), {}, "cannot be decoded"),
    ],
)
def test_a_file_that_is_not_read_is_one_line(data: bytes, limits: dict[str, int], words: str, tmp_path: Path) -> None:
    """The decoder of the last one is no common one: what strangers send reaches few."""
    with pytest.raises(RequestError, match=words) as caught:
        read_video(data, Sampling(max_frames=4), start_of(tmp_path, {}, **limits))
    assert "\n" not in caught.value.message


def test_a_spoiled_film_is_read_or_refused(tmp_path: Path) -> None:
    start, random, refused = start_of(tmp_path, {}), np.random.default_rng(0), 0
    films = [filmed(FRAMES[:6], fps=4), filmed(FRAMES[:6], "webm", "libvpx-vp9", fps=4)]
    for number in range(60):
        spoiled = bytearray(films[number % 2])
        for place in random.integers(0, len(spoiled), 12):
            spoiled[place] = int(random.integers(0, 256))
        try:
            assert read_video(bytes(spoiled), Sampling(), start).rows
        except RequestError as error:
            refused += "\n" not in error.message
    assert refused


def test_without_the_library_frames_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(RequestError, match=r"pip install 'weft\[video\]'\); send frames as pictures"):
        read_video(filmed_before, Sampling(), start_of(tmp_path, {}))


filmed_before = filmed(FRAMES[:8], fps=4)


def test_silence_means_what_the_library_says(tmp_path: Path) -> None:
    assert settings_of(tmp_path, {}) == VideoSettings()
    assert read_video_settings(tmp_path, TOWER) is None
    (tmp_path / "video_preprocessor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"size": {"shortest_edge": 4096, "longest_edge": 8192}})
    )
    found = read_video_settings(tmp_path, TOWER_OF_VIDEOS)
    assert found == VideoSettings(min_pixels=4096, max_pixels=8192), "that of pictures stands in"
    (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": {"fps": 3.5}}))
    assert read_video_settings(tmp_path, TOWER_OF_VIDEOS) == VideoSettings(fps=3.5)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"patch_size": 14}, "patch_size is 14: config.json has 16"),
        ({"fps": 0}, "fps is 0: it must be a num"),
        ({"temporal_patch_size": 1}, "temporal_patch_size is 1"),
        ({"do_resize": False}, "do_resize is False"),
        ({"image_mean": [0.4, 0.5, 0.5]}, "pictures have"),
        ({"min_frames": "4"}, "a whole number"),
        ({"size": {"shortest_edge": 8192, "longest_edge": 4096}}, "the least first"),
    ],
)
def test_a_setting_that_is_not_served_is_named(tmp_path: Path, written: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"video_preprocessor_config.json: .*{reason}"):
        settings_of(tmp_path, written)
