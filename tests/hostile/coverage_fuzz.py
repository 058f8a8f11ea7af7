"""Fuzzing that follows coverage: ``python -m tests.hostile.coverage_fuzz --seconds 60``; needs ``atheris``.

    bytes of libFuzzer --first byte--> body of a request | grammar | config.json | text of a tool call
                                       '--> a result, or an error that a client may see

Atheris instruments the code of weft, so that the fuzzer keeps inputs that reach new lines. The corpus of
``test_fuzz`` is its beginning. A crash writes its input to the working directory and ends with code 77.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path

try:
    import atheris
except ImportError:
    print("coverage-guided fuzzing is left out: atheris is not installed")
    sys.exit(0)

with atheris.instrument_imports(include=["weft.server.protocol", "weft.text", "weft.families"]):
    from weft.errors import WeftError
    from weft.families import read_spec
    from weft.server.protocol import ChatBody, CompletionBody, grammar_of, parse_body, sampling_params, value_count
    from weft.text.grammar_limits import check_shape
    from weft.text.grammar_worker import lark_of
    from weft.text.tools.definitions import read_choice, read_tools
    from weft.text.tools.formats import FORMATS, ToolFormat
    from weft.text.tools.reader import ToolCallReader

from tests.hostile.test_fuzz import BODIES, GRAMMARS, SCHEMAS


def body(raw: bytes) -> None:
    parsed = parse_body(raw, ChatBody if b"messages" in raw else CompletionBody)
    if isinstance(parsed, ChatBody):
        read_choice(parsed.tool_choice, read_tools(parsed.tools))
    sampling_params(parsed, {}, logprobs=None, max_tokens=1, grammar=grammar_of(parsed, lambda text: None)).check(1000)
    assert value_count(raw) >= 1


def grammar(raw: bytes) -> None:
    """The worker makes a refusal of every ValueError."""
    with contextlib.suppress(ValueError):
        check_shape([{"lark_grammar": lark_of(raw.decode("utf-8", "replace"))}])


def schema(raw: bytes) -> None:
    with contextlib.suppress(ValueError):
        check_shape([{"json_schema": json.loads(raw)}])


def config(raw: bytes) -> None:
    value = json.loads(raw)
    if isinstance(value, dict):
        read_spec(value)


def tool_call(raw: bytes) -> None:
    """A text in two parts gives the same content and calls as in one."""
    row = FORMATS[raw[0] % len(FORMATS)]
    text = raw[1:].decode("utf-8", "replace")
    half = len(text) // 2
    assert _read_calls(row, [text]) == _read_calls(row, [text[:half], text[half:]])


def _read_calls(row: ToolFormat, parts: list[str]) -> tuple[str, dict[int, str]]:
    reader = ToolCallReader(row, [], eager=False)
    parsed = [part for read in [*map(reader.push, parts), reader.finish()] for part in read]
    arguments = {part.index: (part.name or "") + part.arguments for part in parsed if not isinstance(part, str)}
    return "".join(part for part in parsed if isinstance(part, str)), arguments


TARGETS = (body, grammar, schema, config, tool_call)


def one(data: bytes) -> None:
    if len(data) < 2:
        return
    try:
        TARGETS[data[0] % len(TARGETS)](data[1:])
    except (WeftError, json.JSONDecodeError, UnicodeDecodeError):
        pass
    except RecursionError:
        if TARGETS[data[0] % len(TARGETS)] in (body, grammar, tool_call):
            raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for kind, corpus in enumerate((BODIES, GRAMMARS, SCHEMAS)):
            for number, text in enumerate(corpus):
                Path(folder, f"{kind}-{number}").write_bytes(bytes([kind]) + text.encode())
        atheris.Setup(
            [
                sys.argv[0],
                folder,
                f"-max_total_time={args.seconds}",
                f"-seed={args.seed}",
                "-max_len=65536",
                "-timeout=20",
            ],
            one,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
