"""Pictures over HTTP: each dialect's form, the same tokens as transformers, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from PIL import Image

from tests.fixtures.vision_checkpoints import (
    drawn_frames,
    greedy_of_pixels,
    prepared,
    vision_checkpoint,
    vision_settings,
    vision_start,
)
from tests.hostile.test_browser import CHROMIUM
from tests.server.browser import Browser
from tests.server.running import RunningServer, eventually, running_server
from tests.support.pictures import drawn, encoded, filmed
from weft.errors import RequestError
from weft.images.decoding import ImageLimits
from weft.images.video import Sampling
from weft.images.worker import read_picture, read_video
from weft.server.page import page_files

NEW_TOKENS = 12
SIZE = (200, 120)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPERATOR = {"Authorization": "Bearer boss"}


def png(width: int, height: int) -> str:
    """Base64."""
    return base64.b64encode(encoded(drawn("photo", width, height, seed=width))).decode()


URL = f"data:image/png;base64,{png(*SIZE)}"
SHOWN = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
ASKED = [{"role": "user", "content": [SHOWN, {"type": "text", "text": "the dog and the cat"}]}]


QWEN_TEMPLATE = TEMPLATE.replace(
    "<image>",
    (
        "<|vision_start|><|image_pad|><|vision_end|>"
        "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    ),
)
CLIP = (60, 50, 5)


def frame_urls(*clip: int) -> list[str]:
    return [f"data:image/png;base64,{base64.b64encode(encoded(frame)).decode()}" for frame in drawn_frames(*clip)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    engine = {"model": str(vision_checkpoint("lfm2_vl")), "memory": "32MB", "threads": 1, "max_model_len": 512}
    with running_server(
        "",
        engine=engine,
        server={
            "file_store": str(template.parent / "files"),
            "chat_template": str(template),
            "images": 3,
            "image_side": 3000,
            "show_text": True,
            "operator_key": ["boss"],
            "media_domains": ["localhost"],
        },
    ) as running:
        yield running


def post(server: RunningServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def chat(server: RunningServer, messages: list[Any], **more: Any) -> dict[str, Any]:
    body = {
        "model": "default",
        "messages": messages,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }
    answer = post(server, "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def expected(prompt: list[int], *sizes: tuple[int, ...], name: str = "lfm2_vl") -> list[int]:
    """Greedy tokens by transformers, of pixels."""
    pictures = [prepared(name, *size) for size in sizes or (SIZE,)]
    return greedy_of_pixels(name, prompt, pictures, NEW_TOKENS).tokens


def test_an_answer_about_a_picture_is_that_of_transformers(server: RunningServer) -> None:
    first = chat(server, ASKED)
    prompt = first["prompt_token_ids"]
    assert first["choices"][0]["token_ids"] == expected(prompt)
    rows = read_picture(URL, vision_settings("lfm2_vl"), ImageLimits()).rows
    assert first["usage"]["prompt_tokens"] == len(prompt) > rows > 30
    again = chat(server, ASKED)
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > rows
    other = chat(
        server,
        [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(120, 200)}"}},
                    {"type": "text", "text": "the dog and the cat"},
                ],
            }
        ],
    )
    assert other["choices"][0]["token_ids"] == expected(other["prompt_token_ids"], (120, 200))
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] < 20


def test_each_dialect_has_the_same_prompt(server: RunningServer) -> None:
    count = chat(server, ASKED)["usage"]["prompt_tokens"]
    text = "the dog and the cat"
    responses = post(
        server,
        "/v1/responses",
        {
            "model": "default",
            "max_output_tokens": 4,
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": text}],
                }
            ],
        },
    ).json()
    assert responses["usage"]["input_tokens"] == count
    source = {"type": "base64", "media_type": "image/png", "data": png(*SIZE)}
    asked = {
        "model": "default",
        "max_tokens": 4,
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": text}]}
        ],
    }
    usage = post(server, "/v1/messages", asked).json()["usage"]
    assert (
        sum(usage[name] for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")) == count
    )
    assert post(server, "/v1/messages/count_tokens", asked).json() == {"input_tokens": count}
    shown = {"model": "default", "stream": False, "options": {"num_predict": 4}}
    message = {"role": "user", "content": text, "images": [png(*SIZE)]}
    assert post(server, "/api/chat", {**shown, "messages": [message]}).json()["prompt_eval_count"] == count
    assert (
        post(server, "/api/generate", {**shown, "prompt": text, "images": message["images"]}).json()[
            "prompt_eval_count"
        ]
        == count
    )
    tokenized = post(server, "/tokenize", {"model": "default", "messages": ASKED}).json()
    assert tokenized["count"] == count
    seen = read_picture(URL, vision_settings("lfm2_vl"), ImageLimits())
    assert [span["rows"] for span in tokenized["spans"]] == [part for part in seen.text if isinstance(part, int)]
    image = tokenized["tokens"][tokenized["spans"][0]["offset"]]
    rows = [at for span in tokenized["spans"] for at in range(span["offset"], span["offset"] + span["rows"])]
    assert rows == [at for at, token in enumerate(tokenized["tokens"]) if token == image]
    assert {(span["part"], span["kind"], span["digest"]) for span in tokenized["spans"]} == {
        ("messages[0].content[0]", "image", seen.digest.hex())
    }
    assert "spans" not in post(server, "/tokenize", {"model": "default", "prompt": "hello"}).json()


def test_the_clients_of_openai_anthropic_and_ollama_send_pictures(server: RunningServer) -> None:
    import anthropic  # here: it has 3,200 modules, two seconds of each worker

    count, text = chat(server, ASKED)["usage"]["prompt_tokens"], "the dog and the cat"
    client = server.client()
    chatted = client.chat.completions.create(model="default", messages=ASKED, max_tokens=2)
    assert chatted.usage is not None
    assert chatted.usage.prompt_tokens == count
    said = client.responses.create(
        model="default",
        max_output_tokens=2,
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": URL, "detail": "auto"},
                    {"type": "input_text", "text": text},
                ],
            }
        ],
    )
    assert said.usage is not None
    assert said.usage.input_tokens == count
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        answer = claude.messages.create(
            model="default",
            max_tokens=2,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png(*SIZE)}},
                        {"type": "text", "text": text},
                    ],
                }
            ],
        )
        assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == count
    told = ollama.Client(host=server.url).chat(
        model="default",
        options={"num_predict": 2},
        messages=[{"role": "user", "content": text, "images": [base64.b64decode(png(*SIZE))]}],
    )
    assert told.prompt_eval_count == count


def test_a_batch_has_pictures_in_its_lines(server: RunningServer) -> None:
    """By a client without a key: operators alone have some here."""
    client, expected_count = server.client(), chat(server, ASKED)["usage"]["prompt_tokens"]
    bodies = [
        {"model": "default", "messages": messages, "max_tokens": 3}
        for messages in (ASKED, shows("data:image/png;base64,AAAA"))
    ]
    content = b"\n".join(
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()
        for number, body in enumerate(bodies)
    )
    file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert eventually(lambda: client.batches.retrieve(made.id).status not in ("validating", "in_progress"))
    batch = client.batches.retrieve(made.id)
    assert batch.status == "completed", batch.errors
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    good, bad = (json.loads(client.files.content(name).text) for name in (batch.output_file_id, batch.error_file_id))
    assert good["response"]["body"]["usage"]["prompt_tokens"] == expected_count
    assert bad["response"]["status_code"] == 400
    assert "in no known format" in json.dumps(bad)


def test_a_tool_returns_a_picture_in_each_dialect(server: RunningServer) -> None:
    """As a screenshot that an agent took."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    count = chat(
        server,
        [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "here"}, SHOWN]},
        ],
    )["usage"]
    source = {"type": "base64", "media_type": "image/png", "data": png(*SIZE)}
    asked = {
        "model": "default",
        "max_tokens": 4,
        "messages": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "text", "text": "here"}, {"type": "image", "source": source}],
                    }
                ],
            },
        ],
    }
    assert post(server, "/v1/messages/count_tokens", asked).json() == {"input_tokens": count["prompt_tokens"]}
    assert post(server, "/v1/messages", asked).status_code == 200
    answer = post(
        server,
        "/v1/responses",
        {
            "model": "default",
            "max_output_tokens": 4,
            "input": [
                {"role": "user", "content": "look"},
                {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c1",
                    "output": [{"type": "input_text", "text": "here"}, {"type": "input_image", "image_url": URL}],
                },
            ],
        },
    ).json()
    assert answer["usage"]["input_tokens"] == count["prompt_tokens"]


