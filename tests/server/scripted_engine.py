"""Engines for the server's tests: the real EngineCore over an executor that answers as the prompt says.

    prompt has "say:TEXT"     the answer is TEXT, then the end token; "⟦x⟧" in it is "<|x|>"
    prompt has "crash"        the executor raises, as broken hardware would
    prompt has "sampling?"    temperature, top_k and top_p of the request, then the end token
    anything else             SONG again and again; with temperature and a seed, letters drawn by the seed

A token is a byte (plus three special ones), so every non-ASCII character arrives in pieces. ``build`` is
fast, ``build_paced`` takes 1 ms a step and ``build_slow`` 5, ``build_never`` never becomes ready,
``build_broken`` fails to start, ``build_once`` starts once. ``build_for_resumes`` waits while the model
directory has a file ``hold``; it resumes a request of the cache salt "forget" as a longer prompt, so the
answer begins at position 0 again. The first engine of ``build_uneven`` takes 50 ms a step, and its process
id is in the file ``slow``; the others take 1 ms.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.support.digests import EMPTY, digest
from tests.support.scripted import scripted_logprobs
from tests.support.scripted_pooling import WIDTH, pooled_parts
from weft.adapters import named_paths
from weft.config import EngineConfig
from weft.costs.rows import RowCosts
from weft.default_sampling import read_default_sampling
from weft.engine.engine import EngineCore
from weft.engine.grammars import GrammarCompiler
from weft.engine.stats import PARTS, Part
from weft.errors import CheckpointError
from weft.info import MemoryRow, ModelInfo
from weft.memory.frames.plan import fit_sizes, plan_arena
from weft.memory.memory import Memory
from weft.request import Request
from weft.schedule.plan import Admission, StepPlan, StepResult
from weft.spec import ModelSpec, attention, gated_delta
from weft.speculation.drafter import parse_sources
from weft.speculation.speculator import Speculator
from weft.text.grammar_sandbox import GrammarSandbox
from weft.units import PAD

SONG = "Là-haut sur la montagne, l'était un vieux chalet 🏔. "
EOS, USER, ASSISTANT = 256, 257, 258
VOCAB_SIZE = 259
MAX_MODEL_LEN = 2048
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{- raise_exception('no such role: ' + message.role) -}}{%- endif -%}"
    "<|{{ 'assistant' if message.role == 'assistant' else 'user' }}|>{{ message.content }}"
    "{%- if not loop.last or message.role != 'assistant' or not add_generation_prompt %}{{ '' }}{% endif -%}"
    "{%- endfor -%}"
    "{%- if shout is defined and shout %}LOUD{% endif -%}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif -%}"
)
_SPEC = ModelSpec(
    "scripted", VOCAB_SIZE, 64, MAX_MODEL_LEN, "float32", (attention(1, 16), gated_delta(1, 1, 16, 16, 4))
)


def write_model_directory(directory: Path, *, template: str = CHAT_TEMPLATE, markers: tuple[str, ...] = ()) -> Path:
    """Tokenizer and chat template; no weights, as no scripted engine reads any. ``markers`` are special
    tokens besides the three."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|end|>", "<|user|>", "<|assistant|>"]
    backend.add_special_tokens([*specials, *markers])
    assert [backend.token_to_id(name) for name in specials] == [EOS, USER, ASSISTANT]
    backend.enable_truncation(5)  # as some snapshots carry; weft must not apply it
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))
    return directory


class Built(NamedTuple):
    """What ``weft.assemble.assemble`` gives, without an import of it: that is a third of a scripted engine's start."""

    core: EngineCore
    info: ModelInfo


