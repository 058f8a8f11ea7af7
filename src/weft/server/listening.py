"""Where the server listens: a port or a Unix socket, and the certificate that a port may have.

    --host, --port                 http://HOST:PORT
    with --ssl-certfile            https://HOST:PORT     uvicorn speaks TLS, each HTTP worker with its own context
    --uds PATH                     unix:PATH             a file that its owner and its group may open

A setting that cannot work (a busy port, a file that is not a socket, a key that is not the certificate's) is an error
in one line before a model is read. A socket file that a killed server left is replaced; a socket file at which a server
answers is not. The file is removed with its server. A certificate file that changes is read again for new connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

from weft.errors import ConfigError
from weft.server.config import BACKLOG, DEFAULT_PORT, PORTS_TRIED, ServerConfig
from weft.server.running import UNIX

_LOOK_S = 1.0
"""Seconds between two checks of the files of the certificate."""
_SOCKET_PATH_BYTES = 107
"""Most bytes of a Unix socket's path on Linux. Other systems allow a little less and raise an error themselves."""
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
_log = logging.getLogger("weft.server")


class PortBusyError(ConfigError):
    """Another program listens on the port."""


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """Listen as ``config`` says, within the block. Raise ConfigError that names the flag to change."""
    listener = bind(config)
    own = None if config.uds is None else _file_of(Path(config.uds))
    try:
        yield listener
    finally:
        listener.close()
        if config.uds is not None and _file_of(Path(config.uds)) == own:  # another server may have replaced the file
            Path(config.uds).unlink()


def bind(config: ServerConfig) -> socket.socket:
    """Return a listening socket. Raise ConfigError that names the flag to change."""
    if config.uds is not None:
        return _listen_at_file(Path(config.uds), config.socket_mode())
    if config.port is not None:
        return _listen(config.host, config.port)
    for port in range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED):
        with contextlib.suppress(PortBusyError):
            return _listen(config.host, port)
    raise ConfigError(
        f"ports {DEFAULT_PORT} to {DEFAULT_PORT + PORTS_TRIED - 1} are all in use; name a free "
        "one with --port (--port 0 takes any)",
        param="--port",
    )


def listen_at(path: str) -> socket.socket:
    """Listen at a socket file that only this process knows, such as the supervisor's."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def own_url(config: ServerConfig, listener: socket.socket) -> str:
    """Return the URL of ``listener`` as a client on this machine writes it."""
    if config.uds is not None:
        return UNIX + str(Path(config.uds).absolute())
    host, port = listener.getsockname()[:2]
    host = config.host or host
    host = _ANY_ADDRESS.get(host, host)
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return a TLS context with the certificate and its key; None if the server speaks plain HTTP. Raise
    ConfigError."""
    certificate, key, authorities = config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs
    if certificate is None:
        named = [
            name
            for name, value in (
                ("--ssl-keyfile", key),
                ("server.ssl_ca_certs", authorities),
                ("server.ssl_keyfile_password", config.ssl_keyfile_password),
            )
            if value is not None
        ]
        if named:
            raise ConfigError(f"{named[0]} needs --ssl-certfile: without a certificate there is no TLS", param=named[0])
        return None
    _check_certificates(certificate, "--ssl-certfile")
    if key is not None:
        _check_readable(key, "--ssl-keyfile")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_key(context, config)
    if authorities is not None:
        _check_certificates(authorities, "server.ssl_ca_certs")
        context.load_verify_locations(authorities)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


async def follow_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Read the certificate and its key again when their files change; connections that are open keep the old one."""
    files = [file for file in (config.ssl_certfile, config.ssl_keyfile) if file is not None]
    seen = [_file_of(Path(file)) for file in files]
    while True:
        await asyncio.sleep(_LOOK_S)
        now = [_file_of(Path(file)) for file in files]
        if now == seen:
            continue
        seen = now
        try:
            tls_context(config)  # loading a pair that does not match would replace the valid one
            _load_key(context, config)
        except ConfigError as error:
            _log.warning("the certificate changed and was not loaded: %s", error.message)
        else:
            _log.info("the certificate changed: new connections get the new %s", config.ssl_certfile)


def _load_key(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Load the key. Raise ConfigError."""
    key = config.ssl_keyfile or config.ssl_certfile
    flag = "--ssl-certfile" if config.ssl_keyfile is None else "--ssl-keyfile"
    is_encrypted = False

    def password() -> str:
        nonlocal is_encrypted
        is_encrypted = True
        return config.ssl_keyfile_password or ""

    assert config.ssl_certfile is not None
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password)
    except (ssl.SSLError, OSError, ValueError) as error:
        if is_encrypted:
            hint = (
                "server.ssl_keyfile_password does not decrypt it"
                if config.ssl_keyfile_password
                else "give its password as WEFT_SSL_KEYFILE_PASSWORD (server.ssl_keyfile_password)"
            )
            raise ConfigError(f"{flag} {key}: the key is encrypted; {hint}", param=flag) from None
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{flag} {key}: this is not the key of the certificate {config.ssl_certfile}", param=flag
            ) from None
        hint = "; name the file of the key with --ssl-keyfile" if config.ssl_keyfile is None else ""
        raise ConfigError(f"{flag} {key}: the file has no private key in PEM form{hint}", param=flag) from None


def _check_certificates(file: str, flag: str) -> None:
    """Raise ConfigError for a file without certificates."""
    _check_readable(file, flag)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except ssl.SSLError:
        raise ConfigError(f"{flag} {file}: the file has no certificate in PEM form", param=flag) from None


def _check_readable(file: str, flag: str) -> None:
    try:
        Path(file).open("rb").close()
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {_in_words(error)}", param=flag) from None


def _in_words(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _file_of(path: Path) -> tuple[int, int, int] | None:
    """Return the identity of the file at ``path``, which changes with its content; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, 0 if stat.S_ISSOCK(status.st_mode) else status.st_mtime_ns


def _listen_at_file(path: Path, mode: int) -> socket.socket:
    """Listen at a Unix socket. Raise ConfigError."""
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
        raise ConfigError(
            f"--uds {path}: the path of a Unix socket has at most {_SOCKET_PATH_BYTES} bytes, and this one has "
            f"{len(os.fsencode(path))}",
            param="--uds",
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777 & ~mode)  # the mode holds from the first moment on
    try:
        if path.is_socket():
            _remove_stale(path)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        is_other = error.errno == errno.EADDRINUSE
        words = "a file exists there, and it is not a socket" if is_other else _in_words(error)
        raise ConfigError(f"--uds {path}: {words}", param="--uds") from None
    except ConfigError:
        listener.close()
        raise
    finally:
        os.umask(before)
    listener.setblocking(False)
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a server that has ended. Raise ConfigError if a server answers there; OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(f"--uds {path}: another program listens there; name another path", param="--uds")


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        words = _in_words(error) if isinstance(error, OSError) else "this is not a host name"
        raise ConfigError(f"--host {host}: {words}", param="--host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortBusyError(
                f"port {port} is in use on {host}; name a free one with --port (--port 0 "
                "takes any), or leave --port out and the next free one is taken",
                param="--port",
            ) from None
        flag = "--port" if error.errno == errno.EACCES else "--host"
        raise ConfigError(f"cannot listen on {host} port {port}: {_in_words(error)}", param=flag) from None
    listener.setblocking(False)
    return listener