@pytest.mark.parametrize(
    ("blocks", "place", "words"),
    [
        (
            [{"type": "image", "source": {"type": "url", "url": "https://example.com/cat.png"}}],
            "messages.0.content.0",
            "'example.com', which --media-domains does not name",
        ),
        (
            [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
                    ],
                }
            ],
            "messages.0.content.0.content.0",
            "in no known format",
        ),
        (
            [{"type": "image", "source": {"type": "file", "file_id": "f"}}],
            "messages.0.content.0.source",
            "it is base64, with media_type and data, or url, with url",
        ),
    ],
)
def test_messages_name_the_block_of_a_picture_as_its_client_counts(
    server: RunningServer, blocks: list[Any], place: str, words: str
) -> None:
    answer = post(
        server,
        "/v1/messages",
        {"model": "default", "max_tokens": 4, "system": "be brief", "messages": [{"role": "user", "content": blocks}]},
    )
    assert answer.status_code == 400, answer.text
    said = answer.json()["error"]["message"]
    assert said.startswith(place)
    assert words in said


def test_a_conversation_goes_on_behind_its_picture(server: RunningServer) -> None:
    first = chat(server, ASKED)
    said = first["choices"][0]["message"]["content"]
    longer = [*ASKED, {"role": "assistant", "content": said}, {"role": "user", "content": "and the bird?"}]
    encoded_before = metric(server, "pictures_encoded_total")
    answer = chat(server, longer, stream=False)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 60
    assert metric(server, "pictures_encoded_total") == encoded_before
    assert metric(server, "picture_rows_bytes") > 0


