"""Conversations of a program, prepared and read like those of the server.

    messages, tools --ChatWriter--> PreparedChat: token ids, cache positions, sampling with its grammar
    Completion --PreparedChat.reply--> ChatReply: text, reasoning, calls of tools

``weft.text.renderer`` prepares them, for the server too. A program passes its own pictures as ``{"type": "image",
"image": ...}``: an image of Pillow, the name of a file, or its bytes. HTTP accepts none of these.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image, ImageOps

from weft.api.completion import ChatPiece, ChatReply, Completion, FunctionCall
from weft.errors import RequestError
from weft.images.decoding import ImageLimits
from weft.images.picture import Picture
from weft.images.video import Sampling
from weft.images.worker import PictureStart, read_picture, read_video, start_of
from weft.objects.conversations import continued_chat, conversation_content, conversation_of, known_prefix
from weft.objects.sessions import Content, StoredSession
from weft.request import PICTURE_KINDS, PictureKind, SamplingParams
from weft.text.chat import ChatMessage, ChatTemplate, load_chat_template
from weft.text.chat_request import ChatRequest, ConversationFields
from weft.text.choices import Piece, TextDecoder, showing
from weft.text.control_tokens import NO_CONTROL, ControlTexts, control_texts
from weft.text.dialect import AnswerPlan, Dialect, answer_markers, call_format, text_of
from weft.text.pictures import PicturePart, checked_sampling
from weft.text.prompt import KnownPrefix, Prompt
from weft.text.renderer import Renderer, finished
from weft.text.template_worker import ChatPrompt, chat_prompt
from weft.text.tokenizer import Tokenizer
from weft.text.tools.json_calls import CallDelta

_LIMITS = ImageLimits(image_bytes=1 << 40, video_bytes=1 << 40)
"""Limits for a program's own files: only the number of pixels is bounded, not the bytes."""


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A conversation ready for the engine. ``decoder`` leaves the markers in the text that ``plan`` reads. ``sampling``
    has the grammar of calls, of structured output, or of both."""

    encoded: Prompt
    plan: AnswerPlan
    sampling: SamplingParams
    decoder: TextDecoder

    def reply(self, completion: Completion) -> ChatReply:
        """Split ``completion`` into content, reasoning and calls of tools."""
        reader = self.plan.reader(eager=False)
        reader.read(completion.text, completion.tokens, completion.finish_reason or "stop")
        fields = msgspec.structs.asdict(completion)
        fields |= {
            "text": text_of(reader.blocks, "text"),
            "finish_reason": reader.finish_reason(completion.finish_reason),
        }
        calls = [
            FunctionCall(id=block.call_id, name=block.name, arguments=block.text)
            for block in reader.blocks
            if block.is_call
        ]
        return ChatReply(**fields, reasoning=text_of(reader.blocks, "reasoning"), tool_calls=calls)

    def pieces(self, pieces: Iterable[Piece]) -> Iterator[ChatPiece]:
        """Yield a stream's pieces, split as ``reply`` would split them. While text may become a marker, it is held
        back."""
        readers = [self.plan.reader(eager=True) for _ in range(self.sampling.n)]
        for piece in pieces:
            events = readers[piece.index].read(piece.text, piece.tokens, piece.finish_reason)
            chat_piece = ChatPiece(
                piece.index, "", piece.tokens, piece.logprobs, piece.finish_reason, piece.stop_reason
            )
            for event in events:
                block = event.block
                if block.kind == "text":
                    chat_piece.text += event.delta
                elif block.kind == "reasoning":
                    chat_piece.reasoning += event.delta
                elif event.phase == "start":
                    chat_piece.calls.append(
                        CallDelta(block.call_index, block.call_id, block.name, is_custom=block.kind == "custom_call")
                    )
                elif event.phase == "delta":
                    chat_piece.calls.append(CallDelta(block.call_index, arguments=event.delta))
            yield chat_piece


@dataclass(frozen=True, slots=True)
class _OwnTemplate:
    """A chat template that is rendered in this process."""

    template: ChatTemplate

    @property
    def source(self) -> str:
        return self.template.source

    @property
    def reads_tools(self) -> bool:
        return self.template.reads_tools

    @property
    def variables(self) -> Collection[str]:
        return self.template.variables

    async def write(self, messages: list[ChatMessage], *, chars_cut: int, **rendering: Any) -> ChatPrompt:
        return chat_prompt(self.template, messages, chars_cut=chars_cut, **rendering)


class _OwnPictures:
    """A reader of pictures in this process. ``tokens``: the model's picture tokens as text, by kind."""

    def __init__(self, directory: Path, tokens: Mapping[PictureKind, str]) -> None:
        self.tokens = tokens
        self._start: PictureStart = start_of(directory, _LIMITS)

    async def read(self, parts: Sequence[PicturePart]) -> list[Picture]:
        return list(map(self._read, parts))

    def _read(self, part: PicturePart) -> Picture:
        try:
            if part.kind == "video":
                return read_video(part.source, Sampling(part.fps, part.min_frames, part.max_frames), self._start)
            assert isinstance(part.source, str | bytes)
            return read_picture(part.source, self._start.settings, _LIMITS)
        except RequestError as error:
            raise RequestError(f"{part.where}: {error.message}", param=part.where) from None


