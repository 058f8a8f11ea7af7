"""Does weft cut text as llama.cpp does, for each pre-tokenizer of GGUF files?

    python -m benchmarks.peers.make_env --llama
    python -m benchmarks.peers.pre_tokenizers [--env DIR] [NAME ...]

A tiny GGUF file with one vocabulary and each name of a pre-tokenizer is read by weft and by llama.cpp's server, whose
/tokenize gets texts of many scripts. Texts that differ are printed. llama.cpp does not compose text (NFC), and for the
names of ``KNOWN_TO_DIFFER`` it does not cut at a capital within a word, as the tokenizer.json of the releases does.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import unicodedata
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import httpx

from benchmarks.peers.engines import HOST, other_server
from benchmarks.peers.environment import DEFAULT_ENVIRONMENT, Environment
from tests.fixtures.checkpoints import make_checkpoint
from tests.support import gguf_files
from tests.unit.text.test_gguf_vocabulary import CORPUS, trained
from weft.cli.remote import free_port
from weft.models.gguf.header import read_header
from weft.models.gguf.vocabulary import write_tokenizer
from weft.pre_tokenizers import GPT2, PRE_TOKENIZERS
from weft.text.tokenizer import Tokenizer

TEXTS = [
    *CORPUS,
    *("12345678901 1,234,567 99 abc123def 1 22 333 4444 55555", "!hello #tag .dotted (paren) a.b.c $x"),
    *("한국어 텍스트와 숫자 2024년", "ภาษาไทย ทดสอบ", "Ελληνικά Ωmega ﬀ ａｂｃ", "क्षत्रिय 123", "Ünïcödé ÀÉÎ"),
    *("a    b\t\t\tc   \n   d  ", "   ", "x=1\r\n\r\ny=2\n\n\n", "it's IT'S can't 'LL", "½ ² Ⅷ ①"),
    *("—…“quotes”；、。", "ㄅㄆㄇ", "e\u0301 o\u0308ffnen", "foo_bar/baz\\qux"),
]
KNOWN_TO_DIFFER = ("kimi-k2", "youtu", "tiny_aya", "cohere2moe")
"""Seen with llama.cpp 0c1e570."""


def differing(name: str, environment: Environment, checkpoint: Path) -> list[str]:
    """Return the texts whose tokens differ."""
    file, made = checkpoint / "named.gguf", checkpoint / "made"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    with mock.patch.object(gguf_files, "write_vocabulary", partial(gguf_files.write_vocabulary, pre=name)):
        gguf_files.write_gguf(checkpoint, file)
    write_tokenizer(read_header(file), made)
    ours, port = Tokenizer.load(made), free_port()
    command = [str(environment.llama_server()), "--model", str(file), "--host", HOST, "--port", str(port)]
    found = []
    with other_server([*command, "--threads", "1", "--ctx-size", "64", "--no-warmup"], {}, port) as url:
        for text in TEXTS:
            body = {"content": text, "add_special": False, "parse_special": True}
            theirs = httpx.post(f"{url}/tokenize", json=body, timeout=10.0).json()["tokens"]
            composed = PRE_TOKENIZERS[name].nfc and not unicodedata.is_normalized("NFC", text)
            if theirs != ours.encode(text, add_special_tokens=False) and not composed:
                found.append(text)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.pre_tokenizers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", default=list(PRE_TOKENIZERS), metavar="NAME")
    parser.add_argument("--env", type=Path, default=DEFAULT_ENVIRONMENT)
    args = parser.parse_args(argv)
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="weft-pre-") as folder:
        checkpoint = make_checkpoint(Path(folder) / "llama", "llama", vocab_size=640)
        trained((GPT2,), False).save(str(checkpoint / "tokenizer.json"))
        (checkpoint / "tokenizer_config.json").write_text("{}")
        for name in args.names:
            texts, known = differing(name, Environment(args.env), checkpoint), name in KNOWN_TO_DIFFER
            print(f"{name:<20} {len(texts)} of {len(TEXTS)} differ{' (known)' if texts and known else ''}", flush=True)
            for text in () if known else texts:
                print(f"    {text!r}")
            wrong += bool(texts) and not known
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
