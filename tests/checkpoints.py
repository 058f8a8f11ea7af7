"""Tiny random checkpoints in Hugging Face format, made on the spot by transformers itself.

    directory = checkpoint("qwen3_5")     # complete: config, weights, tokenizer, chat template, generation

Each is a few hundred kB and is made once per test session (in a temporary directory that goes away
at exit). Weights are float32 and scaled so that everything matters: logits are far from flat, greedy tokens
vary, recurrent states forget slowly (a lost or swapped state changes the answer), norm weights and biases
are not trivial. The names in ``CHECKPOINTS`` are families and variants; ``FAMILIES`` has one of each family.

``make_checkpoint`` writes one anywhere with changed settings; ``tokenizer()`` is the tiny byte-level BPE that
all of them carry (every byte is a token, so any text can be encoded).
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.checkpoint_families_mamba import MAMBA_CHECKPOINTS
from tests.checkpoint_families_more import MORE_CHECKPOINTS

VOCAB_SIZE = 512
"""Of the models; the tokenizer has fewer, as is usual in real checkpoints."""
EOS, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": False}
_QWEN3: dict[str, Any] = _BASE | {"intermediate_size": 96, "head_dim": 32}
_QWEN_HYBRID: dict[str, Any] = _QWEN3 | {
    "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}
_SPARSE: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48}
_LFM2: dict[str, Any] = _BASE | {
    "intermediate_size": 144, "block_multiple_of": 32, "conv_L_cache": 3, "norm_eps": 1e-5,
    "tie_word_embeddings": True, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}
_GRANITE: dict[str, Any] = _BASE | {
    "intermediate_size": 32, "shared_intermediate_size": 96, "num_local_experts": 0, "num_experts_per_tok": 0,
    "layer_types": ["mamba", "attention", "mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2, "mamba_d_conv": 4,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
    "logits_scaling": 1.6}

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", _QWEN3),
    "qwen3_tied": ("qwen3", _QWEN3 | {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3_5": ("qwen3_5_text", _QWEN_HYBRID),
    "qwen3_5_moe": ("qwen3_5_moe_text", {key: value for key, value in (_QWEN_HYBRID | _SPARSE).items()
                                         if key != "intermediate_size"}),
    "qwen3_next": ("qwen3_next", _QWEN_HYBRID | _SPARSE | {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3_next_raw": ("qwen3_next", _QWEN_HYBRID | _SPARSE | {"norm_topk_prob": False,
                                                               "decoder_sparse_step": 2}),
    "lfm2": ("lfm2", _LFM2),
    "lfm2_bias": ("lfm2", _LFM2 | {"conv_bias": True, "tie_word_embeddings": False,
                                   "block_auto_adjust_ff_dim": False}),
    "granite": ("granitemoehybrid", _GRANITE),
    "granite_moe": ("granitemoehybrid", _GRANITE | {
        "num_local_experts": 6, "num_experts_per_tok": 2, "tie_word_embeddings": True,
        "mamba_proj_bias": True, "embedding_multiplier": 0.5}),
    "granite_rope": ("granitemoehybrid", _GRANITE | {
        "position_embedding_type": "rope", "mamba_conv_bias": False, "attention_bias": True}),
    **MAMBA_CHECKPOINTS,
    **MORE_CHECKPOINTS,
}
"""name -> (model_type, configuration)."""

FAMILIES: tuple[str, ...] = ("qwen3", "qwen3_5", "qwen3_next", "lfm2", "granite", "granite_moe")
"""One checkpoint per served structure: what an engine-level suite should run over."""


@functools.cache
def _session_directory() -> Path:
    path = Path(tempfile.mkdtemp(prefix="weft-checkpoints-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def checkpoint(name: str) -> Path:
    """The directory of one of CHECKPOINTS; made on first use. Read it, do not write to it."""
    return make_checkpoint(_session_directory() / name, name)


@functools.cache
def reference(name: str) -> transformers.PreTrainedModel:
    """The same checkpoint as transformers runs it: float32, plain torch."""
    return load_reference(checkpoint(name))


@functools.cache
def exact_reference(name: str) -> transformers.PreTrainedModel:
    """As ``reference``, in float64 wherever transformers does not itself go to float32. Its float32 run is
    up to 1e-4 away from this at single positions (a router's near tie), its float64 run is the truth that an
    engine's sums should be compared with."""
    model = load_reference(checkpoint(name)).double()
    model.set_experts_implementation("eager")  # the grouped product takes no float64
    return model


def load_reference(directory: Path) -> transformers.PreTrainedModel:
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32,
                                                              attn_implementation="eager")
    return model.eval()


