"""transformers' ``generate`` in a process of its own, asked over pipes: the thing to compare with.

    parent                          child (python -m benchmarks.serve.peer DIRECTORY DTYPE THREADS HOW)
    {"prompts": [[...]], "output_tokens": 64}  ->  one static batch, greedy, exactly that many tokens
    {"seconds", "first_token_s", "gaps_s", "tokens"}   <-

Its best case on purpose: all prompts have one length (no padding), all answers too (no row waits for
another), no HTTP in between. The child sleeps on its pipe while the other side is measured, and its
OpenMP threads are passive as weft's are. HOW is ``static``, or ``continuous`` for transformers' own
continuous batching, of which only the end is timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from benchmarks.serve.load import LoadPlan, Summary, summarise
from weft_tools.bench.serve import Timing

READY = "ready"
How = Literal["static", "continuous"]


class Peer:
    """A child process with the model loaded. Use as a context manager. What transformers refuses is a
    RuntimeError with its reason."""

    def __init__(self, directory: Path, dtype: str, threads: int, how: How = "static") -> None:
        environment = {
            **os.environ,
            "OMP_WAIT_POLICY": "passive",
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-m", "benchmarks.serve.peer", str(directory), dtype, str(threads), how]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        answer = self._read()
        assert answer == READY, answer

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()

    def run(self, plan: LoadPlan) -> tuple[Summary, list[Timing]]:
        """The plan's prompts as static batches of ``concurrency``, one after another."""
        timings: list[Timing] = []
        begin = time.perf_counter()
        prompts = plan.prompts()
        for first in range(0, len(prompts), plan.concurrency):
            timings += self.batch(prompts[first : first + plan.concurrency], plan.output_tokens, begin)
        return summarise(timings, time.perf_counter() - begin), timings

    def batch(self, prompts: list[list[int]], output_tokens: int, sent: float) -> list[Timing]:
        """One static batch, whose requests were sent at ``sent`` (``perf_counter`` of this process)."""
        assert self._child.stdin is not None
        batch_begin = time.perf_counter()
        self._child.stdin.write(json.dumps({"prompts": prompts, "output_tokens": output_tokens}) + "\n")
        self._child.stdin.flush()
        answer = json.loads(self._read())
        if "refused" in answer:
            raise RuntimeError(answer["refused"])
        times = [batch_begin + seconds for seconds in answer["token_times_s"]]
        return [Timing(sent, [(when, 1) for when in times], row) for row in answer["tokens"]]

    def kill(self) -> None:
        """End it now; a caller that waits for its answer gets a RuntimeError."""
        self._child.kill()

    def _read(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the transformers process ended with code {self._child.wait()}")
        return line.strip()


class _StepClock:
    """What ``generate`` calls a streamer: told of the prompt once and then of each step's tokens."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.times_s: list[float] = []
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if self._prompt_seen:
            self.times_s.append(time.perf_counter() - self.begin)
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is buffered."""


def _continuous(model: Any, prompts: list[list[int]], count: int) -> dict[str, Any]:
    import transformers

    make_config: Any = transformers.GenerationConfig
    config = make_config(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    begin = time.perf_counter()
    try:
        answers = list(model.generate_batch(prompts, generation_config=config).values())
    except ValueError as error:
        return {"refused": f"transformers' continuous batching: {error}"}
    seconds = time.perf_counter() - begin
    by_prompt = {tuple(answer.prompt_ids): list(answer.generated_tokens) for answer in answers}
    return {"token_times_s": [seconds] * count, "tokens": [by_prompt[tuple(prompt)] for prompt in prompts]}


def _serve_pipe(directory: str, dtype: str, threads: int, how: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    model.eval()
    model.generation_config.eos_token_id = None
    print(READY, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if how == "continuous":
            print(json.dumps(_continuous(model, asked["prompts"], asked["output_tokens"])), flush=True)
            continue
        prompts, count = torch.tensor(asked["prompts"]), asked["output_tokens"]
        clock = _StepClock()
        with torch.inference_mode():
            output = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                streamer=clock,
                pad_token_id=0,
            )
        tokens = output[:, prompts.shape[1] :].tolist()
        print(json.dumps({"token_times_s": clock.times_s, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    _serve_pipe(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
