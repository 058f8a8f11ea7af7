"""A picture and a video in requests whose engine gets kill -9: the same tokens, and the store has their
prefixes then."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fixtures.vision_checkpoints import vision_checkpoint
from tests.fleet.test_resume import resumes
from tests.server.running import RunningServer, eventually, running_server
from tests.server.test_pictures import CLIP, QWEN_TEMPLATE, SHOWN, expected, frame_urls
from tests.support.given_costs import GIVEN_COSTS

NEW_TOKENS = 12
"""As ``expected`` has them; the answers are longer."""
ASKED: list[Any] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "compare"},
            SHOWN,
            {"type": "video", "video": frame_urls(*CLIP)},
            {"type": "text", "text": "the dog and the cat"},
        ],
    }
]
SIZES = ((200, 120), CLIP)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Positions of Qwen3.5 come from the places of pictures, so a resumption that forgets them shows."""
    folder = tmp_path_factory.mktemp("kill")
    (folder / "chat.jinja").write_text(QWEN_TEMPLATE)
    engine = {
        "model": str(vision_checkpoint("qwen3_5_vl")),
        "memory": "32MB",
        "threads": 1,
        "max_model_len": 1024,
        "store": str(folder / "store"),
        "store_size": "256MB",
        "step_costs": GIVEN_COSTS,
    }
    with running_server(
        "", engine=engine, server={"chat_template": str(folder / "chat.jinja"), "restarts": 100}
    ) as running:
        yield running


def stream(server: RunningServer, kill_at: int | None, **more: Any) -> list[int]:
    """The tokens of an answer whose engine is killed once ``kill_at`` of them have come; 0: at once."""
    tokens: list[int] = []
    chunks = server.client().chat.completions.create(
        model="default",
        messages=ASKED,
        max_tokens=120,
        temperature=0.8,
        seed=3,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True, **more},
    )
    killed = kill_at is None
    for chunk in chunks:
        for choice in chunk.choices:
            tokens += getattr(choice, "token_ids", None) or []
        if not killed and len(tokens) >= (kill_at or 0):
            os.kill(server.engine_pid(), signal.SIGKILL)
            killed = True
    return tokens


def test_an_answer_about_pictures_is_the_same_when_its_engine_is_killed(server: RunningServer) -> None:
    first = server.client().chat.completions.create(
        model="default",
        messages=ASKED,
        max_tokens=NEW_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    prompt: list[int] = first.prompt_token_ids  # type: ignore[attr-defined]
    truth = expected(prompt, *SIZES, name="qwen3_5_vl")
    assert first.choices[0].token_ids == truth  # type: ignore[attr-defined]
    undisturbed = stream(server, None)
    assert len(undisturbed) == 120
    before = resumes(server)
    for kill_at in (0, 40):
        assert stream(server, kill_at) == undisturbed
        assert eventually(lambda: server.get("/health").json()["status"] == "ok")
    assert resumes(server) > before, "nothing was killed in time"

    # Nothing of the new engine's memory: what is found behind the pictures comes from the store.
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert eventually(lambda: server.get("/health").json() == {"status": "ok"})
    again = server.client().chat.completions.create(
        model="default",
        messages=ASKED,
        max_tokens=NEW_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert again.choices[0].token_ids == truth  # type: ignore[attr-defined]
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 64
