"""No kernel compiles inside a request: what a day of steps launches was compiled at the start.

The start is that of a server on a GPU: the steps of ``step_shapes``, the kernels of sampling and of the
arena, the recording of graphs. The day has prompts cut into chunks, decodes beside them, prefix hits, arena
work of one and of several items, and every kind of sampling. Launches are noted and not computed
(``launches``); a compilation is a key that the start did not have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from tests.fixtures.drafters import AnswerDrafter
from tests.oracle.serving import DEVICE, Serving, directory
from tests.support.graph_steps import EagerCapture
from tests.unit.runner.launches import Launch, recorded
from weft.assemble.room import cache_dtypes
from weft.config import EngineConfig
from weft.engine.grammars import GrammarCompiler
from weft.models.loading import LoadedModel, load_model
from weft.request import SamplingParams
from weft.runner import reserve, sampling_kernels
from weft.runner.arena import DeviceArena, warm
from weft.runner.reserve import measure_reserve, step_shapes
from weft.text.grammars import regex_grammar

SEQS, STEP_TOKENS, LENGTH = 6, 128, 512
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
DRAWN = structs.replace(GREEDY, temperature=1.0, seed=3)
SAMPLINGS = [
    GREEDY,
    DRAWN,
    structs.replace(DRAWN, top_k=5),
    structs.replace(DRAWN, top_p=0.8),
    structs.replace(DRAWN, top_k=9, top_p=0.9, logprobs=2, prompt_logprobs=1),
    structs.replace(DRAWN, frequency_penalty=0.5, top_p=0.9, logit_bias={7: 1.0}, min_tokens=1),
    structs.replace(GREEDY, ignore_eos=False, grammar=regex_grammar("[a-f]{9}", field="f")),
]
PROMPTS = [[7], [9, 8, 7], list(range(3, 300)), list(range(3, 80)), [5] * 65, [11] * 200, list(range(100, 117))]

pytestmark = pytest.mark.usefixtures("triton_kernels")


class NoMeter:
    def begin(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return 0

    used_bytes = peak_bytes


@dataclass
class Keys:
    """Of launches, with the kernels that had them."""

    seen: dict[tuple[str, str, str], str] = field(default_factory=dict)

    def note(self, one: Launch) -> None:
        self.seen[one.key] = one.kernel


def started(model: LoadedModel, keys: Keys, **more: Any) -> Serving:
    """An engine after the start of a server, the launches of which are noted in ``keys``."""
    config = EngineConfig(kv_dtype=more.get("kv_dtype", "auto"), state_dtype=more.get("state_dtype", "float32"))
    spec, kv_dtype = cache_dtypes(config, model.spec)
    with recorded(keys.note):
        measure_reserve(
            model.model,
            spec,
            kv_dtype,
            step_tokens=STEP_TOKENS,
            rows=SEQS,
            model_len=LENGTH,
            device=DEVICE,
            meter=NoMeter(),
        )
        serving = Serving(
            "",
            model=model,
            max_num_seqs=SEQS,
            step_tokens=STEP_TOKENS,
            max_model_len=LENGTH,
            remote=True,
            cache=True,
            capture=EagerCapture(),
            **more,
        )
        sampling_kernels.warm(model.spec.vocab_size, DEVICE)
        warm(serving.executor.arena)
    return serving


def day(serving: Serving, keys: Keys) -> None:
    with recorded(keys.note):
        for _ in range(2):  # the second round begins with hits
            serving.run(PROMPTS, SAMPLINGS, stagger_steps=1)
        arena_work(serving.executor.arena)


def arena_work(arena: DeviceArena) -> None:
    """Of one item and of three, from place to place and in a circle."""
    plan = arena.plan
    arena.zero_frames([1])
    arena.zero_frames([1, 2, 3])
    kinds = ((arena.copy_pages, plan.pages_per_frame), (arena.copy_slots, plan.slots_per_frame))
    for copy in (copy for copy, per_frame in kinds if per_frame):
        copy([0], [1])
        copy([0, 1, 2], [3, 4, 5])
        copy([0, 1, 2], [1, 2, 0])
    for count in (1, 3):
        if plan.compressed_pages:
            states = np.arange(count * (1 + plan.compressed_pages), dtype=np.int32).reshape(count, -1)
            states[:, 0] = np.arange(count)
            arena.compress(states)
            arena.restore(states)
        if plan.compressed_kv_bytes:
            records = np.arange(4 * count, dtype=np.int32).reshape(count, 4) * [[1, 1, 1, 0]]
            arena.compress_kv(records)
            arena.restore_kv(records)


def compiled_in_requests(family: str, quantize: Any = "none", **more: Any) -> tuple[set[str], set[str]]:
    """(kernels that compiled during the day, all kernels of the day)"""
    model = load_model(directory(family), quantize=quantize, device=DEVICE)
    at_start, at_day = Keys(), Keys()
    serving = started(model, at_start, **more)
    tokenizer = directory(family) / "tokenizer.json"
    serving.core.grammars = GrammarCompiler(tokenizer.read_text, serving.core.eos_ids, serving.core.vocab_size)
    day(serving, at_day)
    late = at_day.seen.keys() - at_start.seen.keys()
    return {f"{kernel} {key}" for key, kernel in at_day.seen.items() if key in late}, {*at_day.seen.values()}


class Zeros(dict[int, list[int]]):
    """The answers of any sequence, as launches are not computed."""

    def get(self, key: int, default: Any = None) -> list[int]:
        return [0] * 64


DAYS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "gated delta, compressed": ("qwen3_5", {"compress": True, "compress_kv": "int8"}, {
        "delta_rule.recurrent", "delta_rule.chunks", "delta_rule._prepare_heads", "causal_conv._tokens",
        "paged_attention._decode", "softmax.combine", "arena_kernels._compress_kernel",
        "compressed_kv_kernels._code_kernel", "sampling_kernels._histogram"}),
    "experts in int4": ("qwen3_5_moe", {"quantize": "int4", "compress_kv": "int4"}, {
        "moe._product", "quantized_linear._product", "compressed_kv_kernels._nibble_kernel"}),
    "Mamba-2": ("bamba", {"state_dtype": "bfloat16"}, {"mamba2._recurrent"}),
    "Mamba-1 and experts": ("jamba", {}, {"mamba1._scan", "moe._product"}),
    "short convolution, fp8 pages": ("lfm2", {"kv_dtype": "fp8"}, {"causal_conv._rows"}),
    "Kimi, latent attention": ("kimi_linear", {}, {"delta_rule._prepare_lines", "latent_attention._decode"}),
    "drafts": ("qwen3_5", {"drafter": AnswerDrafter("random", Zeros(), 512)}, {"causal_conv._tokens"}),
    "windows, w8a8": ("mistral", {"kv_dtype": "int8", "quantize": "w8a8"}, {
        "window_attention._attend", "byte_inputs._product"}),
}  # fmt: skip


@pytest.mark.parametrize("name", DAYS)
def test_a_day_launches_only_what_the_start_compiled(name: str) -> None:
    family, more, expected = DAYS[name]
    late, kernels = compiled_in_requests(family, **more)
    assert expected <= kernels
    assert not late, "\n".join(sorted(late))


def test_the_control_a_start_with_one_long_prompt_leaves_compilations_to_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reserve, "step_shapes", lambda **sizes: step_shapes(**sizes)[:1])
    late, _ = compiled_in_requests("qwen3_5")
    assert any("paged_attention._decode" in one for one in late), "decodes of short contexts beside a prompt"