def metric(server: RunningServer, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", headers=OPERATOR).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if name in line and line[0] != "#")


def shows(url: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (
            shows("https://example.com/cat.png"),
            "messages[0].content[0]: the file is at the host 'example.com', which --media-domains does not name",
        ),
        (shows("https://localhost/cat.png"), "'localhost' has an address that is not public"),
        (shows("http://localhost/cat.png"), "files are fetched only by https"),
        (shows("file:///etc/passwd"), "it must be a data: URL"),
        (shows("/etc/passwd"), "it must be a data: URL"),
        ([{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}], "expected an object with url"),
        (shows("data:image/png;base64,AAAA"), "in no known format"),
        (shows("data:image/png;base64,%%%"), "the data: URL is not base64"),
        (shows("data:image/png,abc"), "it must be data:image/TYPE;base64,DATA"),
        (shows(f"data:image/png;base64,{png(*SIZE)[:400]}"), "the picture cannot be decoded"),
        (shows(f"data:image/png;base64,{png(4000, 1)}"), "the limit is 3,000 on a side (limits.image_side)"),
        (
            [{"role": "user", "content": [{"type": "video", "video": [URL, URL]}]}],
            "messages[0].content[0] is a video; this model reads text and pictures: send some of the frames",
        ),
        (shows(7), "messages[0].content[0].image_url: expected an object with url"),
        (
            [*ASKED, *ASKED, *ASKED, *ASKED],
            "the conversation has 4 pictures and videos; the limit is 3 (limits.images)",
        ),
        ([{"role": "user", "content": [SHOWN, {"type": "text", "text": "word " * 600}]}], "--max-model-len"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "dog " * 510}, SHOWN]}],
            "messages[0].content[1]: this picture has rows up to token",
        ),
    ],
)
def test_a_picture_that_cannot_be_served_is_one_line(server: RunningServer, messages: list[Any], words: str) -> None:
    answer = post(server, "/v1/chat/completions", {"model": "default", "messages": messages, "max_tokens": 4})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert chat(server, ASKED)["choices"][0]["token_ids"]


def test_a_text_that_spells_the_token_of_a_picture_is_text(server: RunningServer) -> None:
    """A picture, and words about its token: the text before and behind it is shown to the model as it is."""
    text = {"type": "text", "text": "what is <image>?"}
    counts = []
    for content in ([SHOWN, text], [text, SHOWN], [SHOWN]):
        answer = chat(server, [{"role": "user", "content": content}])
        counts.append(answer["usage"]["prompt_tokens"])
    assert counts[0] == counts[1] > counts[2] + 4


def test_the_room_for_pictures_is_said_at_the_start(server: RunningServer) -> None:
    assert "rows of those that were encoded, at most" in server.output


