"""Names that users create: a served model with a system prompt, first messages, parameters and a template.

    /api/create, /api/copy, /api/delete --PresetStore--> names.json     one file; written whole, under a lock
    a request for "mario"  <-- read again when the file changed -' so every HTTP process sees it
        --Presets.meant------> the model that it refers to, with this name's settings

A created name has no weights: it refers to a model of the server. A name that is created from another created name
copies all its settings. Names outlive the server. A server without the model of a name does not list the name. Names of
models and adapters take precedence over created names.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from weft.errors import CheckpointError, ConfigError, RequestError, UnknownModelError, WeftError
from weft.files import write_whole
from weft.server.protocol import Int
from weft.text.chat import ChatMessage

if TYPE_CHECKING:
    from weft.text.dialect import Dialect
    from weft.text.template_sandbox import TemplateSandbox

SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
}
"""Names in ``SamplingParams`` by Ollama's names of parameters."""
NO_LIMIT = (None, -1, -2)
"""Values of ``num_predict`` for an answer up to the end of the context."""
TEMPLATES_MAX = 8
"""Most different templates of all names: each needs a process in every HTTP process that renders it (law L11)."""
_END_AFTER_S = 30.0
"""Seconds before the process of a removed template ends, so that it can finish conversations that it is rendering."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+){0,2}(?::[\w.-]+)?", re.ASCII)
_NAME_CHARS_MAX = 200


class OllamaOptions(msgspec.Struct, kw_only=True):
    """Ollama's options. ``num_predict``: -1 and -2 mean no limit but the context."""

    num_predict: Int | None = None
    num_ctx: Int | None = None
    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


