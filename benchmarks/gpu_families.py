"""Small models of random weights, one for each structure that the large ones of ``gpu_decode`` lack.

    sinks          gpt-oss: attention sinks, windows, experts      answers with graphs
    Gemma 4        rings, heads of 256 and 512, inputs by layer      == answers launched from Python
    pictures       Qwen3.5 with its tower                            ~  logits of torch's operators
    adapters       Qwen3.5, rows of two adapters and of none
    chosen blocks  Qwen4-Exp, GLM-5-next: no graphs, since torch computes their attention

Widths are small, and head dims are those of releases: kernels are made for head dims. A case is an engine
that answers four prompts side by side, of one token and over a chunk of 64. Of each the result says how
far logits lie from those of torch's operators on the same device, up to the first token that differs.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

TOKENS = 6
"""Of an answer."""
LENGTHS = (1, 5, 40, 70)
"""Of the prompts."""
VOCAB = 1024
RANKS = (4, 16)
"""Of the adapters."""
_TEXT: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
_QWEN: dict[str, Any] = (
    _TEXT
    | _LINEAR
    | {
        "model_type": "qwen3_5_text",
        "head_dim": 128,
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": _ROPE,
    }
)
_CHOSEN: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "layer_types": ["linear_attention", "indexed_attention"],
}

CONFIGS: dict[str, dict[str, Any]] = {
    "sinks": _TEXT | {
        "model_type": "gpt_oss", "head_dim": 64, "sliding_window": 128, "num_local_experts": 8,
        "num_experts_per_tok": 2, "intermediate_size": 128, "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "truncate": False,
                            "original_max_position_embeddings": 4096}},
    "Gemma 4": _TEXT | {
        "model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512, "sliding_window": 64,
        "num_hidden_layers": 4, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 64,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "pictures": {
        "model_type": "qwen3_5", "torch_dtype": "bfloat16", "image_token_id": 7, "video_token_id": 8,
        "vision_start_token_id": 9, "vision_end_token_id": 10, "tie_word_embeddings": False,
        "text_config": _QWEN | {"rope_parameters": _ROPE | {
            "partial_rotary_factor": 0.5, "mrope_interleaved": True, "mrope_section": [12, 10, 10]}},
        "vision_config": {
            "model_type": "qwen3_5", "hidden_size": 128, "intermediate_size": 256, "depth": 2, "num_heads": 2,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
            "num_position_embeddings": 64, "out_hidden_size": 256, "hidden_act": "gelu_pytorch_tanh"}},
    "adapters": _QWEN,
    "Qwen4-Exp": _TEXT | _LINEAR | _CHOSEN | {
        "model_type": "qwen4_exp_text", "eos_token_id": 2, "head_dim": 128, "num_experts": 8,
        "shared_expert_intermediate_size": 128, "hc_count": 4, "hc_lowrank": 32, "ple_layer_ids": [1],
        "ple_embed_dim": 256, "ngram_size": 3, "heads_per_ngram": 4, "ngram_vocab_size_base": 300,
        "make_ngram_vocab_size_divisible_by": 32, "split_ngram_parts": 4, "indexer_n_heads": 8,
        "indexer_kv_heads": 1, "indexer_head_dim": 64, "indexer_budget": 64, "indexer_compress_ratio": 4,
        "output_gate_type": "sigmoid", "rope_parameters": _ROPE},
    "GLM-5-next": {
        "model_type": "glm5_next", "torch_dtype": "bfloat16", "tie_word_embeddings": False,
        "text_config": _TEXT | _CHOSEN | {
            "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 8, "n_group": 4,
            "topk_group": 2, "kv_lora_rank": 128, "q_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64,
            "mlp_layer_types": ["dense", "sparse"], "index_topk": 64, "index_head_dim": 64,
            "index_n_heads": 8, "index_kpool": 8, "swiglu_limit": 7.0, "linear_head_dim": 128,
            "linear_num_heads": 4, "linear_lower_bound": -1.0, "hc_mult": 4, "hc_sinkhorn_iters": 5}},
}  # fmt: skip


@dataclass
class Said:
    """``tokens`` by prompt, and the logits that each was chosen from, float32 on the host."""

    tokens: list[list[int]] = field(default_factory=list)
    logits: list[list[torch.Tensor]] = field(default_factory=list)
    why_not: str | None = None


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """(name, a call that runs the case and returns what it found)."""
    for name in CONFIGS:
        yield name, partial(run, name, device)


def config_of(name: str, dtype: str) -> dict[str, Any]:
    config = CONFIGS[name] | {"torch_dtype": dtype}
    text = config.get("text_config")
    return config if text is None else config | {"text_config": text | {"torch_dtype": dtype}}


def run(name: str, device: torch.device, dtype: str = "bfloat16") -> dict[str, Any]:
    """Raise what the engine raises."""
    from benchmarks.gpu_decode import noise_model
    from benchmarks.gpu_parts import choose_side

    model = noise_model(config_of(name, dtype), device)
    on_gpu = device.type == "cuda"
    with tempfile.TemporaryDirectory() as home:
        ways = {"graphs": True, "python": False} if on_gpu else {"python": False}
        said = {way: answers(name, model, device, graphs, Path(home)) for way, graphs in ways.items()}
        choose_side(device, "torch")
        try:
            torch_said = answers(name, model, device, False, Path(home))
        finally:
            choose_side(device, "own")
    own = said["python"]
    found: dict[str, Any] = compared(own, torch_said)
    if on_gpu:
        found |= {
            "graphs_refused": said["graphs"].why_not,
            "tokens_with_graphs_are_equal": said["graphs"].tokens == own.tokens,
        }
    return found


def compared(own: Said, other: Said) -> dict[str, Any]:
    """Logits up to the first token that differs: those behind it follow from other tokens."""
    gaps, sizes, same = [], [], 0
    sides = (own.logits, other.logits, own.tokens, other.tokens)
    for mine, theirs, tokens, others in zip(*sides, strict=True):
        equal = next((at for at, token in enumerate(tokens) if token != others[at]), len(tokens))
        same += equal
        for a, b in zip(mine[: equal + 1], theirs[: equal + 1], strict=True):
            gaps.append(float((a - b).abs().max()))
            sizes.append(float(b.abs().max()))
    return {
        "largest_gap": max(gaps),
        "largest_number": max(sizes),
        "equal_tokens": same,
        "tokens": sum(map(len, own.tokens)),
    }


def answers(name: str, model: Any, device: torch.device, graphs: bool, home: Path) -> Said:
    """Of four prompts side by side."""
    from benchmarks.gpu_decode import small_engine
    from weft.request import Request, SamplingParams

    said = Said([[] for _ in LENGTHS], [[] for _ in LENGTHS])
    core, _, _, said.why_not = small_engine(
        model,
        device,
        len(LENGTHS),
        max(LENGTHS) + TOKENS + 128,
        graphs,
        False,
        mixed_tokens_max=64,
        adapts=name == "adapters",
        observer=lambda plan, logits_XV: seen.append((plan, logits_XV.float().cpu().clone())),
    )
    seen: list[tuple[Any, torch.Tensor]] = []
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(16, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    extras = EXTRAS.get(name, lambda *_: [{}] * len(LENGTHS))(core, model, prompts, home)
    for at, (prompt, extra) in enumerate(zip(prompts, extras, strict=True)):
        core.submit(
            Request(
                request_id=str(at),
                prompt_tokens=prompt,
                sampling=SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True),
                **extra,
            )
        )
    rows: dict[int, int] = {}
    while core.has_work:
        for event in core.step():
            said.tokens[int(event.request_id)] += event.tokens
        if core.failure is not None:
            raise core.failure
    for plan, logits_XV in seen:
        rows |= {admission.row: LENGTHS.index(len(admission.tokens)) for admission in plan.admissions}
        sampling = [int(row) for row, samples in zip(plan.rows, plan.samples, strict=True) if samples]
        for row, logits_V in zip(sampling, logits_XV, strict=True):
            said.logits[rows[row]].append(logits_V)
    core.close()
    return said


Extras = list[dict[str, Any]]
"""Of each prompt: what its request has besides."""


def of_adapters(core: Any, model: Any, prompts: Sequence[list[int]], home: Path) -> Extras:
    """Rows of two adapters, and of none."""
    from weft.adapters import read_adapter

    made = []
    for rank in RANKS:
        directory = home / str(rank)
        if not directory.exists():
            write_adapter(directory, model, rank)
        made.append(read_adapter(f"r{rank}", directory))
        core.adapters.load(made[-1])
    return [{"adapter": one} for one in (made[0], None, made[1], made[0])]


def write_adapter(directory: Path, model: Any, rank: int) -> None:
    """In peft's form: factors of noise for every product of the layers."""
    generator = torch.Generator().manual_seed(rank)
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(model.targets.stored):
        target = model.targets.find(name)
        if target.kind == "product" and name.startswith("layers."):
            rows, columns = target.whole_shape
            for factor, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                tensors[f"base_model.model.model.{name}.lora_{factor}.weight"] = (
                    torch.randn(shape, generator=generator) * shape[1] ** -0.5
                )
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    header, begin = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, begin + tensor.nbytes]}
        begin += tensor.nbytes
    head = json.dumps(header).encode()
    with (directory / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for tensor in tensors.values():
            file.write(tensor.numpy().tobytes())


def of_pictures(core: Any, model: Any, prompts: Sequence[list[int]], home: Path) -> Extras:
    """A picture of 64 x 96 pixels in the longest prompt and in the one before."""
    from weft.images.picture import Picture, Tile
    from weft.request import PlacedPicture

    tower = model.architecture.vision
    rows, columns, merge = 4, 6, tower.projector.downsample_factor
    generator = torch.Generator().manual_seed(2)
    patches = torch.randint(
        256, (rows * columns, tower.patch_values * tower.frames), generator=generator, dtype=torch.uint8
    ).numpy()
    count = rows * columns // merge**2
    height, width = (side * tower.patch_size for side in (rows, columns))
    picture = Picture(b"\1" * 32, (Tile(patches, rows, columns),), (count,), width, height)
    extras: Extras = [{} for _ in prompts]
    for at in (-1, -2):
        prompts[at][3 : 3 + count] = [tower.picture_tokens[0]] * count
        extras[at] = {"pictures": [PlacedPicture(digest=picture.digest, places=[(3, count)], data=picture.to_bytes())]}
    return extras


EXTRAS: dict[str, Callable[[Any, Any, Sequence[list[int]], Path], Extras]] = {
    "adapters": of_adapters,
    "pictures": of_pictures,
}