def test_the_page_of_prefixes_shows_text_around_a_picture(server: RunningServer) -> None:
    """Rows of pictures are negative keys there, and no tokenizer decodes those."""
    for _ in range(2):
        chat(server, ASKED)

    def texts() -> list[str]:
        shape = httpx.get(f"{server.url}/v1/cache", headers=OPERATOR).json()["tree"]
        return [prefix["text"] for prefix in shape["prefixes"]]

    assert eventually(lambda: "<|img_row_1_col_2|>" in texts()), texts()


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_that_slept_reads_the_same_picture_again(server: RunningServer, level: int) -> None:
    first = chat(server, ASKED)["choices"][0]["token_ids"]
    assert httpx.post(f"{server.url}/sleep?level={level}", headers=OPERATOR, timeout=60).status_code == 200
    assert httpx.post(f"{server.url}/wake_up", headers=OPERATOR, timeout=60).status_code == 200
    again = chat(server, ASKED)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["choices"][0]["token_ids"] == first


def test_the_python_api_reads_pictures(tmp_path: Path) -> None:
    from weft import Engine

    shutil.copytree(vision_checkpoint("lfm2_vl"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with Engine(str(tmp_path), memory="32MB", threads=1, max_model_len=512) as engine:
        reply = engine.chat(ASKED, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
        assert reply.tokens == expected(engine.render_chat(ASKED))
        pixels = drawn("photo", *SIZE, seed=SIZE[0])
        (tmp_path / "cat.png").write_bytes(encoded(pixels))
        own = [Image.fromarray(pixels), tmp_path / "cat.png", str(tmp_path / "cat.png"), encoded(pixels), URL]
        for image in own:
            shown = [{"role": "user", "content": [{"type": "image", "image": image}, ASKED[0]["content"][1]]}]
            again = engine.chat(shown, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
            assert again.tokens == reply.tokens
            assert again.cached_tokens > 30, "it is the same picture"
        for wrong, words in ((7, "is a int"), (tmp_path / "dog.png", "No such file")):
            with pytest.raises(RequestError, match=words):
                engine.chat([{"role": "user", "content": [{"type": "image", "image": wrong}]}])


@pytest.mark.parametrize("name", ["qwen3_5_vl", "qwen3_5_moe_vl", "lfm3_vl"])
def test_several_pictures_are_asked_about_with_the_client_of_openai(name: str, tmp_path: Path) -> None:
    import openai

    template = tmp_path / "chat.jinja"
    template.write_text(QWEN_TEMPLATE)
    other = f"data:image/png;base64,{png(90, 41)}"
    shown: list[Any] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "compare"},
                SHOWN,
                {"type": "image_url", "image_url": {"url": other}},
                {"type": "text", "text": "the dog and the cat"},
            ],
        }
    ]
    engine = {"model": str(vision_checkpoint(name)), "memory": "32MB", "threads": 1, "max_model_len": 512}
    with (
        running_server("", engine=engine, server={"chat_template": str(template)}) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client,
    ):
        cached = []
        for _ in range(2):
            answer = client.chat.completions.create(
                model="default",
                messages=shown,
                max_tokens=NEW_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            assert answer.choices[0].token_ids == expected(  # type: ignore[attr-defined]
                answer.prompt_token_ids, SIZE, (90, 41), name=name
            )  # type: ignore[attr-defined]
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        assert cached[0] == 0
        assert (cached[1] or 0) >= 64, "rows of the first picture are among them"
        with pytest.raises(openai.BadRequestError, match="has no --media-domains"):
            client.chat.completions.create(model="default", max_tokens=1, messages=shows("https://localhost/cat.png"))  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match="too long and narrow"):
            client.chat.completions.create(
                model="default", max_tokens=1, messages=shows(f"data:image/png;base64,{png(1000, 2)}")
            )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(QWEN_TEMPLATE)
    engine = {"model": str(vision_checkpoint("qwen3_5_vl")), "memory": "32MB", "threads": 1, "max_model_len": 512}
    with running_server(
        "", engine=engine, server={"chat_template": str(template), "video_frames": 6, "image_side": 3000}
    ) as running:
        yield running


def filmed_clip() -> str:
    """Its file has the frames twice, so that every second one is read of it."""
    data = filmed([frame for frame in drawn_frames(*CLIP) for _ in range(2)], fps=4)
    return f"data:video/mp4;base64,{base64.b64encode(data).decode()}"


