"""Time of a step with 1, 2 and 4 ranks on one machine, and the share of it that ranks wait for each other.

    python -m benchmarks.ranks                       random weights: 8 layers like Qwen3's, hidden size 1024
    python -m benchmarks.ranks --model DIRECTORY     a checkpoint that the ranks divide

On CPUs this is a proof and no gain: ranks share the cores and the memory bus that one rank has alone. The
cores are divided, so each row of the table uses the same ones.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import weft
from weft.assemble.assembly import Assembled, assemble
from weft.config import EngineConfig
from weft.ranks.executor import RankedExecutor
from weft.request import Request, SamplingParams

PROMPT_TOKENS = 256
DECODE_STEPS = 40
_CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 3072,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Measured:
    """Seconds of a step, and the share of it in collectives."""

    seconds: float
    share: float


def random_model(directory: Path) -> Path:
    """A checkpoint that means nothing, with the tokenizer of the embedded model."""
    embedded = Path(weft.__file__).parent / "embedded" / "weft-recall"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / name, directory / name)
    (directory / "config.json").write_text(json.dumps(_CONFIG))
    hidden, inner, q, kv = 1024, 3072, 1024, 512
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    rng = np.random.default_rng(0)
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((8192, hidden), np.float32),
        "lm_head.weight": rng.standard_normal((8192, hidden), np.float32) / 32,
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(8):
        name = f"model.layers.{layer}"
        for part, shape in shapes.items():
            tensors[f"{name}.{part}.weight"] = rng.standard_normal(shape, np.float32) / shape[1] ** 0.5
        for norm, width in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", 64),
            ("self_attn.k_norm", 64),
        ):
            tensors[f"{name}.{norm}.weight"] = np.ones(width, np.float32)
    save_file(tensors, directory / "model.safetensors")
    return directory


def collective_seconds(assembled: Assembled) -> float:
    executor = assembled.core.executor
    return executor.collectives.seconds if isinstance(executor, RankedExecutor) else 0.0


def timed(assembled: Assembled, steps: int) -> Measured:
    """The median step of ``steps``."""
    core, times, waits = assembled.core, [], []
    for _ in range(steps):
        waited, began = collective_seconds(assembled), time.perf_counter()
        core.step()
        times.append(time.perf_counter() - began)
        waits.append(collective_seconds(assembled) - waited)
    seconds = float(np.median(times))
    return Measured(seconds, float(np.median(waits)) / seconds)


def measure(model: Path, tp: int, rows: int) -> tuple[Measured, Measured]:
    """(a prompt of PROMPT_TOKENS, a step of ``rows`` decodes)."""
    assembled = assemble(
        EngineConfig(
            model=str(model),
            tp=tp,
            memory="256MiB",
            max_model_len=1024,
            prefix_cache=False,
            max_num_batched_tokens=PROMPT_TOKENS,
        )
    )
    core, vocab = assembled.core, assembled.info.vocab_size
    sampling = SamplingParams(temperature=0.0, max_tokens=DECODE_STEPS + 20, ignore_eos=True)
    prompts = []
    for row in range(rows):
        tokens = [(row * 131 + i * 7) % vocab for i in range(PROMPT_TOKENS)]
        core.submit(Request(request_id=str(row), prompt_tokens=tokens, sampling=sampling))
        prompts.append(timed(assembled, 1))
    core.step()
    decode = timed(assembled, DECODE_STEPS)
    core.close()
    return min(prompts, key=lambda one: one.seconds), decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = asked.model or random_model(Path(folder))
        print("ranks rows  decode step waiting  256-token prompt waiting")
        for tp in asked.ranks:
            for rows in asked.rows:
                prompt, decode = measure(model, tp, rows)
                print(
                    f"{tp:5} {rows:4}  {1e3 * decode.seconds:8.1f} ms {decode.share:7.0%}  "
                    f"{1e3 * prompt.seconds:13.1f} ms {prompt.share:7.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