class AnsweringExecutor:
    """Follows the rows of the plans it gets and answers as the module says. ``step_s``: what a step takes."""

    def __init__(self, backend: tokenizers.Tokenizer, step_s: float) -> None:
        self._backend = backend
        self._step_s = step_s
        self._rows: dict[int, tuple[Admission, list[int], list[int]]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        if self._step_s and plan.run_count:
            time.sleep(self._step_s)
        for row in plan.rows_cleared:
            del self._rows[row]
        for admission in plan.admissions:
            tokens = admission.tokens.tolist()
            self._rows[admission.row] = (admission, tokens, self._script(admission, tokens[: admission.prompt_tokens]))
        chosen = np.full(plan.run_count, PAD, dtype=np.int32)
        logprobs, prompt_logprobs, pooled = {}, {}, {}
        verified: dict[int, tuple[int, ...]] = {}
        for run, row in enumerate(plan.rows.tolist()):
            admission, tokens, script = self._rows[row]
            if run in plan.prompt_logprob_runs:
                top = admission.sampling.prompt_logprobs
                end = min(int(plan.starts[run] + plan.lengths[run]), admission.prompt_tokens - 1)
                prompt_logprobs[run] = [
                    scripted_logprobs(tokens[at + 1], at, top) for at in range(int(plan.starts[run]), end)
                ]
            if run in plan.pooled_runs:
                known = tokens[: int(plan.starts[run] + plan.lengths[run])]
                pooled[run] = pooled_parts(
                    list(accumulate(known, digest, initial=EMPTY))[1:],
                    int(plan.starts[run]),
                    int(plan.lengths[run]),
                    admission.pooling,
                )
            if run in plan.verify_runs:
                first = int(plan.lengths[:run].sum())
                drafts = [*plan.tokens[first + 1 : first + int(plan.lengths[run])].tolist(), PAD]
                said: list[int] = []
                for draft in drafts:
                    said.append(self._token(admission, len(tokens) - admission.prompt_tokens, script))
                    tokens.append(said[-1])
                    if said[-1] != draft:
                        break
                verified[run], chosen[run] = tuple(said), said[-1]
            elif plan.samples[run]:
                token = self._token(admission, len(tokens) - admission.prompt_tokens, script)
                tokens.append(token)
                chosen[run] = token
                if admission.sampling.logprobs is not None:
                    logprobs[run] = scripted_logprobs(token, len(tokens), admission.sampling.logprobs)
        return StepResult(
            tokens=chosen, logprobs=logprobs, prompt_logprobs=prompt_logprobs, verified=verified, pooled=pooled
        )

    def transfers_done(self, step: int) -> bool:
        return True

    def sleep(self, level: int) -> tuple[Part, ...]:
        assert not self._rows, "a row is taken while the engine goes to sleep"
        return PARTS

    def wake(self, part: str) -> None:
        """It has no memory to take again."""

    def close(self) -> None:
        self._rows.clear()

    def _script(self, admission: Admission, prompt: list[int]) -> list[int]:
        text = self._backend.decode(prompt, skip_special_tokens=True)
        if "sampling?" in text:
            sampling = admission.sampling
            return [*self._encode(f"{sampling.temperature} {sampling.top_k} {sampling.top_p}"), EOS]
        if "crash" in text:
            raise RuntimeError("the accelerator fell off the bus")
        _, found, said = text.partition("say:")
        said = said.replace("⟦", "<|").replace("⟧", "|>")
        return [*self._encode(said), EOS] if found else self._encode(SONG)

    def _encode(self, text: str) -> list[int]:
        return self._backend.encode(text).ids

    def _token(self, admission: Admission, made: int, script: list[int]) -> int:
        if not admission.sampling.greedy and script[-1] != EOS:
            mixed = (admission.seed * 6364136223846793005 + made * 1442695040888963407) >> 7
            return self._encode("abcdefghij")[mixed % 10]
        token = script[made % len(script)]
        if token in admission.stop_ids and made < admission.sampling.min_tokens:
            return self._encode(".")[0]
        return token


def build(
    config: EngineConfig, *, on_progress: Callable[[str], None], step_s: float = 0.0, caches: bool = False
) -> Built:
    assert config.model is not None
    directory = Path(config.model)
    on_progress("reading the script")
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.no_truncation()
    vocab_size = backend.get_vocab_size(with_added_tokens=True)
    spec = dataclasses.replace(_SPEC, vocab_size=vocab_size)
    arena = plan_arena(spec, 32_000_000)
    sizes = fit_sizes(config, spec, arena)
    read_tokenizer = (directory / "tokenizer.json").read_text
    sandbox = GrammarSandbox(read_tokenizer, (EOS,), seconds=config.grammar_seconds, memory_bytes=256 << 20)
    grammars = GrammarCompiler(read_tokenizer, (EOS,), vocab_size, sandbox)
    memory = Memory(arena, cache=caches)
    core = EngineCore(
        vocab_size=vocab_size,
        sizes=sizes,
        grammars=grammars,
        memory=memory,
        executor=AnsweringExecutor(backend, step_s),
        clock=time.monotonic,
        seed=config.seed,
        eos_ids=(EOS,),
        drafter=_drafter(config),
    )
    info = ModelInfo(
        name="scripted",
        directory=str(directory),
        family="scripted",
        layers="1 attention, 1 gated delta",
        vocab_size=vocab_size,
        dtype="float32",
        weights_bytes=0,
        load_s=0.1,
        device="cpu",
        threads=1,
        kernels="no",
        sizes=sizes,
        memory=[MemoryRow("arena", arena.arena_bytes, "scripted")],
        notes=["a note about what was shrunk"],
        eos_ids=[EOS],
        generation_defaults={"temperature": 0.0},
        default_sampling=read_default_sampling(config.default_sampling) | {"temperature": 0.0},
        trust_control_tokens=config.trust_control_tokens,
        identity={"tokenizer": hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()},
        hidden_size=WIDTH,
        score_labels=1,
    )
    return Built(core, info)


def build_paced(config: EngineConfig, *, on_progress: Callable[[str], None]) -> Built:
    return build(config, on_progress=on_progress, step_s=0.001)


def build_unadvised(config: EngineConfig, *, on_progress: Callable[[str], None]) -> Built:
    """The checkpoint says nothing of sampling."""
    assembled = build(config, on_progress=on_progress)
    silent = {"generation_defaults": {}, "default_sampling": read_default_sampling(config.default_sampling)}
    return assembled._replace(info=msgspec.structs.replace(assembled.info, **silent))


def build_refusing_adapters(config: EngineConfig, *, on_progress: Callable[[str], None]) -> Built:
    """None of the adapters can be served."""
    assembled = build(config, on_progress=on_progress)
    refused = {name: f"--lora {name}={path}: too large" for name, path in named_paths(config.lora).items()}
    return assembled._replace(info=msgspec.structs.replace(assembled.info, refused_adapters=refused))


def build_cached(config: EngineConfig, *, on_progress: Callable[[str], None]) -> Built:
    """Paced, and prompts are cached."""
    return build(config, on_progress=on_progress, step_s=0.001, caches=True)


def build_slow(config: EngineConfig, *, on_progress: Callable[[str], None]) -> Built:
    return build(config, on_progress=on_progress, step_s=0.005)


def build_wide(config: EngineConfig, *, on_progress: Callable[[str], None]) -> Built:
    """Steps take as long as those of a GPU with hundreds of rows."""
    return build(config, on_progress=on_progress, step_s=0.03)


def build_long_steps(config: EngineConfig, *, on_progress: Callable[[str], None]) -> Built:
    return build(config, on_progress=on_progress, step_s=1.5)


def _drafter(config: EngineConfig) -> Speculator | None:
    """Sources that are named. ``auto`` finds that nothing pays beside a scripted device."""
    sources = parse_sources("off" if config.speculate == "auto" else config.speculate)
    return Speculator(sources, costs=_FreeRows()) if sources else None


class _FreeRows(RowCosts):
    """Steps cost the same whatever their rows, so every likely draft is verified."""

    def __init__(self) -> None:
        super().__init__({1: 1.0, 16: 1.0001, 1024: 1.001})

    def note(self, rows: int, seconds: float) -> None:
        """Measurements of a busy machine change nothing."""

    def note_verify(self, decodes: int, drafted: int, seconds: float) -> None:
        """As ``note``."""


def build_embedded_with_free_drafts(config: EngineConfig, *, on_progress: Callable[[str], None]) -> Built:
    """The embedded model; ``speculate`` of ``config`` decides the sources."""
    from weft.assemble import assemble  # 0.1 CPU seconds, which the other engines save

    assembled = assemble(config, on_progress=on_progress)
    assert isinstance(assembled.core.drafter, Speculator)
    assembled.core.drafter.costs = _FreeRows()
    assembled.core.drafter._clock = lambda: 0.0
    return Built(assembled.core, assembled.info)


def build_never(config: EngineConfig, *, on_progress: Callable[[str], None]) -> Built:
    on_progress("loading for ever")
    while True:
        time.sleep(1)


def build_once(config: EngineConfig, *, on_progress: Callable[[str], None]) -> Built:
    assert config.model is not None
    mark = Path(config.model) / "started"
    if mark.exists():
        raise CheckpointError("model.safetensors has gone since")
    mark.touch()
    return build(config, on_progress=on_progress, step_s=0.005)


class _Forgetful(EngineCore):
    """Requests of the cache salt "forget" resume at position 0."""

    def submit(self, request: Request) -> None:
        if request.resumption is not None and request.cache_salt == "forget":
            [tokens] = request.resumption.answers.values()
            request = msgspec.structs.replace(request, prompt_tokens=[*request.prompt_tokens, *tokens], resumption=None)
        super().submit(request)


def build_for_resumes(config: EngineConfig, *, on_progress: Callable[[str], None]) -> Built:
    assert config.model is not None
    while (Path(config.model) / "hold").exists():
        time.sleep(0.01)
    assembled = build(config, on_progress=on_progress, step_s=0.001)
    assembled.core.__class__ = _Forgetful
    return assembled


def build_uneven(config: EngineConfig, *, on_progress: Callable[[str], None]) -> Built:
    assert config.model is not None
    try:
        with (Path(config.model) / "slow").open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return build(config, on_progress=on_progress, step_s=0.001, caches=True)
    return build(config, on_progress=on_progress, step_s=0.05, caches=True)


def build_broken(config: EngineConfig, *, on_progress: Callable[[str], None]) -> Built:
    raise CheckpointError("model.safetensors ends after 7 bytes")
