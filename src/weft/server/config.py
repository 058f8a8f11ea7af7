"""Settings of the HTTP side. Flag = field = keyword, as in ``weft.config.EngineConfig``.

Tuples are flags that may be given several times.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from weft.config import STREAM_INTERVAL_MAX, THREADS_MAX, session_key
from weft.config_check import check_fields, debug, flag, limit
from weft.errors import ConfigError
from weft.handoff import Role, check_replicas, parse_roles, partner_missing
from weft.host import state_directory
from weft.kv_events import FLAG as KV_EVENTS
from weft.kv_events import host_of, read_config
from weft.objects.database import Bounds, default_path
from weft.objects.sessions import SessionLimits
from weft.rpc.link import tcp_address
from weft.rpc.messages import RecordingTarget
from weft.server.edge import EdgeLimits, Origins, is_loopback
from weft.server.responses.store import StoreLimits
from weft.server.tenants import Quotas
from weft.server.tracing import check_endpoint
from weft.text.reasoning import check_reasoning_parser
from weft.text.tools.formats import check_tool_parser
from weft.units import parse_bytes, parse_duration

if TYPE_CHECKING:
    from weft.images.decoding import ImageLimits
    from weft.server.presets import PresetStore

DEFAULT_PORT = 8000
PORTS_TRIED = 20
"""Ports that are tried from DEFAULT_PORT on, without --port."""
PORT_MAX = 65535
BACKLOG = 2048
"""Most connections that wait until they are accepted."""
_MB = 1_000_000
HOUR_S, DAY_S, DAYS_MAX = 3600.0, 86_400.0, 36_500.0
"""Largest values of settings: an hour and a day in seconds, a hundred years in days."""
MB_MAX = 1_000_000
"""Most MB of bodies: a terabyte, as they are held in memory."""
TEXT_MAX = 2**31 - 1
"""Most characters of a text, and pixels of a picture: libraries count them in 31 bits."""
CONNECTIONS_MAX = 1 << 20
"""Most connections: the number of files that Linux lets one process open (fs.nr_open)."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = flag("127.0.0.1", "Address to listen on; 0.0.0.0 for every network this machine is in.")
    port: int | None = flag(
        None,
        "Port to listen on; 0 takes any free one. Default: 8000, or the next one that is free.",
        least=0,
        most=PORT_MAX,
    )
    uds: str | None = flag(
        None, "Path of a Unix socket to listen at instead of --host and --port; its owner and its group may connect."
    )
    uds_mode: str = flag("660", "Who may connect at the socket of --uds, as chmod writes it.", table="server")
    ssl_certfile: str | None = flag(
        None,
        "File with the certificate of this server and its chain (PEM): the port speaks HTTPS. It is read again when "
        "it changes.",
    )
    ssl_keyfile: str | None = flag(None, "File with the key of --ssl-certfile, unless that has it (PEM).")
    ssl_keyfile_password: str | None = flag(None, "Password of an encrypted --ssl-keyfile.", table="server")
    ssl_ca_certs: str | None = flag(
        None,
        "File with certificates (PEM): clients must show one that these have signed. Needs --ssl-certfile.",
        table="server",
    )
    api_key: tuple[str, ...] = flag(
        (),
        "Key that clients must send as 'Authorization: Bearer KEY'; may be "
        "given several times. Only /health, the page, /docs and "
        "/openapi.json answer without it.",
    )
    operator_key: tuple[str, ...] = flag(
        (),
        "Key that opens everything; only such a key opens /metrics, "
        "/v1/cache, /sleep and /wake_up; may be given several "
        "times. Without one, every --api-key opens those.",
    )
    api_key_file: str | None = flag(
        None, "File with further keys for --api-key, one a line; ps shows a command line to all users."
    )
    tenant_by_key: bool = flag(
        False, "Give each API key cached prefixes of its own: requests of two keys never share a cached prefix."
    )
    key_requests_per_minute: int = limit(
        0, "Requests that one API key may send a minute (429); 0: no limit.", least=0, most=1_000_000
    )
    key_tokens_per_minute: int = limit(
        0,
        "Tokens, of prompts and answers, that one API key may use a minute (429); 0: no limit.",
        least=0,
        most=1_000_000_000,
    )
    key_mb_in_flight: int = limit(
        0, "MB that the bodies of one API key's unfinished requests may hold (429); 0: no limit.", least=0, most=MB_MAX
    )
    strict_fields: bool = flag(
        False,
        "Refuse a request with an unknown field (400). Else it is ignored, and "
        "the header X-Weft-Ignored of the answer names it.",
        table="server",
    )
    hide_cached_tokens: bool = flag(
        False,
        "Answer with cached_tokens 0: the number tells a client whether another one sent the same prefix.",
        table="server",
    )
    show_text: bool = flag(
        False,
        "Show the operator the first words of cached prefixes, on the page and in /v1/cache; needs --operator-key.",
        table="server",
    )
    allowed_host: tuple[str, ...] = flag(
        (),
        "Host name under which clients reach this server, besides "
        "loopback names and IP addresses; may be given several times.",
    )
    allowed_origin: tuple[str, ...] = flag(
        (),
        "Origin of web pages that may use this server, such as "
        "https://app.example.org, or *; may be given several times.",
    )
    media_domains: tuple[str, ...] = flag(
        (),
        "Host whose pictures and videos requests may name by https address; *.example.org: those below "
        "it, *: every public host. May be given several times. Default: data: URLs only.",
    )
    served_model_name: tuple[str, ...] = flag(
        (),
        "Name(s) that requests may use for the model, besides 'default'; may be given several times. "
        "Default: the model's own.",
    )
    pulled: bool = flag(
        False,
        "Serve each model on this machine's disk too, and those that are pulled while the server runs: `weft pull`, "
        "/api/pull, /api/create. They are loaded when they are asked for, as several models are.",
    )
    keep_alive: str = limit(
        "5m",
        "With several models: how long one without requests stays in memory, such "
        "as 90s or 1h; 0: not at all, -1: until the memory is needed. Ollama's "
        "field of that name says it for one request.",
    )
    chat_template: str | None = flag(None, "File with the chat template to use instead of the checkpoint's.")
    max_tokenize_chars: int = limit(
        32_000_000, "Characters of long texts that may be tokenized at once (413, 503).", least=4096, most=TEXT_MAX
    )
    tokenize_memory: str = limit(
        "1GiB", "Memory that long texts may take while they are tokenized (413, 503).", size=True
    )
    token_cache: str = limit(
        "64MiB", "Memory of tokenized messages, kept for the next turn of their conversation; 0: none.", size=True
    )
    max_answer_logprobs: int = limit(
        1_000_000,
        "Logprobs that an answer may have in one piece: n x tokens x "
        "(logprobs + 1) over all prompts (400). Streams count "
        "those of prompts only.",
        least=1,
        most=1_000_000_000,
    )
    template_seconds: float = limit(5.0, "Seconds that rendering one conversation may take.", above=0, most=HOUR_S)
    template_chars: int = limit(
        32_000_000, "Characters that a conversation may be rendered to.", least=1, most=TEXT_MAX
    )
    template_memory: str = limit("512MiB", "Memory that a process that renders conversations may take.", size=True)
    images: int = limit(64, "Pictures and videos of one conversation (400).", least=0, most=1_000_000)
    image_bytes: str = limit("32MiB", "Bytes of the file of one picture (400).", size=True)
    image_pixels: int = limit(50_000_000, "Pixels of one picture, before it is decoded (400).", least=1, most=TEXT_MAX)
    image_side: int = limit(16_384, "Pixels of the longer side of a picture (400).", least=1, most=1 << 20)
    image_seconds: float = limit(10.0, "Seconds that reading one picture may take (400).", least=0.1, most=HOUR_S)
    image_memory: str = limit("1GiB", "Memory that a process that reads pictures or videos may take.", size=True)
    video_bytes: str = limit("64MiB", "Bytes of the file of one video (400).", size=True)
    video_frames: int = limit(768, "Frames that are read of one video (400).", least=2, most=1_000_000)
    video_seconds: float = limit(60.0, "Seconds that reading one video may take (400).", least=0.1, most=HOUR_S)
    reasoning_parser: str = flag(
        "auto",
        "Format of the model's reasoning, which answers give apart from "
        "their content; auto goes by the chat template, none leaves it in.",
    )
    tool_parser: str = flag(
        "auto", "Format of the model's tool calls; auto goes by the chat template, none refuses tools."
    )
    metrics_prefix: str = debug("weft", "Prefix of metric names; with 'vllm', published dashboards load as they are.")
    drain_timeout: float = limit(
        30.0, "Seconds that running requests get to finish after the first Ctrl-C.", least=0, most=DAY_S
    )
    max_body_mb: int = limit(64, "Largest request body in MB (413).", least=1, most=MB_MAX)
    max_json_values: int = limit(
        1_000_000,
        "JSON values of one request body of over 256 KiB: elements, fields and brackets (413).",
        least=1000,
        most=1_000_000_000,
    )
    max_buffered_mb: int = limit(
        256,
        "MB that the bodies of all unfinished requests may hold together; the first 64 KB of each are free (503).",
        least=1,
        most=MB_MAX,
    )
    max_unread_mb: int = limit(
        256,
        "MB of streamed answers that clients have not read, of all together; beyond it the answer that holds the most "
        "ends with an error (408).",
        least=1,
        most=MB_MAX,
    )
    max_request_line: int = limit(8192, "Bytes of the longest request line (414).", least=64, most=1 << 20)
    max_header_bytes: int = limit(32768, "Bytes of all headers of a request (431).", least=256, most=1 << 24)
    max_headers: int = limit(100, "Headers of a request (431).", least=8, most=10_000)
    max_connections: int = limit(4096, "Open connections (503).", least=1, most=CONNECTIONS_MAX)
    max_connections_per_address: int = limit(
        1024,
        "Open connections of one address (429); 0: no limit. With a proxy in front all clients have its address.",
        least=0,
        most=CONNECTIONS_MAX,
    )
    header_timeout: float = limit(10.0, "Seconds that the headers of a request may take (408).", least=0.1, most=DAY_S)
    body_timeout: float = limit(300.0, "Seconds that the body of a request may take (408).", least=0.1, most=DAY_S)
    min_body_rate: int = limit(
        10_000,
        "Bytes a second that a body must bring, after its first 5 s (408); 0: no limit.",
        least=0,
        most=1_000_000_000,
    )
    idle_timeout: float = limit(
        60.0, "Seconds after which a connection without a request is closed.", least=0.1, most=DAY_S
    )
    write_timeout: float = limit(60.0, "Seconds after which a client that reads nothing is cut.", least=0.1, most=DAY_S)
    stream_interval: int = flag(
        1,
        "Tokens of a streamed event after the first: with more, the server spends less time on each token, and "
        "clients see text in larger pieces. A request's stream_interval comes first.",
        least=1,
        most=STREAM_INTERVAL_MAX,
    )
    sse_keep_alive: float = limit(
        0.0, "Seconds of silence after which a stream gets a comment line; 0: never.", least=0, most=DAY_S
    )
    replicas: str = flag(
        "1",
        "Engine processes of this server; cores, free RAM and GPUs are divided "
        "among them. --memory and --threads are for each of them. 0: only those of "
        "machines that join (--listen-engines). MIN..MAX with --ray.",
    )
    roles: str | None = flag(
        None,
        "Roles of the replicas: 1p2d is one that computes prompts, and two that "
        "go on with the answers; b: both. A prompt and its answer part where that "
        "is sooner.",
    )
    router: Literal["seconds", "kv-only", "split", "least-loaded"] = debug(
        "seconds",
        "How a request gets its replica. seconds: the soonest first token, by the snapshots "
        "that each replica has. The others are to compare with.",
    )
    listen_engines: str | None = flag(
        None, "HOST:PORT for the engines of other machines (weft join); encrypted. Needs --token."
    )
    token: str | None = flag(
        None, "File with the token of the fleet (mode 0600); created if there is none. Machines that join need a copy."
    )
    ray: str | None = flag(
        None,
        "Address of a Ray cluster that places the replicas; auto: the one of this machine. Needs the extra weft[ray].",
    )
    ray_cpus: float = flag(
        1.0, "CPUs that Ray sets aside for each rank of a replica.", least=0, table="server", most=1024
    )
    ray_gpus: float | None = flag(
        None,
        "GPUs that Ray sets aside for each rank of a replica; default: 1 with --device cuda, else 0.",
        least=0,
        table="server",
        most=64,
    )
    http_workers: int = flag(
        1,
        "HTTP processes that share the port; more than one where a core is no longer enough for JSON and streams.",
        least=1,
        most=THREADS_MAX,
    )
    restarts: int = limit(
        5,
        "Restarts of an engine process that dies or stalls; its requests go on. After "
        "them the server ends with code 1 or 3. Ten minutes of service restore all.",
        least=0,
        most=1_000_000,
    )
    stall_after: float = limit(
        10.0,
        "Seconds of silence after which an engine process counts as stalled and "
        "is replaced; 0: never. A step that computes may take 30 times as long.",
        least=0,
        most=DAY_S,
    )
    kv_events_config: str | None = flag(
        None,
        "Publish KV events for routers outside, as vLLM does and with its JSON, such as "
        '\'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}\'; see docs/kv-events.md.',
    )
    record: str | None = flag(
        None,
        "File for a recording of the traffic, to replay with `weft simulate`: "
        "arrival times, lengths and keyed hashes, no text.",
    )
    record_tokens: bool = flag(
        False,
        "Record the tokens of prompts and answers too: text can be read out "
        "of such a file. `weft simulate --speculate` needs them.",
        table="server",
    )
    record_limit: str = limit("1GB", "Size at which the recording ends.", size=True)
    response_store: str | None = flag(
        None,
        "File that keeps the answers of /v1/responses, for "
        "previous_response_id; off: none. Default: "
        "weft/responses.sqlite in the user's state directory.",
        table="server",
    )
    response_store_size: str = limit(
        "1GB",
        "Size of the kept responses; beyond it the conversation that was continued the longest ago goes.",
        size=True,
    )
    max_stored_responses: int = limit(100_000, "Responses that are kept.", least=1, most=1_000_000_000)
    response_days: float = limit(
        30.0, "Days that a response is kept after its conversation was last continued.", least=0.001, most=DAYS_MAX
    )
    session_key: str | None = session_key()
    max_sessions: int = limit(1000, "Sessions that one API key may have (429).", least=1, most=1_000_000)
    session_store_size: str = limit(
        "256MB", "Size of the tokens and messages of one API key's sessions (429).", size=True
    )
    session_days: float = limit(
        30.0, "Days that a session is kept at most after it was saved.", least=0.001, most=DAYS_MAX
    )
    max_response_turns: int = limit(1000, "Responses that one conversation may have (400).", least=1, most=1_000_000)
    file_store: str | None = flag(
        None,
        "Directory that keeps the files and batches of /v1/files and "
        "/v1/batches; off: none. Default: weft/files in the user's state "
        "directory.",
        table="server",
    )
    file_store_size: str = limit("4GB", "Bytes of all uploaded files (413).", size=True)
    max_stored_files: int = limit(1000, "Files that are kept (413).", least=1, most=1_000_000)
    name_store: str | None = flag(
        None,
        "File that keeps the names of Ollama's /api/create; off: none. "
        "Default: weft/names.json in the user's state directory.",
        table="server",
    )
    blob_size: str = limit("100GB", "Size of one GGUF file that is uploaded to /api/blobs (413).", size=True)
    name_store_size: str = limit("4MB", "Size of that file.", size=True)
    max_created_names: int = limit(1000, "Names that are kept.", least=1, most=1_000_000)
    file_days: float = limit(30.0, "Days that a file and an ended batch are kept.", least=0.001, most=DAYS_MAX)
    max_batch_lines: int = limit(50_000, "Lines of one batch.", least=1, most=10_000_000)
    otlp_endpoint: str | None = flag(
        None,
        "URL of an OpenTelemetry collector (OTLP over HTTP), such as "
        "http://localhost:4318, which gets a span for each request; "
        "needs the extra weft[otlp].",
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "info", "Lowest level that is logged; info has one line per request."
    )
    log_format: Literal["text", "json"] = flag(
        "text", "Form of the log; json: an object per line, of engines too, and no banner."
    )
    log_file: str | None = flag(
        None, "File that gets the log; it is opened again when it was moved (logrotate). Default: stderr."
    )

    def recording(self) -> RecordingTarget | None:
        """Return the recording with an absolute path; None for no recording. Raise ConfigError."""
        limit = parse_bytes(self.record_limit, flag="limits.record_limit")
        if self.record is None:
            if self.record_tokens:
                raise ConfigError(
                    "server.record_tokens needs --record FILE: without it nothing is recorded",
                    param="server.record_tokens",
                )
            return None
        if not self.record.strip():
            raise ConfigError("--record is empty: it takes the name of a file", param="--record")
        file = Path(self.record).expanduser().absolute()
        if file.exists():
            raise ConfigError(
                f"--record {file}: the file is there already, and a recording begins a "
                "new one: name another, or remove it",
                param="--record",
            )
        return RecordingTarget(str(file), limit, self.record_tokens)

    def socket_mode(self) -> int:
        """Return the mode of the Unix socket. Raise ConfigError."""
        if not re.fullmatch(r"0?[0-7]{3}", self.uds_mode):
            raise ConfigError(
                f"server.uds_mode is {self.uds_mode!r}; it is three digits from 0 to 7, such as 660",
                param="server.uds_mode",
            )
        return int(self.uds_mode, 8)

    def is_local(self) -> bool:
        """Return whether only programs of this machine can connect."""
        return self.uds is not None or is_loopback(self.host)

    def _check_socket(self) -> None:
        self.socket_mode()
        if self.uds is None:
            return
        if not self.uds.strip():
            raise ConfigError("--uds is empty: it takes the path of a Unix socket", param="--uds")
        if self.port is not None or self.host != "127.0.0.1":
            named = f"--host {self.host}" if self.port is None else f"--port {self.port}"
            raise ConfigError(f"--uds {self.uds} and {named} both name where to listen; leave one out", param="--uds")
        if self.ssl_certfile is not None:
            raise ConfigError(
                "--ssl-certfile is for a port: nothing of a Unix socket (--uds) leaves this machine",
                param="--ssl-certfile",
            )

    def template_bytes(self) -> int:
        return parse_bytes(self.template_memory, flag="limits.template_memory")

    def response_path(self) -> Path | None:
        """Return the path of the store of responses; None where it is off. Raise ConfigError."""
        return _store_file(self.response_store, "server.response_store", default_path)

    def response_limits(self) -> StoreLimits:
        """Return the limits of the store of responses. Raise ConfigError."""
        size = parse_bytes(self.response_store_size, flag="limits.response_store_size")
        return StoreLimits(
            count=self.max_stored_responses,
            bytes=size,
            age_s=self.response_days * 86_400,
            turns=self.max_response_turns,
            turn_bytes=self.max_body_mb * _MB,
            session_age_s=self.session_days * DAY_S,
        )

    def session_limits(self) -> SessionLimits:
        """Return the limits of sessions. Raise ConfigError."""
        size = parse_bytes(self.session_store_size, flag="limits.session_store_size")
        return SessionLimits(self.max_sessions, size, self.session_days * DAY_S)

    def file_directory(self) -> Path | None:
        """Return the directory of the store of files; None where it is off. Raise ConfigError."""
        if self.file_store == "off":
            return None
        if self.file_store is None:
            return default_path().with_name("files")
        if not self.file_store.strip():
            raise ConfigError(
                "server.file_store is empty: it takes the name of a directory, or off", param="server.file_store"
            )
        directory = Path(self.file_store).expanduser().absolute()
        if directory.exists() and not directory.is_dir():
            raise ConfigError(f"server.file_store {directory}: it is not a directory", param="server.file_store")
        return directory

    def file_limits(self) -> Bounds:
        """Return the limits of the store of files. Raise ConfigError."""
        size = parse_bytes(self.file_store_size, flag="limits.file_store_size")
        return Bounds(count=self.max_stored_files, bytes=size, age_s=self.file_days * 86_400)

    def names(self) -> tuple[Path | None, int]:
        """Return the file of the store of created names, None where it is off, and its most bytes. Raise
        ConfigError."""
        return (
            _store_file(self.name_store, "server.name_store", lambda: state_directory() / "names.json"),
            parse_bytes(self.name_store_size, flag="limits.name_store_size"),
        )

    def presets(self) -> PresetStore | None:
        """Return the store of created names; None where it is off. Raise ConfigError."""
        from weft.server.presets import PresetStore  # with the bodies of requests, after the engine's start

        path, size = self.names()
        return None if path is None else PresetStore(path, count_max=self.max_created_names, bytes_max=size)

    def blob_bytes(self) -> int:
        return parse_bytes(self.blob_size, flag="limits.blob_size")

    def keep_alive_s(self) -> float | None:
        """Return the seconds that a model stays in memory; None for ever. Raise ConfigError."""
        return parse_duration(self.keep_alive, flag="limits.keep_alive")

    def image_limits(self) -> ImageLimits:
        """Return the limits of pictures and videos. Raise ConfigError."""
        from weft.images.decoding import ImageLimits  # with Pillow, which few commands need

        return ImageLimits(
            image_bytes=parse_bytes(self.image_bytes, flag="limits.image_bytes"),
            image_pixels=self.image_pixels,
            image_side=self.image_side,
            video_bytes=parse_bytes(self.video_bytes, flag="limits.video_bytes"),
            video_frames=self.video_frames,
        )

    def picture_hosts(self) -> tuple[str, ...]:
        """Return the hosts of --media-domains. Raise ConfigError."""
        if not self.media_domains:
            return ()
        from weft.server.media import read_domains  # with its HTTP client

        return read_domains(self.media_domains)

    def client_keys(self) -> tuple[str, ...]:
        """Return the keys of --api-key and --api-key-file. Raise ConfigError."""
        if self.api_key_file is None:
            return self.api_key
        try:
            lines = Path(self.api_key_file).expanduser().read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            words = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
            raise ConfigError(f"--api-key-file {self.api_key_file}: {words}", param="--api-key-file") from None
        keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
        if not keys:
            raise ConfigError(f"--api-key-file {self.api_key_file}: it has no key", param="--api-key-file")
        return (*self.api_key, *keys)

    def quotas(self) -> Quotas:
        return Quotas(
            requests_per_minute=self.key_requests_per_minute,
            tokens_per_minute=self.key_tokens_per_minute,
            bytes_in_flight=self.key_mb_in_flight * _MB,
        )

    def origins(self) -> Origins:
        """Return the allowed origins. Raise ConfigError."""
        return Origins(bound_host=self.host, allowed_hosts=self.allowed_host, allowed_origins=self.allowed_origin)

    def edge_limits(self) -> EdgeLimits:
        return EdgeLimits(
            request_line_bytes=self.max_request_line,
            header_bytes=self.max_header_bytes,
            header_count=self.max_headers,
            header_s=self.header_timeout,
            body_bytes=self.max_body_mb * _MB,
            body_s=self.body_timeout,
            body_rate_min=self.min_body_rate,
            idle_s=self.idle_timeout,
            write_s=self.write_timeout,
            connections=self.max_connections,
            connections_per_address=self.max_connections_per_address,
            buffered_bytes=self.max_buffered_mb * _MB,
            blob_bytes=self.blob_bytes(),
        )

    def _check_joining(self) -> None:
        if self.listen_engines is not None:
            tcp_address(self.listen_engines, flag="--listen-engines")
            if self.token is None:
                raise ConfigError(
                    f"--listen-engines {self.listen_engines} needs --token FILE: nothing but HTTP listens without one",
                    param="--token",
                )
        elif self.token is not None:
            raise ConfigError(
                "--token is the token of machines that join; it needs --listen-engines HOST:PORT",
                param="--listen-engines",
            )
        least, most = self.replica_range()
        if self.ray is not None:
            if importlib.util.find_spec("ray") is None:
                raise ConfigError("--ray needs the package ray: pip install 'weft[ray]'", param="--ray")
            if not least:
                raise ConfigError("--replicas 0: Ray places at least one replica", param="--replicas")
        elif least != most:
            raise ConfigError(
                f"--replicas {self.replicas}: a range needs a Ray cluster that places them (--ray)", param="--replicas"
            )
        elif not least and self.listen_engines is None:
            raise ConfigError(
                "--replicas 0 leaves the computing to machines that join; it needs --listen-engines HOST:PORT",
                param="--replicas",
            )

    def _check_kv_events(self) -> None:
        config = None if self.kv_events_config is None else read_config(self.kv_events_config)
        if config is None:
            return
        if not self.own_replicas:
            why = "engines that Ray places" if self.ray is not None else "engines of other machines"
            raise ConfigError(f"{KV_EVENTS} needs an engine of this machine: {why} publish none", param=KV_EVENTS)
        config.of_rank(self.own_replicas - 1)

    def open_event_addresses(self) -> list[str]:
        """Return the addresses of KV events that other machines can reach, or that are on other machines."""
        config = None if self.kv_events_config is None else read_config(self.kv_events_config)
        if config is None:
            return []
        addresses = [address for address in (config.endpoint, config.replay_endpoint) if address is not None]
        return [address for address in addresses if (host := host_of(address)) is not None and not is_loopback(host)]

    def replica_range(self) -> tuple[int, int]:
        """Return the least and the most replicas. Raise ConfigError."""
        match = re.fullmatch(r"(\d{1,5})(?:\.\.(\d{1,5}))?", str(self.replicas))
        if match is None:
            raise ConfigError(f"--replicas {self.replicas}: it is a number, or MIN..MAX", param="--replicas")
        least = int(match.group(1))
        most = least if match.group(2) is None else int(match.group(2))
        if most < least:
            raise ConfigError(f"--replicas {self.replicas}: the most is below the least", param="--replicas")
        check_replicas(f"--replicas {self.replicas}", most, flag="--replicas")
        return least, most

    def replica_roles(self) -> list[Role]:
        """Return the roles of the replicas of this machine; empty without ``--roles``. Raise ConfigError."""
        if self.roles is None:
            return []
        roles = parse_roles(self.roles)
        missing = partner_missing(roles)
        if missing and self.listen_engines is None:
            raise ConfigError(
                f"--roles {self.roles} has no {missing} replica, so nothing is split; add one, "
                "or let machines join (--listen-engines)",
                param="--roles",
            )
        if self.ray is not None or self.router not in ("seconds", "kv-only", "split"):
            other = "--ray" if self.ray is not None else f"debug.router {self.router}"
            raise ConfigError(f"--roles {self.roles} does not work with {other}", param="--roles")
        if str(self.replicas) not in ("1", str(len(roles))):
            raise ConfigError(
                f"--roles {self.roles} are {len(roles)} replicas, and --replicas is {self.replicas}", param="--roles"
            )
        return roles

    @property
    def own_replicas(self) -> int:
        """Number of engine processes of this machine."""
        if self.roles is not None:
            return len(parse_roles(self.roles))
        return 0 if self.ray is not None else self.replica_range()[0]

    def check(self) -> None:
        """Raise ConfigError that names the flag. Whether the address is free is known only when it is bound."""
        check_fields(self)
        if any(not key.strip() for key in self.api_key):
            raise ConfigError("--api-key is empty: leave it out to serve without a key", param="--api-key")
        if any(not key.strip() for key in self.operator_key):
            raise ConfigError("--operator-key is empty: leave it out to let every --api-key in", param="--operator-key")
        if any(not name.strip() for name in self.served_model_name):
            raise ConfigError("--served-model-name is empty", param="--served-model-name")
        self._check_socket()
        self._check_joining()
        self._check_kv_events()
        self.replica_roles()
        if self.record is not None and not self.own_replicas:
            raise ConfigError(
                f"--record records the replicas of this machine, and there is none (--replicas {self.replicas})",
                param="--record",
            )
        self.origins()
        if self.otlp_endpoint is not None:
            check_endpoint(self.otlp_endpoint)
        self.response_path()
        self.response_limits()
        self.session_limits()
        self.file_directory()
        self.file_limits()
        self.names()
        self.picture_hosts()
        self.keep_alive_s()
        if not self.client_keys() and (self.tenant_by_key or self.quotas().any):
            raise ConfigError(
                "--tenant-by-key and the quotas of keys need keys: --api-key or --api-key-file",
                param="--tenant-by-key" if self.tenant_by_key else "--api-key",
            )
        if self.show_text and not self.operator_key:
            raise ConfigError(
                "server.show_text shows the text of clients: it needs an --operator-key, the only key to "
                "/v1/cache then",
                param="server.show_text",
            )
        check_reasoning_parser(self.reasoning_parser)
        check_tool_parser(self.tool_parser)
        if self.chat_template is not None:  # now, not after a large model was read
            from weft.text.chat import check_syntax, read_chat_template

            text = read_chat_template(Path(), override=self.chat_template)
            assert text is not None
            check_syntax(*text)
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ConfigError(
                f"debug.metrics_prefix {self.metrics_prefix!r}: use letters, digits and _, and start with a letter",
                param="debug.metrics_prefix",
            )


def _store_file(value: str | None, flag: str, default: Callable[[], Path]) -> Path | None:
    """Return the path that ``flag`` names; None where it is off. Raise ConfigError."""
    if value == "off":
        return None
    if value is None:
        return default()
    if not value.strip():
        raise ConfigError(f"{flag} is empty: it takes the name of a file, or off", param=flag)
    file = Path(value).expanduser().absolute()
    if not file.parent.is_dir() or file.is_dir():
        raise ConfigError(f"{flag} {file}: it is a directory, or in none that exists", param=flag)
    return file