def about(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": "the dog and the cat"}]}]


def test_an_answer_about_a_video_is_that_of_transformers(qwen: RunningServer) -> None:
    """As frames, in each spelling; its second request is a hit; times are text between the frames."""
    urls = frame_urls(*CLIP)
    joined = "data:video/jpeg;base64," + ",".join(url.partition(",")[2] for url in urls)
    spellings: list[dict[str, Any]] = [
        {"type": "video", "video": urls},
        {"type": "video", "video": urls, "fps": 2},
        {"type": "video_url", "video_url": {"url": joined}},
        {"type": "input_video", "video_url": urls},
        {"type": "video_url", "video_url": {"url": urls, "fps": 2}},
    ]
    encoded = metric(qwen, "pictures_encoded_total")
    answers = [chat(qwen, about(spelling)) for spelling in spellings]
    prompt = answers[0]["prompt_token_ids"]
    assert answers[0]["choices"][0]["token_ids"] == expected(prompt, CLIP, name="qwen3_5_vl")
    assert [one["prompt_token_ids"] for one in answers] == [prompt] * len(answers)
    assert [one["choices"] == answers[0]["choices"] for one in answers] == [True] * len(answers)
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers]
    assert cached[0] == 0
    assert min(cached[1:]) >= 64
    assert metric(qwen, "pictures_encoded_total") == encoded + 1
    told = post(qwen, "/tokenize", {"model": "default", "messages": about(spellings[0])}).json()
    assert told["tokens"] == prompt
    assert answers[0]["usage"]["prompt_tokens"] == told["count"]
    seen = prepared("qwen3_5_vl", *CLIP)
    assert [(span["rows"], span["kind"], span["digest"]) for span in told["spans"]] == [
        (rows, "video", seen.digest.hex()) for rows in seen.text if isinstance(rows, int)
    ]
    said = post(qwen, "/detokenize", {"model": "default", "tokens": prompt}).json()["prompt"]
    assert "<|vision_start|><0.2 seconds><|vision_start|><|video_pad|>" in said
    assert "<|vision_end|><2.0 seconds><|vision_start|>" in said
    faster = chat(qwen, about({"type": "video", "video": urls, "fps": 4}))
    assert faster["prompt_token_ids"] != prompt
    assert faster["choices"][0]["token_ids"] == expected(faster["prompt_token_ids"], CLIP, name="qwen3_5_vl")
    assert metric(qwen, "pictures_encoded_total") == 1, "other times, the same rows"
    told = post(
        qwen,
        "/v1/responses",
        {
            "model": "default",
            "max_output_tokens": 4,
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_video", "video_url": urls},
                        {"type": "input_text", "text": "the dog and the cat"},
                    ],
                }
            ],
        },
    ).json()
    assert told["usage"]["input_tokens"] == len(prompt)


