"""Pictures in prompts: what is shared, what waits, what is held, with an encoder that only counts pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.digests import digest_of
from tests.support.scripted import hashed_token, reference_tokens
from tests.unit.engine.rig import EOS, VOCAB_SIZE, Rig
from weft.engine.sleeper import Sleeper
from weft.engine.submission import split_seed
from weft.errors import EngineUnavailableError, QueueFullError, RequestError
from weft.pictures import LEAD_TOKENS, prompt_keys, token_count
from weft.request import PlacedPicture, SamplingParams
from weft.schedule import sequence

IMAGE = 5


class CountingEncoder:
    """``pieces_each`` pieces a picture; ``resident``: digests whose rows are there."""

    picture_tokens = (IMAGE,)
    row_bytes = 8

    def __init__(self) -> None:
        self.pieces_each = 3
        self.piece_s = lambda: None
        self.resident: set[bytes] = set()
        self.encoded: list[bytes] = []

    def check(self, picture: PlacedPicture) -> None:
        if not picture.data:
            raise RequestError("a picture cannot be read: it is empty", param="pictures")

    def pieces(self, picture: PlacedPicture) -> Iterator[None]:
        for _ in range(self.pieces_each):
            self.piece_s()
            yield
        self.encoded.append(picture.digest)
        self.resident.add(picture.digest)

    def drop(self, digest: bytes) -> None:
        self.resident.remove(digest)


def picture(name: str, first: int, *counts: int) -> PlacedPicture:
    """Tiles of ``counts`` rows, one token apart."""
    places = []
    for count in counts:
        places.append((first, count))
        first += count + 1
    return PlacedPicture(digest=hashlib.sha256(name.encode()).digest(), places=places, data=name.encode())


def prompt(length: int, *pictures: PlacedPicture) -> list[int]:
    tokens = [10 + at % 80 for at in range(length)]
    for one in pictures:
        for first, count in one.places:
            tokens[first : first + count] = [IMAGE] * count
    return tokens


def seeing(**named: object) -> tuple[Rig, CountingEncoder]:
    encoder = CountingEncoder()
    rig = Rig(encoder=encoder, **{"pictures_bytes": 1 << 20, "cache": True, **named})
    rig.before_execute = lambda plan: [  # type: ignore[assignment, return-value]
        _resident(encoder, one) for admission in plan.admissions for one in admission.pictures
    ]
    return rig, encoder


def _resident(encoder: CountingEncoder, one: PlacedPicture) -> None:
    assert one.digest in encoder.resident, "a sequence was admitted before its pictures"


# ---------------------------------------------------------------------- keys


@given(st.integers(0, 40), st.integers(1, 30), st.integers(0, 30), st.binary(min_size=1, max_size=4))
def test_a_prefix_that_ends_in_a_picture_has_compared_its_digest(
    before: int, rows: int, behind: int, name: bytes
) -> None:
    length = before + rows + behind
    one, other = picture(repr(name), before, rows), picture(repr(name) + "'", before, rows)
    tokens = np.array(prompt(length, one), np.int32)
    keys, others = prompt_keys(tokens, [one]), prompt_keys(tokens, [other])
    lead = min(before, LEAD_TOKENS)
    assert (keys[before - lead : before + rows] < 0).all()
    assert (keys[: before - lead] == tokens[: before - lead]).all()
    assert (keys[before + rows :] == tokens[before + rows :]).all()
    assert (keys == prompt_keys(tokens, [one])).all()
    differs = np.flatnonzero(keys != others)
    assert differs[0] == before - lead  # 2**-31 for each position, of which hypothesis finds none


def test_tiles_of_a_picture_are_one_stream_of_keys() -> None:
    tokens = np.array(prompt(60, split := picture("a", 20, 8, 8)), np.int32)
    whole = prompt_keys(np.array(prompt(60, one := picture("a", 20, 16)), np.int32), [one])
    keys = prompt_keys(tokens, [split])
    assert keys[20:28].tolist() == whole[20:28].tolist()
    assert keys[29:37].tolist() == whole[28:36].tolist()
    assert keys[28] == tokens[28]
    assert token_count(keys.tolist()) == 20 - LEAD_TOKENS


# ---------------------------------------------------------------------- the engine


def test_two_pictures_under_one_text_share_nothing_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm #43587, fastllm #750: a hit on text must not skip the picture."""

    def answers() -> list[list[int]]:
        rig, _ = seeing()
        for name in "abb":
            rig.submit(f"{name}{len(rig.answers)}", prompt(150, one := picture(name, 70, 40)), pictures=[one])
            rig.run()
        return [answer.tokens for answer in rig.answers.values()] + [
            [rig.answers[key].events[0].cached_tokens for key in rig.answers]
        ]

    first, second, again, cached = answers()
    assert first != second == again
    assert cached[0] == 0
    assert cached[1] <= 70 - LEAD_TOKENS
    assert cached[2] > 70 + 40
    monkeypatch.setattr(sequence, "prompt_keys", lambda tokens, pictures: tokens)
    with pytest.raises(EngineUnavailableError, match="does not hold the state"):  # the control
        answers()


