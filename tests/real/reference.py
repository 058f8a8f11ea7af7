"""What others make of the file: its tokenizer by a BPE written here, its weights widened for transformers.

transformers reads the tokenizer of such a file wrongly (a run of digits as one word), so neither comes from its reader.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import regex
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = regex.compile(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
"""Pieces of a text in GPT-2's byte-level BPE, as its authors published them."""
_PLACES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names in the file -> names in transformers' Llama."""


class Original:
    """The file as its header describes it."""

    def __init__(self, file: Path) -> None:
        self.reader = GGUFReader(file)

    def stated(self, key: str) -> Any:
        return self.reader.fields[key].contents()

    # ------------------------------------------------------------------ text

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token -> id."""
        return {token: number for number, token in enumerate(self.stated("tokenizer.ggml.tokens"))}

    @cached_property
    def ranks(self) -> dict[tuple[str, str], int]:
        """Pair -> its place among the merges."""
        pairs = (merge.split(" ") for merge in self.stated("tokenizer.ggml.merges"))
        return {(first, second): rank for rank, (first, second) in enumerate(pairs)}

    @cached_property
    def control(self) -> list[str]:
        """Control tokens, which a text may spell."""
        kinds = self.stated("tokenizer.ggml.token_type")
        return [token for token, number in self.ids.items() if kinds[number] == 3]

    def encode(self, text: str, *, digits_apart: bool = True) -> list[int]:
        """Return the ids of ``text``. ``digits_apart``: each digit is a word, as the tokenizer of this model has it."""
        found: list[int] = []
        for part in regex.split("(" + "|".join(map(regex.escape, self.control)) + ")", text):
            if part in self.control:
                found.append(self.ids[part])
                continue
            runs = regex.split(r"(\p{N})", part) if digits_apart else [part]
            for word in (word for run in runs for word in WORDS.findall(run)):
                found += [self.ids[piece] for piece in self._merged([BYTES[byte] for byte in word.encode()])]
        return found

    def _merged(self, pieces: list[str]) -> list[str]:
        while len(pieces) > 1:
            ranked = [self.ranks.get(pair, len(self.ranks)) for pair in pairwise(pieces)]
            best = min(ranked)
            if best == len(self.ranks):
                break
            at = ranked.index(best)
            pieces = [*pieces[:at], pieces[at] + pieces[at + 1], *pieces[at + 2 :]]
        return pieces

    # ------------------------------------------------------------------ weights

    def widened(self) -> LlamaForCausalLM:
        """Return transformers' model on the values of the file, in float32."""
        heads, kv_heads = self.stated("llama.attention.head_count"), self.stated("llama.attention.head_count_kv")
        config = LlamaConfig(
            vocab_size=self.stated("llama.vocab_size"),
            hidden_size=self.stated("llama.embedding_length"),
            intermediate_size=self.stated("llama.feed_forward_length"),
            num_hidden_layers=self.stated("llama.block_count"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=self.stated("llama.context_length"),
            rms_norm_eps=self.stated("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=self.stated("llama.rope.freq_base"),
            tie_word_embeddings=True,
        )
        weights = {}
        for tensor in self.reader.tensors:
            values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), np.float32))
            name = tensor.name.removesuffix(".weight")
            if name.endswith(("attn_q", "attn_k")):
                values = _apart(values, heads if name.endswith("attn_q") else kv_heads)
            weights[_place(name)] = values
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model = model.to_empty(device="cpu")
        missing = model.load_state_dict(weights, strict=False)
        assert (missing.unexpected_keys, missing.missing_keys) == ([], ["lm_head.weight"])
        model.tie_weights()
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        return model.eval()


def _place(name: str) -> str:
    if name.startswith("blk."):
        _, layer, inner = name.split(".")
        return f"model.layers.{layer}.{_PLACES[inner]}.weight"
    return {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[name]


def _apart(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rotated pairs half a head apart, as transformers rotates; the file has them next to each other."""
    width = rows.shape[-1]
    return rows.view(heads, -1, 2, width).transpose(1, 2).reshape(-1, width)


def _bytes() -> list[str]:
    """Return GPT-2's letter of each byte: itself where it is printable, else the next letter from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


BYTES = _bytes()


@torch.inference_mode()
def perplexity_of(model: LlamaForCausalLM, tokens: list[int]) -> float:
    logits = model(torch.tensor([tokens])).logits[0, :-1].double()
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:])).exp())
