"""Pictures over ranks: the first encodes, the others get its rows; the answers are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fixtures.vision_checkpoints import vision_checkpoint
from tests.oracle.test_pictures import BIG, CLIP, FLAT, SAMPLING, SMALL, TALL, TURNING, Seeing, seeing
from tests.ranks.engines import engine
from weft.assemble.assembly import Assembled
from weft.engine.sleeper import Sleeper
from weft.ranks.executor import RankedPictures
from weft.ranks.messages import RankPicture
from weft.ranks.peers import Peers
from weft.request import PlacedPicture, Request


def asked(name: str) -> list[Seeing]:
    """A video is among them where the model reads any."""
    mixed = (FLAT, CLIP, TALL) if name in TURNING else (FLAT, TALL, FLAT)
    return [
        seeing(name, 70, (BIG,), 9, seed=1),
        seeing(name, 20, mixed, 12, seed=6),
        seeing(name, 3, (SMALL,), 60, seed=2),
    ]


def answers(assembled: Assembled, cases: list[Seeing]) -> list[tuple[list[int], int]]:
    """(tokens, cached tokens) of each."""
    core, tokens, cached = assembled.core, [[] for _ in cases], [0] * len(cases)
    for number, case in enumerate(cases):
        core.submit(
            Request(request_id=str(number), prompt_tokens=case.tokens, sampling=SAMPLING, pictures=case.pictures)
        )
    while core.has_work:
        for event in core.step():
            tokens[int(event.request_id)].extend(event.tokens)
            cached[int(event.request_id)] = event.cached_tokens
    return list(zip(tokens, cached, strict=True))


@pytest.mark.parametrize(
    ("name", "overlap"),
    [("lfm2_vl", "off"), ("qwen3_5_vl", "off"), ("qwen3_5_vl", "on"), ("qwen3_5_moe_vl", "off"), ("lfm3_vl", "off")],
)
def test_two_ranks_say_of_pictures_what_transformers_says(name: str, overlap: str, two: Peers) -> None:
    """Cold, from a cached prefix, after sleep, and encoded again after the rows were dropped on all ranks."""
    cases = asked(name)
    ranked = engine(vision_checkpoint(name), peers=two, overlap=overlap)
    try:
        first = answers(ranked, cases)
        assert [tokens for tokens, _ in first] == [case.truth.tokens for case in cases]
        again = answers(ranked, cases)
        assert [tokens for tokens, _ in again] == [tokens for tokens, _ in first]
        assert all(cached for _, cached in again[:2])
        sleeper = Sleeper(ranked.core)
        for level in (1, 2) if (name, overlap) == ("qwen3_5_vl", "off") else ():
            sleeper.sleep(level)
            sleeper.wake_up()
            assert answers(ranked, cases[1:2]) == [(first[1][0], 0)], (
                "encoded again, the second time by a tower that was read again"
            )
        ranked.core.pictures.forget()
        encoded = ranked.core.pictures.stats().encoded
        other = [seeing(name, 71, (BIG,), 9, seed=4)]
        assert [tokens for tokens, _ in answers(ranked, other)] == [other[0].truth.tokens]
        assert ranked.core.pictures.stats().encoded == encoded + 1
    finally:
        ranked.core.close()


def test_four_ranks_say_of_pictures_what_transformers_says(four: Peers) -> None:
    """Each of three ranks gets the rows."""
    cases = asked("lfm2_vl")
    ranked = engine(vision_checkpoint("lfm2_vl"), peers=four)
    try:
        for _ in range(2):
            assert [tokens for tokens, _ in answers(ranked, cases)] == [case.truth.tokens for case in cases]
    finally:
        ranked.core.close()


def test_rows_that_another_rank_has_wrong_are_noticed(two: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a rank computes with what it was sent."""

    def pieces(self: RankedPictures, picture: PlacedPicture) -> Iterator[None]:
        yield from self._own.pieces(picture)
        data, grids = self._own.encoded(picture.digest)
        self._peers.tell(RankPicture(picture.digest, data[::-1], grids))

    monkeypatch.setattr(RankedPictures, "pieces", pieces)
    case = asked("lfm2_vl")[0]
    ranked = engine(vision_checkpoint("lfm2_vl"), peers=two)
    try:
        assert answers(ranked, [case])[0][0] != case.truth.tokens
    finally:
        ranked.core.close()