class ChatWriter:
    """The conversations of one model. ``context_tokens``: the longest prompt. Raises CheckpointError or ConfigError for
    a broken template."""

    def __init__(
        self,
        directory: Path,
        tokenizer: Tokenizer,
        picture_tokens: Sequence[int] = (),
        *,
        context_tokens: int,
        trust_control_tokens: bool = False,
    ) -> None:
        shown: dict[PictureKind, str] = dict(
            zip(PICTURE_KINDS, map(tokenizer.token_text, picture_tokens), strict=False)
        )

        def control(source: str) -> ControlTexts:
            return control_texts(tokenizer, source, answer_markers(), list(shown.values()))

        template = load_chat_template(
            directory,
            special_tokens=tokenizer.special_tokens,
            control=(lambda source: NO_CONTROL) if trust_control_tokens else control,
            calls=lambda source: call_format(source, tokenizer),
        )
        self._renderer = Renderer(
            tokenizer,
            None if template is None else _OwnTemplate(template),
            Dialect(template, tokenizer),
            context_tokens,
            _OwnPictures(directory, shown) if picture_tokens else None,
        )

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        template: Mapping[str, Any] | None,
        session: StoredSession | None = None,
        **fields: Any,
    ) -> PreparedChat:
        """Render and tokenize ``messages``. ``template``: extra variables of the template; ``session``: the
        conversation that ``messages`` continue; ``fields``: of ``ConversationFields``. Raise RequestError."""
        conversation, known = self._conversation(messages, template, **fields), None
        if session is not None:
            conversation, known = continued_chat(session, conversation), known_prefix(session)
        request, prompt = self._render(conversation, known)
        dialect, tokenizer = self._renderer.dialect, self._renderer.tokenizer
        if request.thinking_token_budget is not None and not dialect.bounds_reasoning:
            raise RequestError(
                "thinking_token_budget is not served with this model: it has no reasoning whose markers are tokens",
                param="thinking_token_budget",
                code="unsupported_parameter",
            )
        plan = dialect.plan_of(request, prompt.text or "", sampling.grammar)
        sampling = msgspec.structs.replace(sampling, grammar=plan.grammar)
        return PreparedChat(prompt, plan, sampling, showing(tokenizer, plan.shown_ids))

    def tokens(
        self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any] | None, **fields: Any
    ) -> list[int]:
        """Return the token ids of a conversation, up to the beginning of the answer. Raise RequestError."""
        return self._render(self._conversation(messages, template, **fields))[1].tokens

    def content(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        known: KnownPrefix | None,
    ) -> Content:
        """Return the content of a session. ``known``: tokens of the beginning of the conversation. Raise
        RequestError."""
        as_json = [_with_addresses(index, message) for index, message in enumerate(messages)]
        conversation = self._conversation(as_json, template, tools=tools, add_generation_prompt=False)
        return conversation_content(self._render(conversation, known)[1], as_json, tools, template)

    def encoded(self, session: StoredSession) -> Prompt:
        """Return the prompt of a session's conversation. Raise RequestError."""
        return self._render(conversation_of(session))[1]

    def _conversation(
        self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any] | None, **fields: Any
    ) -> ConversationFields:
        try:
            turns = msgspec.convert(
                [_with_files(index, message) for index, message in enumerate(messages)], list[ChatMessage]
            )
        except msgspec.ValidationError as error:
            raise RequestError(f"messages: {error}", param="messages") from None
        return ConversationFields(messages=turns, variables=template, **fields)

    def _render(self, conversation: ConversationFields, known: KnownPrefix | None = None) -> tuple[ChatRequest, Prompt]:
        return finished(self._renderer.render(conversation, known=known, with_places=True, salt=""))