def test_an_answer_is_that_of_the_picture_whatever_else_happens() -> None:
    rig, encoder = seeing(frame_count=4, rows_max=3, step_tokens_max=64)
    names = ("a1", "b1", "a2", "c1", "b2")
    pictures = {name: picture(name[0], 30 + 7 * at, 20, 9) for at, name in enumerate(names)}
    for at, (name, one) in enumerate(pictures.items()):
        rig.submit(name, prompt(90, one), pictures=[one], seed=at, temperature=1.0, max_tokens=60)
    rig.submit("text", 40, max_tokens=60)
    rig.run()
    assert rig.core.scheduler.preemption_count
    for at, (name, one) in enumerate(pictures.items()):
        tokens = prompt(90, one)
        keys = prompt_keys(np.array(tokens, np.int32), [one]).tolist()
        expected, _ = reference_tokens(
            keys,
            SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True),
            seed=split_seed(at, 0),
            eos_ids=(EOS,),
            max_model_len=rig.sizes.max_model_len,
            next_token=hashed_token(VOCAB_SIZE),
        )
        assert rig.tokens(name) == expected
    assert digest_of(keys) != digest_of(tokens)
    assert rig.core.pictures.stats().waiting == 0
    assert len(encoder.encoded) >= 3


def test_text_passes_pictures_that_wait_and_a_picture_is_encoded_once() -> None:
    rig, encoder = seeing()
    encoder.pieces_each = 50
    encoder.piece_s = lambda: rig.clock.advance(0.04)
    one = picture("a", 20, 10)
    for name in ("a", "b"):
        rig.submit(name, prompt(60, one), pictures=[one], n=2)
    rig.submit("text", 20, max_tokens=3)
    ended: list[str] = []
    while rig.core.has_work:
        ended += [event.request_id for event in rig.step() if event.finish_reason]
    assert ended[0] == "text"
    assert encoder.encoded == [one.digest]
    assert rig.core.pictures.stats().reused == 3


def test_rows_of_sequences_that_live_stay_and_others_go_by_age() -> None:
    """Room for the rows of two pictures of ten."""
    rig, encoder = seeing(pictures_bytes=2 * 10 * 8)
    for name in "abc":
        rig.submit(name, prompt(60, one := picture(name, 20, 10)), pictures=[one])
        rig.run()
    assert encoder.resident == {picture(name, 20, 10).digest for name in "bc"}
    large = picture("large", 20, 30)
    rig.submit("large", prompt(60, large), pictures=[large], max_tokens=40)
    rig.submit("d", prompt(60, one := picture("d", 20, 10)), pictures=[one])
    rig.step()
    rig.step()
    assert encoder.resident == {large.digest}, "alone, a sequence may hold more than the budget"
    rig.run()
    assert rig.answers["d", 0].reason == "length"
    assert rig.core.pictures.stats().bytes <= 2 * 10 * 8


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_cancelled_sequence_gives_its_rows_up(steps: int) -> None:
    rig, encoder = seeing(pictures_bytes=10 * 8, overlap=True)
    encoder.pieces_each = 4
    rig.before_execute = lambda plan: None  # a step in flight has rows that were dropped: runner/pictures
    one = picture("a", 20, 10)
    rig.submit("a", prompt(60, one), pictures=[one], max_tokens=50)
    for _ in range(steps):
        rig.step()
    rig.core.cancel("a")
    rig.submit("b", prompt(60, other := picture("b", 20, 10)), pictures=[other])
    rig.run()
    assert rig.answers["b", 0].reason == "length"
    assert encoder.resident == {other.digest}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_picture_that_cannot_be_encoded_ends_only_the_sequences_that_show_it(overlap: bool) -> None:
    rig, encoder = seeing(overlap=overlap)

    def no_room() -> None:
        if encoder.encoded:
            raise RequestError("a picture of 9 patches does not fit", param="pictures")

    encoder.piece_s = no_room
    for name, count in (("a", 1), ("b", 2)):
        rig.submit(name, prompt(60, one := picture(name, 20, 10)), pictures=[one], n=count)
    rig.submit("text", prompt(10), max_tokens=30)
    rig.run()
    for at in range(2):
        last = rig.answers["b", at].events[-1]
        assert (last.finish_reason, last.error, last.own_fault) == (
            "error",
            "a picture of 9 patches does not fit",
            True,
        )
    assert (rig.answers["a", 0].reason, rig.answers["text", 0].reason) == ("length", "length")
    rig.submit("b again", prompt(60, one), pictures=[one])
    rig.run()
    assert rig.answers["b again", 0].reason == "error", "alone, with nothing else to do"
    rig.core.audit()


