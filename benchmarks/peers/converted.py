"""Are GGUF files of llama.cpp's own converter the checkpoints that they were made of?

    python -m benchmarks.peers.make_env --llama
    python -m benchmarks.peers.converted [--env DIR] [NAME ...]

    tiny checkpoint --> llama.cpp's converter --> GGUF file --> weft --> logits --> greatest difference from those of
                                                                                    the checkpoint

The tests write their files themselves, so a mistake in the writer may hide the same one in the reader. A line says
"not converted" where the converter does not take the tiny checkpoint. Checkpoints that it writes as other models are
named with the reason, and are not counted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers import to_gguf
from benchmarks.peers.environment import DEFAULT_ENVIRONMENT, Environment
from tests.unit.models.test_gguf_models import CASES, distance, original
from weft.errors import CheckpointError

ALLOWED = 1e-4
_VOCABULARY = "the table of tokens is cut to the tokenizer's size"
_HEADS = "positions turn the width of the stream divided by the number of heads, and these heads are wider"
KNOWN_TO_DIFFER = {
    "cohere2": _HEADS,
    "gemma3": _VOCABULARY,
    "gemma4": _VOCABULARY,
    "gemma4_moe": _VOCABULARY,
    "glm": "its eps is 1e-5 where the config has another name for it",
    "granite_rope": "no hybrid of Granite has positions",
    "nemotron": _HEADS,
    "qwen4_exp": "layers with an index see all of the text",
}
"""Seen with llama.cpp 0c1e570."""


ABSENT = ("rope_scaling_factor", "initial_context_length")
"""Keys that releases leave out, where the tiny checkpoint has null."""


def _apart(file: Path) -> None:
    """Write stacks of experts as one matrix for each expert, as releases have them."""
    tensors: dict[str, torch.Tensor] = {}
    for name, x in load_file(file).items():
        begin, stacked, part = name.partition(".experts.")
        if stacked and x.ndim == 3:
            for number, matrix in enumerate(x.unbind()):
                tensors[f"{begin}.experts.{number}.{part}.weight"] = matrix.contiguous()
        else:
            tensors[name] = x
    save_file(tensors, file)


def spelled(checkpoint: Path, copy: Path) -> Path:
    """Return a copy of ``checkpoint`` whose config.json has the names that the converter reads."""
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "config.json").read_text())
    config.setdefault("rotary_pct", (config.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0))
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    if config["model_type"] == "granitemoehybrid":
        config["layer_types"] = [names.get(kind, kind) for kind in config["layer_types"]]
    if config["model_type"] == "nemotron_h_puzzle":
        for block in config["block_configs"]:
            block["block_type"] = names.get(block["block_type"], block["block_type"])
        _apart(copy / "model.safetensors")
    for key in ABSENT:
        if config.get(key, 0) is None:
            del config[key]
    config |= {
        "gpt2": {"n_ctx": config.get("n_positions")},
        "mpt": {"architectures": ["MPTForCausalLM"]},
        "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
        "falcon": {} if config.get("new_decoder_architecture") else {"num_kv_heads": 1},
    }.get(config["model_type"], {})
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def outcome(name: str, environment: Environment, folder: Path) -> tuple[str, bool]:
    """Return the outcome of one checkpoint, and whether it is right."""
    file = folder / f"{name}.gguf"
    copy = spelled(original(name), folder / name)
    command: list[str | Path] = [environment.python(), to_gguf.__file__, environment.llama_sources(), copy, file, "f32"]
    ran = subprocess.run([*command, "--any-vocabulary"], check=False, capture_output=True, text=True)
    if ran.returncode or not file.exists():
        return f"not converted: {(ran.stderr.strip().splitlines() or ['?'])[-1][:160]}", True
    try:
        difference = distance(name, file)
    except (CheckpointError, IndexError) as error:
        return f"refused: {error}", False
    return f"{difference:.1e}", difference < ALLOWED


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.converted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="NAME")
    parser.add_argument("--env", type=Path, default=DEFAULT_ENVIRONMENT)
    args = parser.parse_args(argv)
    wrong = 0
    for name in args.names:
        with tempfile.TemporaryDirectory(prefix="weft-converted-") as folder:
            said, right = outcome(name, Environment(args.env), Path(folder))
        known = KNOWN_TO_DIFFER.get(name, "")
        print(f"{name:<22} {said}{'' if right else f' ({known})' if known else '   WRONG'}", flush=True)
        wrong += not right and not known
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