def test_a_file_of_a_video_is_sampled_as_the_processor_does(qwen: RunningServer) -> None:
    url = filmed_clip()
    first = chat(qwen, about({"type": "video_url", "video_url": {"url": url}}))
    start = vision_start("qwen3_5_vl")
    seen = read_video(url, Sampling(), start)
    assert [len(seen.tiles), seen.text[0]] == [3, "<0.2 seconds><|vision_start|>"]
    truth = greedy_of_pixels("qwen3_5_vl", first["prompt_token_ids"], [seen], NEW_TOKENS).tokens
    assert first["choices"][0]["token_ids"] == truth
    fewer = chat(qwen, about({"type": "video", "video": url, "max_frames": 2, "min_frames": 2}))
    assert first["usage"]["prompt_tokens"] > fewer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}},
            "messages[0].content[0]: the video is in no known format; MP4",
        ),
        ({"type": "video", "video": "/etc/passwd"}, "the video is at '/etc/passwd'; it must be a data: URL"),
        ({"type": "video", "video": ["file:///etc/passwd", URL]}, "frame 0: the picture is at 'file:///etc/passwd'"),
        ({"type": "video", "video": [URL, "https://localhost/cat.png"]}, "has no --media-domains"),
        ({"type": "video_url", "video_url": {"url": "https://localhost/cat.mp4"}}, "has no --media-domains"),
        ({"type": "video", "video": [URL] * 7}, "the video has 7 frames; the limit is 6 (limits.video_frames)"),
        ({"type": "video", "video": [URL]}, "it needs 2 at least"),
        ({"type": "video", "video": []}, "messages[0].content[0].video: expected a data: URL of a video"),
        ({"type": "video", "video": [URL, 7]}, "expected a data: URL of a video, or a list"),
        ({"type": "video_url", "video_url": {"file": 1}}, "messages[0].content[0].video_url: expected"),
        ({"type": "video", "video": [URL, URL], "fps": 0}, "fps is 0; it must be a number above 0, to 1000"),
        ({"type": "video", "video": [URL, URL], "max_frames": 2.5}, "max_frames is 2.5; it must be a whole"),
        ({"type": "video", "video": [f"data:image/png;base64,{png(4000, 1)}"] * 2}, "(limits.image_side)"),
        ({"type": "video", "video": [f"data:image/png;base64,{png(1000, 2)}"] * 2}, "too long and narrow"),
    ],
)
def test_a_video_that_cannot_be_served_is_one_line(qwen: RunningServer, part: dict[str, Any], words: str) -> None:
    body = {"model": "default", "messages": about(part), "max_tokens": 2}
    answer = post(qwen, "/v1/chat/completions", body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_the_python_api_reads_videos(tmp_path: Path) -> None:
    from weft import Engine

    shutil.copytree(vision_checkpoint("qwen3_5_vl"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(QWEN_TEMPLATE)
    frames = drawn_frames(*CLIP)
    (tmp_path / "cat.png").write_bytes(encoded(frames[0]))
    mixed = [tmp_path / "cat.png", Image.fromarray(frames[1]), *frame_urls(*CLIP)[2:4], encoded(frames[4])]
    film = base64.b64decode(filmed_clip().partition(",")[2])
    (tmp_path / "clip.mp4").write_bytes(film)
    with Engine(str(tmp_path), memory="32MB", threads=1, max_model_len=512) as engine:
        replies = [
            engine.chat(about({"type": "video", "video": video}), max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
            for video in (mixed, film, tmp_path / "clip.mp4")
        ]
        prompt = engine.render_chat(about({"type": "video", "video": mixed}))
        assert replies[0].tokens == expected(prompt, CLIP, name="qwen3_5_vl")
        assert replies[1].tokens == replies[2].tokens
        assert replies[2].cached_tokens > 60
        with pytest.raises(RequestError, match=r"messages\[0\].content\[0\].video\[1\] is a int"):
            engine.chat(about({"type": "video", "video": [film, 7]}))


GIVES = """(async (how, width, height) => {
  const canvas = Object.assign(document.createElement('canvas'), {width, height});
  const ink = canvas.getContext('2d');
  ink.fillStyle = 'teal'; ink.fillRect(0, 0, width, height);
  ink.fillStyle = 'gold'; ink.fillRect(width / 4, height / 4, width / 2, height / 2);
  const blob = await new Promise((done) => canvas.toBlob(done, 'image/png'));
  const data = new DataTransfer();
  data.items.add(new File([blob], how + '.png', {type: 'image/png'}));
  const form = document.getElementById('ask-form'), file = document.getElementById('attach-file');
  if (how === 'dropped') {
    form.dispatchEvent(new DragEvent('dragover', {dataTransfer: data, bubbles: true, cancelable: true}));
    form.dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true}));
  } else if (how === 'pasted') {
    document.getElementById('ask').dispatchEvent(
      new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true}));
  } else {
    file.files = data.files;
    file.dispatchEvent(new Event('change'));
  }
})"""
ANSWERS = "[...document.querySelectorAll('#talk .answer')].map((one) => one.textContent)"


def test_the_page_asks_about_a_dropped_a_pasted_and_a_chosen_picture(server: RunningServer, tmp_path: Path) -> None:
    if CHROMIUM is None:
        warnings.warn("no Chromium: pictures of the page were not tried in a browser", stacklevel=1)
        assert "startFiles(" in page_files()["chat.js"].read_text("utf-8")
        return
    browser = Browser(CHROMIUM, tmp_path)
    try:
        browser.open(server.url)
        browser.run("sessionStorage.setItem('weft-key', 'boss')")
        browser.open(f"{server.url}/?again")
        browser.wait_for("document.getElementById('max-tokens').placeholder !== ''")
        for number, how in enumerate(("dropped", "pasted", "chosen")):
            browser.run(f"{GIVES}('{how}', 160, {100 + 20 * number})")
            browser.wait_for(f"document.querySelectorAll('#files img[alt=\"{how}.png\"]').length === 1")
        browser.wait_for("[...document.querySelectorAll('#files img')].every((one) => one.naturalWidth)")
        browser.click("#files button")  # leaves the first one out
        assert browser.run("document.querySelectorAll('#files img').length") == 2
        before = metric(server, "pictures_encoded_total")
        browser.run("document.getElementById('max-tokens').value = '8';document.getElementById('ask').focus()")
        browser.type("what is it?")
        browser.press("Enter", 13)
        browser.wait_for("/prompt tokens/.test(document.getElementById('talk').textContent)")
        assert browser.run("document.querySelectorAll('#talk .row img').length") == 2
        assert browser.run("document.querySelectorAll('#files img').length") == 0
        assert browser.run("document.querySelectorAll('#talk .end.failed').length") == 0
        assert metric(server, "pictures_encoded_total") == before + 2
        browser.run("location.hash = '#server'")
        browser.wait_for(
            "/^Pictures: rows of .* of 3.8 MiB; /.test(document.getElementById('picture-rows').textContent)"
        )
        browser.run("location.hash = '#chat'")
        browser.wait_for("document.getElementById('ask').checkVisibility()")
        browser.run("document.getElementById('ask').focus()")
        browser.type("and now?")  # the pictures are a part of the conversation
        browser.press("Enter", 13)
        browser.wait_for(f"{ANSWERS}.length === 2 && document.getElementById('stop').hidden")
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        assert metric(server, "pictures_encoded_total") == before + 2
        browser.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 10_000
    finally:
        browser.close()


DROPS_FILE = """((name, type, text) => {
  const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0)), data = new DataTransfer();
  data.items.add(new File([bytes], name, {type}));
  const form = document.getElementById('ask-form');
  form.dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true}));
})"""


def test_the_page_asks_about_a_dropped_video(qwen: RunningServer, tmp_path: Path) -> None:
    """Its answer is that of the API. A file that is no video is one line, and waits for another try."""
    if CHROMIUM is None:
        warnings.warn("no Chromium: videos of the page were not tried in a browser", stacklevel=1)
        assert 'kind: "video"' in page_files()["files.js"].read_text("utf-8")
        return
    film = base64.b64encode(filmed(drawn_frames(160, 120, 8), "webm", "libvpx", fps=4)).decode()
    said = chat(
        qwen,
        [
            {
                "role": "user",
                "content": [
                    {"type": "video_url", "video_url": {"url": f"data:video/webm;base64,{film}"}},
                    {"type": "text", "text": "what happens?"},
                ],
            }
        ],
        max_tokens=8,
        ignore_eos=False,
    )
    browser = Browser(CHROMIUM, tmp_path)
    try:
        browser.open(qwen.url)
        browser.wait_for("document.getElementById('max-tokens').placeholder !== ''")
        browser.run(f"{DROPS_FILE}('unknown.mkv', '', {json.dumps(base64.b64encode(b'no video').decode())})")
        browser.wait_for("document.getElementById('files').textContent === 'unknown.mkv×'")
        browser.run(
            "document.getElementById('max-tokens').value = '8';"
            "document.getElementById('temperature').value = '0';"
            "document.getElementById('ask').focus()"
        )
        browser.type("what happens?")
        browser.press("Enter", 13)
        browser.wait_for("/the video is in no known format/.test(document.querySelector('#notice')?.textContent)")
        browser.wait_for("document.getElementById('files').textContent === 'unknown.mkv×'")
        browser.click("#files button")
        browser.run(f"{DROPS_FILE}('film.webm', 'video/webm', {json.dumps(film)})")
        browser.wait_for("document.querySelector('#files video[aria-label=\"film.webm\"]')?.videoWidth === 160")
        browser.run("document.getElementById('ask').focus()")
        browser.press("Enter", 13)  # the text of the failed try is still there
        browser.wait_for("/prompt tokens/.test(document.getElementById('talk').textContent)")
        assert browser.run(f"{ANSWERS}.at(-1)") == said["choices"][0]["message"]["content"]
        browser.wait_for("document.querySelector('#talk .row video').readyState >= 2")
        assert browser.run("document.querySelectorAll('#files button').length") == 0
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        browser.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 10_000
    finally:
        browser.close()