def test_an_engine_asleep_holds_no_rows() -> None:
    rig, encoder = seeing()
    rig.submit("a", prompt(60, one := picture("a", 20, 10)), pictures=[one])
    rig.run()
    assert encoder.resident == {one.digest}
    Sleeper(rig.core).sleep()
    assert not encoder.resident
    assert rig.core.pictures.stats().bytes == 0
    Sleeper(rig.core).wake_up()
    rig.submit("b", prompt(60, one), pictures=[one])
    assert rig.run()["b", 0].tokens == rig.answers["a", 0].tokens


def test_decodes_wait_for_half_of_the_longest_step_at_most() -> None:
    """A picture of 40 pieces of a tenth of a second, beside a sequence that decodes: steps may take 2 s."""
    rig, encoder = seeing(max_step_s=2.0)
    encoder.pieces_each, encoder.piece_s = 40, lambda: rig.clock.advance(0.1)
    rig.submit("text", prompt(10), max_tokens=30)
    rig.step()
    rig.submit("a", prompt(60, one := picture("a", 20, 10)), pictures=[one])
    gaps = []
    while not encoder.resident:
        start_s = rig.clock()
        rig.step()
        gaps.append(rig.clock() - start_s)
    assert len(gaps) >= 4, "the picture held the decodes up"
    assert max(gaps) <= 2.0 + 0.1 + 1e-9, "a step of the rig takes one second, and a piece ends"


@pytest.mark.parametrize(
    ("pictures", "words"),
    [
        ([PlacedPicture(digest=b"1", places=[(5, 5)], data=b"x")], "a digest of 1 bytes"),
        ([picture("a", 55, 10)], "from position 55 on"),
        ([picture("a", 20, 10), picture("b", 25, 5)], "the rows before end at 30"),
        ([PlacedPicture(digest=bytes(32), places=[(40, 4)], data=b"x")], "not all one of the tokens 5"),
        ([PlacedPicture(digest=bytes(32), places=[(20, 10)], data=b"")], "it is empty"),
    ],
)
def test_pictures_that_do_not_fit_the_prompt_are_refused(pictures: list[PlacedPicture], words: str) -> None:
    rig, _ = seeing()
    with pytest.raises(RequestError, match=words):
        rig.submit("a", prompt(60, picture("a", 20, 10)), pictures=pictures)
    assert not rig.core.has_work


def test_a_model_of_text_refuses_and_the_waiting_pixels_are_bounded() -> None:
    one = picture("a", 20, 10)
    with pytest.raises(RequestError, match="reads text only"):
        Rig().submit("a", prompt(60, one), pictures=[one])
    rig, _ = seeing()
    large = PlacedPicture(digest=one.digest, places=one.places, data=bytes(200 << 20))
    rig.submit("a", prompt(60, one), pictures=[large])
    other = PlacedPicture(digest=bytes(32), places=one.places, data=bytes(100 << 20))
    with pytest.raises(QueueFullError, match="wait to be encoded"):
        rig.submit("b", prompt(60, one), pictures=[other])
    largest = PlacedPicture(digest=bytes(31) + b"x", places=one.places, data=bytes(300 << 20))
    rig.run()
    rig.submit("a", prompt(60, one), pictures=[largest])
    rig.submit("text", 20, max_tokens=3)  # a text waits for no pixels, however many wait
    rig.run()
    rig.submit("b", prompt(60, one), pictures=[other])
    assert rig.run()["b", 0].reason == "length"