class Preset(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A created name. ``model``: the served name that it refers to. ``parameters``: as the client sent them, under
    Ollama's names."""

    name: str
    model: str
    created_s: float
    system: str = ""
    template: str = ""
    parameters: dict[str, Any] = {}
    messages: list[ChatMessage] = []
    license: list[str] = []

    @property
    def defaults(self) -> dict[str, Any]:
        """Default sampling of requests, under the names of ``SamplingParams``."""
        parameters = self.parameters
        chosen = {ours: parameters[theirs] for theirs, ours in SAMPLING_NAMES.items() if theirs in parameters}
        if (stop := parameters.get("stop")) is not None:
            chosen["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        if (most := parameters.get("num_predict")) not in NO_LIMIT:
            chosen["max_tokens"] = most
        return chosen

    @property
    def context_max(self) -> int | None:
        """Tokens that a prompt must stay below."""
        return self.parameters.get("num_ctx")

    def begun(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """Return ``messages`` of a request, after the messages of this name. A request's own system messages replace
        the name's system prompt."""
        leading = next(
            (index for index, message in enumerate(messages) if message.role not in ("system", "developer")),
            len(messages),
        )
        if not messages:
            return messages  # the request fails under any name
        system = [ChatMessage(role="system", content=self.system)] if self.system and not leading else []
        return [*system, *messages[:leading], *self.messages, *messages[leading:]]


class PresetStoreError(WeftError):
    """The file cannot be written or read."""

    status = 503
    kind = "service_unavailable"


def check_preset_name(name: str, *, param: str) -> str:
    """Return ``name`` if it is valid. Raise RequestError."""
    if not _NAME.fullmatch(name) or len(name) > _NAME_CHARS_MAX:
        raise RequestError(
            f"{param} is {name[:200]!r}; a name has letters, digits, '_', '.' and '-', up to two '/' and a "
            f"tag after ':', and at most {_NAME_CHARS_MAX} characters",
            param=param,
        )
    return name


class PresetStore:
    """A file of created names: ``count_max`` names in a file of at most ``bytes_max``."""

    def __init__(self, path: Path, *, count_max: int, bytes_max: int) -> None:
        self.path = path
        self._count_max, self._bytes_max = count_max, bytes_max
        self._mark: tuple[int, int, int] | None = None
        self._names: dict[str, Preset] = {}

    def names(self) -> Mapping[str, Preset]:
        """Return the created names, the oldest first. Raise PresetStoreError."""
        try:
            mark = self._looked()
            if mark != self._mark:
                self._names = {} if mark is None else self._read()
                self._mark = mark
        except (OSError, msgspec.DecodeError, RequestError) as error:
            raise PresetStoreError(
                f"the names in {self.path} cannot be read: {error} (server.name_store)", param="server.name_store"
            ) from None
        return self._names

    def open_now(self) -> None:
        """Open the file. Raise ConfigError for a file that is not a store of names."""
        try:
            self.names()
        except PresetStoreError as error:
            raise ConfigError(error.message, param="server.name_store") from None

    def put(self, preset: Preset) -> None:
        """Store a name, replacing one of the same name. Raise RequestError, PresetStoreError."""
        with self._alone() as names:
            names.pop(preset.name, None)
            names[preset.name] = preset
            if len(names) > self._count_max:
                raise RequestError(
                    f"this server keeps {self._count_max} created names (limits.max_created_names); delete some",
                    param="limits.max_created_names",
                    code="too_many_names",
                )
            templates = {other.template for other in names.values() if other.template}
            if preset.template and len(templates) > TEMPLATES_MAX:
                raise RequestError(
                    f"the created names have {TEMPLATES_MAX} different templates, which is "
                    "the limit; delete a name that has one",
                    param="template",
                    code="too_many_names",
                )

    def remove(self, name: str) -> bool:
        """Remove a name, and return whether it was there. Raise PresetStoreError."""
        if name not in self.names():
            return False
        with self._alone() as names:
            return names.pop(name, None) is not None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[dict[str, Preset]]:
        """Lock the file, yield the names to be changed, and write them at the end of the block."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.path.with_name(f"{self.path.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unwritten(error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            names = dict(self.names())
            yield names
            self._write(msgspec.json.format(msgspec.json.encode(list(names.values()))))
        except OSError as error:
            raise self._unwritten(error) from None
        finally:
            os.close(lock)

    def _write(self, raw: bytes) -> None:
        if len(raw) > self._bytes_max:
            raise RequestError(
                f"the created names take {len(raw)} bytes; the limit is {self._bytes_max} "
                "(limits.name_store_size); delete some",
                param="limits.name_store_size",
                code="too_many_names",
            )
        write_whole(self.path, raw, mode=0o600)

    def _unwritten(self, error: OSError) -> PresetStoreError:
        return PresetStoreError(
            f"the name cannot be kept in {self.path}: {error.strerror} (server.name_store)", param="server.name_store"
        )

    def _looked(self) -> tuple[int, int, int] | None:
        """Return values that differ between two versions of the file; None without a file."""
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return None
        return now.st_mtime_ns, now.st_size, now.st_ino

    def _read(self) -> dict[str, Preset]:
        with self.path.open("rb") as file:
            raw = file.read(self._bytes_max + 1)
        if len(raw) > self._bytes_max:
            raise PresetStoreError(
                f"{self.path} has more than {self._bytes_max} bytes (limits.name_store_size)",
                param="limits.name_store_size",
            )
        names = {preset.name: preset for preset in msgspec.json.decode(raw, type=list[Preset])}
        for name, preset in names.items():  # the file may have been edited by hand
            check_preset_name(name, param="a name")
            try:
                msgspec.convert(preset.parameters, OllamaOptions)
            except msgspec.ValidationError as error:
                raise PresetStoreError(
                    f"the names in {self.path} cannot be read: the parameters of {name}: {error} (server.name_store)",
                    param="server.name_store",
                ) from None
        return names


Style: TypeAlias = "tuple[TemplateSandbox, Dialect]"


class Presets:
    """The created names as one HTTP process serves them. ``store``: None if created names are off."""

    def __init__(self, store: PresetStore | None) -> None:
        self.store = store
        self._styles: dict[tuple[bytes, str], asyncio.Task[Style]] = {}

    def all(self) -> Mapping[str, Preset]:
        """Return the created names. Raise PresetStoreError."""
        return {} if self.store is None else self.store.names()

    def meant(self, name: str | None, is_own: Callable[[str | None], bool]) -> tuple[str | None, Preset | None]:
        """Return the name of a model or adapter for the name in a request, and the preset if the name was created.
        ``is_own``: whether a name is that of a model or an adapter of the server. Raise UnknownModelError for a created
        name whose model the server does not have."""
        if is_own(name):
            return name, None
        preset = self.all().get(str(name))
        if preset is None:
            return name, None
        if not is_own(preset.model):
            raise UnknownModelError(
                f"the name {name!r} was created from {preset.model!r}, which this server does not have", param="model"
            )
        return preset.model, preset

    async def style(self, preset: Preset, vocabulary: bytes, make: Callable[[str], Style]) -> Style | None:
        """Return the renderer of conversations and the dialect of answers for this name; None if it has no template of
        its own. ``make``: compiles the template for the model with this ``vocabulary``. Raise RequestError."""
        if not preset.template:
            return None
        key = vocabulary, preset.template
        if key not in self._styles:
            self._drop_unused(preset.template)
            self._styles[key] = asyncio.create_task(asyncio.to_thread(make, preset.template))
        try:
            style = await asyncio.shield(self._styles[key])
        except CheckpointError as error:
            self._styles.pop(key, None)
            raise RequestError(
                f"template: {error.message}. It is a Jinja template here, as checkpoints have "
                "them; the Go templates of Ollama's library are not read. Without one the "
                "model's own is used",
                param="template",
            ) from None
        if "messages" not in style[0].variables:
            raise RequestError(
                "template does not use messages, so no conversation would reach the model", param="template"
            )
        return style

    def _drop_unused(self, wanted: str) -> None:
        """End the processes of templates that no name uses any more."""
        wanted_now = {wanted, *(preset.template for preset in self.all().values())}
        for key, style in list(self._styles.items()):
            if key[1] not in wanted_now and style.done():
                del self._styles[key]
                if style.exception() is None:
                    asyncio.get_running_loop().call_later(_END_AFTER_S, style.result()[0].close)