def make_checkpoint(directory: Path, name: str, *, seed: int = 0, max_shard_size: str = "5GB",
                    **changes: Any) -> Path:
    """Write checkpoint ``name`` into ``directory``, with ``changes`` to its configuration. A small
    ``max_shard_size`` such as "100KB" makes it sharded, with an index."""
    transformers.utils.logging.disable_progress_bar()
    model_type, settings = CHECKPOINTS[name]
    text = tokenizer()
    end = text.convert_tokens_to_ids(IM_END)
    config = transformers.AutoConfig.for_model(
        model_type,
        **(settings | {"eos_token_id": end, "bos_token_id": None, "pad_token_id": None} | changes))
    config.dtype = "float32"
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _scale_of(parameter_name)(parameter, generator)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                _scale_of(buffer_name)(buffer, generator)
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[end, text.convert_tokens_to_ids(EOS)], temperature=0.7, top_p=0.9, top_k=20,
        do_sample=True)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    text.save_pretrained(directory)
    return Path(directory)


_LOG_DECAY = (math.log(0.005), math.log(0.5))

Fill = Callable[[torch.Tensor, torch.Generator], None]


def _scale_of(name: str) -> Fill:
    """How one kind of parameter is drawn."""
    if name.endswith("A_log"):   # decay rates from slow to fast: most states outlive hundreds of tokens
        return lambda p, g: p.copy_(torch.empty(p.shape).uniform_(*_LOG_DECAY, generator=g))
    if name.endswith("dt_bias"):
        return lambda p, g: p.copy_(torch.empty(p.shape).uniform_(-1.0, 1.0, generator=g))
    if name.endswith(("norm.weight", "layernorm.weight", "norm_f.weight", ".D")):
        return lambda p, g: p.add_(torch.empty(p.shape).uniform_(-0.4, 0.4, generator=g))
    if name.endswith("bias"):
        return lambda p, g: p.copy_(torch.empty(p.shape).normal_(0.0, 0.3, generator=g))
    if name.endswith(("embed_tokens.weight", "embeddings.weight")):
        return lambda p, g: p.copy_(torch.empty(p.shape).normal_(0.0, 0.25, generator=g))
    # Zamba2's block norms what it makes with no residual beside: more gain makes float32's noise count.
    gain = 1.0 if name.endswith("lm_head.weight") else 0.7 if ".shared_transformer." in name else 1.4
    return lambda p, g: p.copy_(torch.empty(p.shape).normal_(0.0, gain * p.shape[-1] ** -0.5, generator=g))


@functools.cache
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, ChatML special tokens and template."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[EOS, IM_START, IM_END], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    inner.train_from_iterator(_TRAINING_TEXT, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=IM_END, pad_token=EOS,
                                                additional_special_tokens=[IM_START],
                                                chat_template=CHAT_TEMPLATE)


_TRAINING_TEXT = [
    "system user assistant: the engine keeps one slot for each running sequence and pages for its tokens.",
    "A page holds sixteen tokens of every attention layer; a slot holds the states of every other layer.",
    "What is the number of the red key? The number of the red key is forty two.",
    "The river runs past the mill and the mill turns with the river, and neither waits for the other.",
]


def copy_checkpoint(source: Path, directory: Path, **config_changes: Any) -> Path:
    """A copy whose config.json has ``config_changes`` (None removes a key)."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    path = directory / "config.json"
    config = json.loads(path.read_text()) | config_changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return directory
