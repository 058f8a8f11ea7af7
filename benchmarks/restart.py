"""The first token after a restart with a store, against the first token of a cold engine.

    python -m benchmarks.restart --lengths 1000,4000         LFM2-350M-like, random weights in bfloat16

Each *life* is a process of its own: it loads the model, warms up with other tokens, and answers one prompt.

    cold       an empty directory; the answer is computed, and the process ends
    restart    the same directory and prompt: the prefix is read from disk
    killed     as restart, after a process that got kill -9 once its writes were done
    dropped    as restart, with the files of the store dropped from the page cache first

With ``--key FILE`` the records are encrypted (``server.session_key``); CPU seconds of a life's prompt, and of its end
with the writes, say what that costs.

The greedy tokens of all lives of a prompt must be equal; the exit code is 1 if they are not. Speed does not
depend on what weights say, so random ones do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

TOKENS_OUT = 8


def live(model: str, store: str, length: int, end: str, memory: str, key: str | None) -> dict[str, Any]:
    """One life in this process. ``end``: how it ends, "close" or "kill"."""
    from weft.assemble import assemble
    from weft.config import EngineConfig
    from weft.request import Request, SamplingParams

    core = assemble(
        EngineConfig(
            model=model,
            store=store,
            memory=memory,
            device="cpu",
            max_model_len=8192,
            store_size="8GiB",
            store_reserve="1GiB",
            session_key=key,
        )
    ).core
    vocab = core.vocab_size

    def answer(name: str, prompt: list[int], count: int) -> tuple[float, list[int], int]:
        began, first_s, tokens, cached = time.perf_counter(), 0.0, [], 0
        core.submit(
            Request(
                request_id=name,
                prompt_tokens=prompt,
                sampling=SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True),
            )
        )
        while core.has_work:
            for event in core.step():
                first_s = first_s or time.perf_counter() - began
                tokens += event.tokens
                cached = event.cached_tokens
            if core.failure is not None:
                raise core.failure
        return first_s, tokens, cached

    warm_up = np.random.default_rng(os.getpid()).integers(3, vocab, 200).tolist()
    answer("warm-up", warm_up, 2)
    prompt = np.random.default_rng(length).integers(3, vocab, length).tolist()
    began_cpu_s = time.process_time()
    first_s, tokens, cached = answer("prompt", prompt, TOKENS_OUT)
    if end == "kill":
        core.write_all(30.0)
        print(json.dumps({"first_s": first_s, "tokens": tokens, "cached": cached}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    core.close()
    cpu_s = time.process_time() - began_cpu_s
    return {"first_s": first_s, "tokens": tokens, "cached": cached, "cpu_s": cpu_s}


def run_life(model: str, store: Path, length: int, end: str, memory: str, key: str | None) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.restart",
        "--life",
        end,
        "--model",
        model,
        "--store",
        str(store),
        "--lengths",
        str(length),
        "--memory",
        memory,
        *(() if key is None else ("--key", key)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(done.stderr)
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return report


def drop_from_page_cache(store: Path) -> None:
    """Writes the files out and asks the system to forget their pages."""
    for path in store.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(model: str, lengths: Sequence[int], memory: str, under: Path, report: list[Any], key: str | None) -> int:
    """Fills ``report`` with a row for each life."""
    equal = True
    for length in lengths:
        store = under / f"store-{length}"
        lives = {
            "cold": run_life(model, store, length, "close", memory, key),
            "restart": run_life(model, store, length, "close", memory, key),
        }
        drop_from_page_cache(store)
        lives["dropped"] = run_life(model, store, length, "close", memory, key)
        shutil.rmtree(store)
        run_life(model, store, length, "kill", memory, key)
        lives["killed"] = run_life(model, store, length, "close", memory, key)
        cold_s = lives["cold"]["first_s"]
        for name, life in lives.items():
            same = life["tokens"] == lives["cold"]["tokens"]
            equal &= same
            report.append(
                {
                    "tokens": length,
                    "life": name,
                    "first_s": life["first_s"],
                    "of_cold": life["first_s"] / cold_s,
                    "cached": life["cached"],
                    "cpu_s": life["cpu_s"],
                    "equal": same,
                }
            )
            print(
                f"{length:6d} tokens  {name:8s} first token {1000 * life['first_s']:8.1f} ms  "
                f"{life['first_s'] / cold_s:5.2f} x cold  cached {life['cached']:5d}  "
                f"CPU {life['cpu_s']:6.2f} s  "
                f"tokens {'equal' if same else 'DIFFER'}",
                flush=True,
            )
        shutil.rmtree(store)
    return 0 if equal else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="a checkpoint, not the random one")
    parser.add_argument("--size", default="350m", help="of the random checkpoint: tiny or 350m")
    parser.add_argument("--lengths", default="1000,4000")
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--key", help="file with a secret that encrypts the records")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--life", choices=["close", "kill"], help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    lengths = [int(one) for one in args.lengths.split(",")]
    if args.life:
        print(json.dumps(live(args.model, args.store, lengths[0], args.life, args.memory, args.key)))
        return 0
    under = Path(tempfile.mkdtemp(prefix="weft-restart-"))
    try:
        model = args.model
        if model is None:
            from benchmarks.serve.checkpoints import make_checkpoint

            model = str(make_checkpoint("lfm2", args.size, "bfloat16", under=under).directory)
        report: list[Any] = []
        code = measure(model, lengths, args.memory, under, report, args.key)
        if args.json is not None:
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return code
    finally:
        shutil.rmtree(under, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
