"""Mixed hostility against a running server, with a well-behaved client beside it.

    weft serve --port 8000 --log-level error --operator-key SECRET &
    python -m benchmarks.soak_hostile --url http://127.0.0.1:8000 --pid $! --requests 100000 --seed 1

Hostile requests are mutations of valid ones, half requests whose client leaves, foreign origins, rebound
hosts and bodies that are no JSON. Every fiftieth request is well-behaved: greedy, and its text must always
be the same. The run fails on a 5xx, on a wrong answer, or if the process has grown by more than
``--growth`` after its first tenth. The seed decides every byte that is sent.

Without an operator key any client may put the server to sleep, and so would a hostile one."""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

HEAD = b"Host: localhost\r\nContent-Type: application/json\r\n"
WELL_BEHAVED = b'{"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}'
BODIES = (
    WELL_BEHAVED,
    b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}',
    b"{}",
    b"[",
    b"\xff",
    b'{"prompt": ' + b"[" * 3000,
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": [1e9]}',
)
PATHS = (b"/v1/completions", b"/v1/chat/completions", b"/tokenize", b"/detokenize", b"/nowhere", b"/sleep?level=1")
EXTRA = (
    b"",
    b"Origin: http://evil.example\r\n",
    b"Host: evil.example\r\n",
    b"A: b\r\n" * 200,
    b"Content-Length: 1\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"X: " + b"y" * 40_000 + b"\r\n",
)


def post(path: bytes, body: bytes, extra: bytes = b"") -> bytes:
    head = b"POST %s HTTP/1.1\r\n%s%sContent-Length: %d\r\n\r\n" % (path, HEAD, extra, len(body))
    return head + body


def hostile(source: random.Random) -> bytes:
    data = bytearray(post(source.choice(PATHS), source.choice(BODIES), source.choice(EXTRA)))
    for _ in range(source.randrange(3)):
        at = source.randrange(len(data))
        data[at : at + source.randrange(1, 9)] = source.randbytes(source.randrange(4))
    return bytes(data[: source.randrange(len(data))] if source.random() < 0.2 else data)


def status_and_body(address: tuple[str, int], data: bytes, *, leaves: bool, wait_s: float) -> tuple[int, bytes]:
    """The first answer on a new connection; (0, b"") if there was none."""
    answer = b""
    try:
        with socket.create_connection(address, timeout=wait_s) as client:
            client.sendall(data)
            if leaves:
                return 0, b""
            while b"\r\n\r\n" not in answer:
                if not (piece := client.recv(65536)):
                    return 0, b""
                answer += piece
            head, body = answer.split(b"\r\n\r\n", 1)
            size = next(
                (
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                ),
                0,
            )
            while len(body) < size and (piece := client.recv(65536)):
                body += piece
            return int(head.split(b" ", 2)[1]), body
    except (OSError, ValueError, IndexError):
        return 0, b""


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after this long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--growth", type=float, default=0.1)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    url = urlsplit(args.url)
    address = (url.hostname or "", url.port or 80)
    source = random.Random(args.seed)
    statuses: Counter[int] = Counter()
    texts: Counter[str] = Counter()
    first_rss = 0
    end_s = time.monotonic() + args.seconds
    sent = 0
    while sent < args.requests and time.monotonic() < end_s:
        sent += 1
        if sent % 50 == 0:
            status, body = status_and_body(address, post(PATHS[0], WELL_BEHAVED), leaves=False, wait_s=30)
            is_answered = status == 200
            texts[json.loads(body)["choices"][0]["text"] if is_answered else f"status {status}"] += 1
        else:
            data = hostile(source)
            status, _ = status_and_body(address, data, leaves=source.random() < 0.3, wait_s=0.05)
            if status >= 500:
                print(f"request {sent}: {status} for {data!r}", file=sys.stderr)
        statuses[status] += 1
        is_warm = sent >= args.requests // 10 or time.monotonic() > end_s - args.seconds * 0.8
        if is_warm and not first_rss:
            first_rss = rss_bytes(args.pid)
    grown = rss_bytes(args.pid) / first_rss - 1 if first_rss else 0.0
    print(f"{sent} requests, statuses {dict(sorted(statuses.items()))} (0: no answer)")
    print(f"well-behaved answers: {dict(texts)}; memory {grown:+.1%} since the first tenth")
    if args.json is not None:
        args.json.write_text(
            json.dumps(
                {
                    "seed": args.seed,
                    "requests": sent,
                    "statuses": {str(code): statuses[code] for code in sorted(statuses)},
                    "well_behaved_answers": dict(texts),
                    "memory_growth": round(grown, 4),
                },
                indent=1,
            )
            + "\n"
        )
    is_right = len(texts) == 1 and not next(iter(texts)).startswith("status")
    return 0 if is_right and grown <= args.growth and not any(code >= 500 for code in statuses) else 1


if __name__ == "__main__":
    sys.exit(main())
