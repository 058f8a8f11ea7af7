"""The settings that a user gives. Flag = config field = Python keyword.

    EngineConfig (wishes)  --resolve against model and machine, once-->  Sizes (resolved, never changed)

Every field carries its help text. The CLI makes its flags from this one class, the Python API takes the same names as
keywords, and an error can name the flag. ``weft.memory.frames.plan.fit_sizes`` computes ``Sizes``: sizes that do not
fit are reduced, and ``Sizes.notes`` has a sentence about each.

``EngineConfig.check`` reads each field's type hint, so a choice or range is declared once (see
``config_check``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from weft.config_check import check_fields, debug, flag, known_fields, limit
from weft.errors import ConfigError
from weft.units import CHUNK_TOKENS, TOKENS_MAX

DTypeChoice = Literal["auto", "float32", "bfloat16", "float16"]
QuantizeChoice = Literal["none", "int8", "int4", "w8a8"]
KvDTypeChoice = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"]
CompressedKvChoice = Literal["int8", "int4"]
StateDTypeChoice = Literal["float32", "bfloat16", "float16"]

DTYPE_SPELLINGS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "float8_e4m3": "fp8"}
"""Other spellings of dtypes in flags, variables, files and keywords."""
_DTYPE_FIELDS = ("dtype", "kv_dtype", "state_dtype")

THREADS_MAX, RANKS_MAX = 1024, 64
STEP_TOKENS_MAX = 1 << 20
"""Most tokens of a step, and therefore of sequences that run at once: each has at least one token in the step."""
STREAM_INTERVAL_MAX = 1024
"""Most tokens of a streamed event after the first."""
HOUR_MS = 3_600_000
STORE_BYTES_MIN = 16 << 20
"""Smallest store, bytes: a smaller one would hold no prefix worth a read."""
STEP_TOKENS_CPU, STEP_TOKENS_GPU = 1024, 8192
"""Defaults of ``max_num_batched_tokens``. A GPU needs thousands of rows to be busy with products."""
STEP_TOKENS_WHOLE = 8192
"""Default of ``max_num_batched_tokens`` for a model that computes a prompt in one step: the longest text that it
serves."""


def session_key() -> Any:
    """Return the config field for the key of sessions and records, which engines and servers share."""
    return flag(
        None,
        "File with a secret of at least 32 bytes: sessions and the records of a store are encrypted with it (needs "
        "weft[encryption]).",
        table="server",
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str | None = flag(
        None, "Checkpoint directory or hub name; without one, the embedded model.", positional=True
    )
    revision: str | None = flag(None, "Branch, tag or commit of a hub model.")
    dtype: DTypeChoice = flag("auto", "Dtype of weights and KV; auto takes the checkpoint's own.")
    kv_dtype: KvDTypeChoice = flag(
        "auto",
        "Dtype of keys and values; auto takes the dtype of the "
        "weights. In fp8 or int8 twice the tokens of bfloat16 fit.",
    )
    state_dtype: StateDTypeChoice = flag(
        "float32", "Dtype of recurrent states; in half the bytes they are rounded after every token or chunk."
    )
    quantize: QuantizeChoice = flag(
        "none",
        "Round weights on loading: int8, int4, or w8a8 (int8, and so are inputs, on every "
        "machine); none keeps the checkpoint's weights.",
    )
    quantize_inputs: bool = debug(
        True,
        "Round the inputs of int8 and int4 layers to int8 where the CPU has "
        "byte products: faster, see docs/quantization.md.",
    )
    twelve_bit: bool = debug(
        True,
        "Keep bfloat16 matrices on a CPU in 12 bits a weight; every bit "
        "comes back: a quarter less to hold and to read, and the same answers.",
    )
    weights_cache: str | None = flag(
        None,
        "Directory of packed weights on a CPU: the second start maps "
        "them and is faster, and replicas share their memory.",
    )
    allow_nonfinite: bool = debug(False, "Serve a checkpoint with NaN or infinite weights, which is otherwise refused.")
    memory: str | None = flag(
        None,
        "Memory for KV pages and recurrent states, weights apart, such as 4GiB; "
        "default: 40 % of the RAM that is free once weights are loaded; on a "
        "GPU, see --gpu-memory-fraction.",
        size=True,
        least=1,
    )
    max_model_len: int | None = flag(
        None, "Longest prompt + answer in tokens; default: the model's own.", least=1, most=TOKENS_MAX
    )
    max_num_seqs: int = flag(256, "Most sequences that run at once.", least=1, most=STEP_TOKENS_MAX)
    max_num_batched_tokens: int | None = flag(
        None,
        "Token budget of one step: decodes first, then prefill chunks; default: 1024 on a CPU, 8192 on a "
        "GPU, and 8192 for an embedder whose tokens see later ones: it computes a prompt in one step.",
        least=1,
        most=STEP_TOKENS_MAX,
    )
    max_step_ms: int | None = flag(
        None,
        "Milliseconds of a step in which answers are decoded: prefill "
        "chunks shrink to fit, so that answers flow; 0: no limit; default: "
        "1000 on a CPU, 100 on a GPU.",
        least=0,
        most=HOUR_MS,
    )
    max_queued_requests: int = limit(
        1024, "Most requests waiting to run; more are turned away with 503.", least=1, most=1_000_000
    )
    priority_across_keys: bool = flag(
        False, "Let a `priority` below 0 go before the requests of all API keys; by default it orders those of one key."
    )
    prefix_cache: bool = flag(True, "Keep computed prefixes, and start later requests from them.")
    snapshots: str = flag(
        "auto",
        "Where states are kept for later requests: auto, prompt (prompt ends), "
        "every:N tokens or none; or a list that adds and takes away sources, "
        "such as auto,-insurance or boundaries,decode:4096.",
    )
    exact: bool = flag(
        True,
        "Keep cached KV and states as they are. With --no-exact they go into 8 bits "
        "when memory is short: two to four times more fit, and answers that begin on them differ a little.",
    )
    compress_kv: CompressedKvChoice = flag(
        "int8",
        "Dtype of cached KV with --no-exact: int8, or int4: a third of the bytes of 16 bits, and answers differ more.",
        table="cache",
    )
    cache_policy: str = debug(
        "value",
        "Order of evictions from the prefix cache: value (the fewest seconds saved per byte first), lru "
        "(least recently used) or marconi (compare).",
    )
    count_salt: bool = debug(
        False,
        "Count in /metrics the prompt tokens that only another cache_salt holds: "
        "for operators, as it reveals which prompts other tenants sent.",
    )
    session_memory: float = limit(
        0.25,
        "Share of --memory in which the states of sessions are evicted last, but still evicted when memory needs it.",
        least=0,
        most=0.9,
    )
    store: str | None = flag(
        None,
        "Directory or bucket (s3://bucket/prefix, gs://, az://) of a store: "
        "cached prefixes, which outlive memory and restarts.",
    )
    store_cache: str | None = flag(
        None, "Directory in front of a bucket of --store; default: one under ~/.cache/weft/store.", table="cache"
    )
    store_key: str | None = flag(
        None,
        "File with a secret of at least 32 bytes: objects of the bucket of --store are signed with it, and no "
        "others are read.",
        table="cache",
    )
    session_key: str | None = session_key()
    store_required: bool = flag(
        False, "End with code 2 where the bucket of --store does not answer at the start.", table="cache"
    )
    store_size: str | None = flag(
        None,
        "Most bytes of the store, such as 100GB; default: half of the disk's free space at the first start.",
        size=True,
        least=STORE_BYTES_MIN,
    )
    store_write: str = limit("200MB/s", "Most bytes a second that are written to the store.", rate=True)
    store_pack: Literal["auto", "on", "off"] = debug(
        "auto", "Pack exact records of the store without rounding (needs weft[store]); auto: where a GPU computes."
    )
    store_reserve: str = limit("8GiB", "Bytes of the disk that the store leaves free.", size=True)
    handoffs: bool = debug(False, "Prompts may be computed by one engine and answered by another; --roles turns it on.")
    picture_rows: str = limit("256MiB", "Most memory of --memory for pictures that were encoded.", size=True)
    grammar_seconds: int = limit(
        3, "CPU seconds that compiling the grammar of one request may take.", least=1, most=3600
    )
    grammar_memory: str = limit("256MiB", "Memory that compiling the grammar of one request may take.", size=True)
    grammar_step_ms: int = limit(
        10,
        "Milliseconds that the grammars of a step may take, over all answers; where they take more for long, "
        "the answers with the slowest ones end.",
        least=1,
        most=1000,
    )
    grammar_cache: str = limit(
        "512MiB",
        "Memory of compiled grammars that are kept for later requests; running answers may hold the same amount again.",
        size=True,
    )
    trust_control_tokens: bool = flag(
        False,
        "Let control tokens that messages and documents spell, such as <|im_end|>, be tokens; by default they "
        "are text, and only the chat template writes control tokens.",
    )
    lora: tuple[str, ...] = flag(
        (),
        "Adapter of the model in peft's form, as name=path or name=owner/name "
        "on the hub; requests pick it by its name. May be given several times.",
        also=("--lora-modules",),
    )
    lora_required: bool = flag(
        True,
        "End the start where an adapter of --lora cannot be served; false: serve the model without it, as several "
        "models always are.",
        table="server",
    )
    max_lora_rank: int = limit(64, "Largest rank of an adapter.", least=1, most=4096)
    lora_memory: str = limit(
        "1GiB",
        "Memory for adapters; the least recently used one gives way, never one that a request runs with.",
        size=True,
    )
    seed: int = flag(0, "Seed of the engine: of requests that bring none.", least=-(2**63), most=2**64 - 1)
    default_sampling: str | None = flag(
        None,
        "Sampling of requests where neither they nor the checkpoint say, in every API: ollama (temperature 0.8, "
        "top_k 40, top_p 0.9), openai (temperature 1), or NAME=VALUE,... Default: ollama in Ollama's API, the page, "
        "`weft chat` and `weft generate`, openai elsewhere.",
    )
    threads: int | None = flag(None, "CPU threads of the model; default: all cores.", least=1, most=THREADS_MAX)
    cpu_kernels: Literal["auto", "native", "torch"] = debug(
        "auto", "Kernels on the CPU: native (C++, where it was built), torch, or auto: native if they are there."
    )
    device: str = flag("auto", "Where the model runs: cpu, cuda, cuda:N, or auto: a GPU if torch has one.")
    tp: int = flag(
        1,
        "Ranks: processes that compute the model together, each with a share of its heads, "
        "widths and channels (tensor parallelism). --memory is that of each rank.",
        least=1,
        most=RANKS_MAX,
    )
    ep: bool = flag(False, "With --tp: ranks divide experts by their number (expert parallelism), not by their width.")
    rank_timeout: float = limit(
        60.0, "Seconds that a rank may be silent in a step before the engine ends.", above=0, most=3600.0
    )
    gpu_kernels: Literal["auto", "triton", "torch"] = debug(
        "auto", "Kernels on a GPU: triton, torch (slow, to compare with), or auto: triton where installed."
    )
    joined_kernels: Literal["on", "off"] = debug(
        "on", "Small kernels on a GPU that one launch computes with others, the bits being the same: on, or off."
    )
    attention_backend: Literal["weft", "flashinfer"] = debug(
        "weft", "Attention of prompts on a GPU: weft (needs nothing), or flashinfer (capability 9.0) where it fits."
    )
    gpu_memory_fraction: float = flag(
        0.9,
        "Default of --memory on a GPU, as a share of its memory that weights and a step leave free.",
        above=0,
        most=1,
    )
    speculate: str = flag(
        "auto",
        "Guess next tokens and verify several in one step; the answers stay the "
        "same. auto (every source while it pays), off, or a list of prediction, "
        "grammar, tree, suffix and mtp.",
    )
    speculate_max: int = limit(15, "Most guessed tokens of one sequence in one step.", least=1, most=63)
    step_costs: str = debug(
        "measured",
        "Seconds of a step by which store, router, drafts and step limits are decided: measured, or given, such as "
        "fixed_s=0.1,token_s=0.01, so that decisions are the same on every machine.",
    )
    overlap: Literal["auto", "on", "off"] = debug(
        "auto", "Plan the next step while one is computed: on, off, or auto: on a GPU, not on a CPU."
    )
    cuda_graphs: Literal["auto", "decodes", "off"] = debug(
        "auto",
        "Record steps on a GPU once and replay them: auto where the model allows it, decodes for only the "
        "steps without prompts, or off.",
    )

    def __post_init__(self) -> None:
        # In the engine's process, tuples of a config arrive as lists.
        object.__setattr__(self, "lora", tuple(self.lora))

    @classmethod
    def of(cls, **fields: Any) -> EngineConfig:
        """Return a config as the constructor does, with other spellings of dtypes (``DTYPE_SPELLINGS``). Raise
        ConfigError for an unknown field name, with the name that was probably meant."""
        known = dict(known_fields(cls, fields))
        for name in _DTYPE_FIELDS:
            if isinstance(known.get(name), str):
                known[name] = DTYPE_SPELLINGS.get(known[name], known[name])
        return cls(**known)

    @property
    def moves_records(self) -> bool:
        """Whether pages and states are copied to or from a store or another engine."""
        return self.store is not None or self.handoffs

    def check(self) -> None:
        """Raise ConfigError that names the flag, for a value of a wrong type, choice or range, and for flags that
        exclude each other."""
        check_fields(self)
        if self.exact and self.compress_kv != "int8":
            raise ConfigError(
                f"cache.compress_kv {self.compress_kv} needs --no-exact: without it nothing is compressed",
                param="cache.compress_kv",
            )
        if self.store is not None and not self.prefix_cache:
            raise ConfigError(
                f"--store {self.store} needs the prefix cache, and --no-prefix-cache turns it off", param="--store"
            )
        if self.handoffs and (not self.prefix_cache or self.snapshots == "none" or "-request-end" in self.snapshots):
            raise ConfigError(
                "--roles needs the prefix cache, and request-end among --snapshots: the state after a "
                "prompt goes to another engine",
                param="--roles",
            )
        if self.store_size is not None and self.store is None:
            raise ConfigError(f"--store-size {self.store_size} needs --store", param="--store-size")
        if self.store_cache is not None and "://" not in (self.store or ""):
            raise ConfigError(
                f"cache.store_cache {self.store_cache} is the directory in front of a bucket, "
                f"and --store is {self.store or 'not given'}",
                param="cache.store_cache",
            )
        if self.store_key is not None and "://" not in (self.store or ""):
            raise ConfigError(
                f"cache.store_key {self.store_key} signs the objects of a bucket, and --store is "
                f"{self.store or 'not given'}",
                param="cache.store_key",
            )
        if self.store_required and self.store is None:
            raise ConfigError("cache.store_required needs --store", param="cache.store_required")
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise ConfigError(
                f"--device is {self.device!r}; it may be auto, cpu, cuda or cuda:N, N from 0 to 999", param="--device"
            )
        if self.lora:
            from weft.adapters import named_paths  # imported only for adapters

            named_paths(self.lora)
        if self.default_sampling is not None:
            from weft.default_sampling import read_default_sampling  # `weft --help` needs none of it

            read_default_sampling(self.default_sampling)
        if self.ep and self.tp == 1:
            raise ConfigError("--ep divides experts over ranks, and --tp is 1; give --tp 2 or more", param="--ep")
        if self.quantize == "w8a8" and not self.quantize_inputs:
            raise ConfigError(
                "--quantize is w8a8, which rounds inputs, and debug.quantize_inputs = "
                "false leaves them "
                "as they are; use --quantize int8 with it",
                param="debug.quantize_inputs",
            )


@dataclass(frozen=True, slots=True)
class Sizes:
    """EngineConfig resolved against a model and a machine. ``notes``: sentences for the user about sizes that were
    reduced to fit. ``grid_tokens``: states are kept at multiples of this number, the tokens that the recurrent kernels
    compute at once. ``whole_prompts``: whether a step computes all of a prompt or nothing of it, because the model is
    not causal. ``priority_across_keys``: whether a priority orders the sequences of all API keys."""

    max_model_len: int
    rows_max: int
    step_tokens_max: int
    queue_max: int
    memory_bytes: int
    notes: tuple[str, ...] = ()
    grid_tokens: int = CHUNK_TOKENS
    whole_prompts: bool = False
    priority_across_keys: bool = False