def _with_files(position: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``message`` with pictures and videos of the program read into bytes. Raise RequestError."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    parts = list(content)
    for index, part in enumerate(parts):
        where = f"messages[{position}].content[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image" and "image" in part:
            parts[index] = PicturePart(_bytes_of(part["image"], f"{where}.image"), where)
        elif kind == "video" and "video" in part:
            video = part["video"]
            source = (
                [_bytes_of(frame, f"{where}.video[{number}]") for number, frame in enumerate(video)]
                if isinstance(video, list | tuple)
                else _bytes_of(video, f"{where}.video")
            )
            sampling = {key: part.get(key) for key in ("fps", "min_frames", "max_frames")}
            parts[index] = PicturePart(source, where, kind="video", **checked_sampling(sampling, where))
    return {**message, "content": parts}


def _with_addresses(position: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``message`` with pictures and videos of the program as ``data:`` URLs, since JSON has no bytes. Raise
    RequestError."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    parts = list(content)
    for index, part in enumerate(parts):
        where = f"messages[{position}].content[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image" and "image" in part:
            url = _address_of(part["image"], f"{where}.image", "image/png")
            parts[index] = {"type": "image_url", "image_url": {"url": url}}
        elif kind == "video" and "video" in part:
            source = part["video"]
            if isinstance(source, list | tuple):
                frames = enumerate(source)
                video: Any = [_address_of(frame, f"{where}.video[{number}]", "image/png") for number, frame in frames]
            else:
                video = _address_of(source, f"{where}.video", "video/mp4")
            parts[index] = {**part, "video": video}
    return {**message, "content": parts}


def _address_of(picture: Any, where: str, media_type: str) -> str:
    source = _bytes_of(picture, where)
    return source if isinstance(source, str) else f"data:{media_type};base64,{base64.b64encode(source).decode()}"


def _bytes_of(image: Any, where: str) -> str | bytes:
    """Return the bytes or ``data:`` URL of ``image``: an image of Pillow, bytes, or the name of a file."""
    if isinstance(image, Image.Image):
        out = io.BytesIO()
        ImageOps.exif_transpose(image).convert("RGB").save(out, "BMP")
        return out.getvalue()
    if isinstance(image, bytes | bytearray):
        return bytes(image)
    if isinstance(image, str) and image.startswith("data:"):
        return image
    try:
        return Path(image).expanduser().read_bytes()
    except TypeError:
        raise RequestError(
            f"{where} is a {type(image).__name__}; it takes an image of Pillow, the "
            "name of a file, its bytes or a data: URL",
            param=where,
        ) from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{where}: {image!s:.200} cannot be read: {error}", param=where) from None
