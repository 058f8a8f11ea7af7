"""Adapters in an engine: whose bits, whose cached prefixes, whose memory; and files that are no adapter."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.adapters import PREFIX, factors, lfm2_adapter, written
from tests.fixtures.checkpoints import checkpoint, make_checkpoint
from tests.fixtures.store_life import stored_snapshots
from tests.oracle.test_mtp import drafter as costless_drafter
from tests.support.gguf_files import write_gguf
from tests.support.given_costs import GIVEN_COSTS
from weft import Engine
from weft.adapters import Adapter, read_adapter, salted
from weft.api.completion import Completion
from weft.assemble import assembly
from weft.errors import CheckpointError, RequestError, WeftError

PROMPT = list(range(3, 90))
NAMES = tuple(f"a{number}" for number in range(8))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Matrices of this size go into tiles, in which a row's bits are its own.
    return make_checkpoint(tmp_path_factory.mktemp("base"), "lfm2", hidden_size=256)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("adapters")
    return {name: lfm2_adapter(home / name, 10 * number, rank=3 + number) for number, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def engine(base: Path, directories: dict[str, Path]) -> Iterator[Engine]:
    with Engine(str(base), loras=directories, memory="64MiB") as made:
        yield made


def answers(engine: Engine, names: list[str | None], tokens: list[int] = PROMPT) -> list[Completion]:
    return engine.generate(
        [tokens] * len(names), lora=names, max_tokens=12, temperature=0, ignore_eos=True, logprobs=2, progress=False
    )


def bits(completion: Completion) -> object:
    return completion.tokens, [(one.logprob, one.top) for one in completion.logprobs or []]


def test_a_batch_of_eight_adapters_gives_each_row_its_lone_bits(engine: Engine) -> None:
    names = [None, *NAMES, None, "a0"]
    together = answers(engine, names)
    alone = []
    for name in names:
        engine.flush_cache()
        alone += answers(engine, [name])
    assert [bits(one) for one in together] == [bits(one) for one in alone]
    assert len({tuple(one.tokens) for one in together}) == 9, "each adapter has an answer of its own"


def test_rows_of_the_base_have_the_bits_of_an_engine_without_adapters(engine: Engine, base: Path) -> None:
    with Engine(str(base), memory="64MiB") as plain:
        [expected] = answers(plain, [None])
    engine.flush_cache()
    mixed = answers(engine, [None, "a0", None, "a1"])
    assert bits(mixed[0]) == bits(mixed[2]) == bits(expected)
    assert bits(mixed[1]) != bits(expected), "the control: an adapter's row differs"


def test_a_prefix_of_one_adapter_is_none_of_another(engine: Engine) -> None:
    """vllm 42125, 44701: an answer from another adapter's prefix."""
    engine.flush_cache()
    first = answers(engine, ["a0"])
    again, other, plain = (answers(engine, [name])[0] for name in ("a0", "a1", None))
    assert again.cached_tokens > 0, "the control: its own prefix is found"
    assert other.cached_tokens == plain.cached_tokens == 0
    assert bits(again) == bits(first[0])


def test_other_files_under_one_name_find_nothing_of_the_first(engine: Engine, tmp_path: Path) -> None:
    """vllm 42125: a reload under the same name answered from the old adapter's prefix."""
    path = lfm2_adapter(tmp_path / "same", 500)
    engine.load_lora("same", path)
    [old] = answers(engine, ["same"])
    [cached] = answers(engine, ["same"])
    assert cached.cached_tokens > 0
    lfm2_adapter(path, 900)
    engine.load_lora("same", path)
    [new] = answers(engine, ["same"])
    assert new.cached_tokens == 0
    assert new.tokens != old.tokens
    engine.unload_lora("same")
    with pytest.raises(RequestError, match="lora is 'same'"):
        answers(engine, ["same"])


def test_files_that_changed_behind_the_engine_are_refused(base: Path, tmp_path: Path) -> None:
    path, other = lfm2_adapter(tmp_path / "a", 1), lfm2_adapter(tmp_path / "b", 2)
    with Engine(str(base), loras={"a": path, "b": other}, memory="64MiB", lora_memory="200KiB") as engine:
        assert engine.stats().adapters.resident == 1
        lfm2_adapter(other, 3)
        with pytest.raises(CheckpointError, match=r"files of adapter b have changed"):
            answers(engine, ["b"])
        assert len(answers(engine, ["a"])[0].tokens) == 12, "the engine goes on"


def test_the_least_recently_used_adapter_gives_way_and_a_running_one_stays(base: Path, tmp_path: Path) -> None:
    paths = {f"n{number}": lfm2_adapter(tmp_path / str(number), number) for number in range(5)}
    with Engine(str(base), loras=paths, memory="64MiB", lora_memory="400KiB") as engine:
        room = engine.stats().adapters.resident
        assert 1 <= room < 5
        expected = {name: answers(engine, [name])[0].tokens for name in paths}
        engine.flush_cache()
        running = engine.stream(PROMPT, lora="n0", max_tokens=60, temperature=0, ignore_eos=True)
        begun = [token for _ in range(3) for token in next(running).tokens]
        loads = engine.stats().adapters.loads
        for name in ("n1", "n2", "n3"):
            assert answers(engine, [name])[0].tokens == expected[name]
        assert engine.stats().adapters.loads > loads, "the others came and went"
        rest = [token for piece in running for token in piece.tokens]
        assert (begun + rest)[:12] == expected["n0"]
        assert engine.stats().adapters.held_bytes <= 400 << 10


def spoiled(directory: Path, tmp_path: Path, kind: str) -> Path:
    path = shutil.copytree(directory, tmp_path / kind)
    config, weights = path / "adapter_config.json", path / "adapter_model.safetensors"
    tensors, settings = load_file(weights), json.loads(config.read_text())
    first = next(iter(tensors))
    if kind == "no config":
        config.unlink()
    elif kind == "pickle":
        weights.rename(path / "adapter_model.bin")
    elif kind == "link":
        outside = tmp_path / "outside.safetensors"
        weights.rename(outside)
        weights.symlink_to(outside)
    elif kind == "cut":
        weights.write_bytes(weights.read_bytes()[:-7])
    elif kind == "nan":
        save_file(tensors | {first: torch.full_like(tensors[first], torch.nan)}, weights)
    elif kind == "shape":
        save_file(tensors | {first: tensors[first][:, :-1].contiguous()}, weights)
    elif kind == "name":
        other = f"{PREFIX}model.layers.0.conv.in_porj.lora_A.weight"
        save_file(tensors | {other: tensors[first].clone()}, weights)
    elif kind == "half":
        save_file({name: tensor for name, tensor in tensors.items() if name != first}, weights)
    else:
        config.write_text(
            json.dumps(
                settings
                | {
                    "rank": {"r": 1000},
                    "method": {"peft_type": "LOHA"},
                    "variant": {"trainable_token_indices": [1]},
                    "begun": {"init_lora_weights": "pissa"},
                }[kind]
            )
        )
    return path


WORDS = {
    "no config": "adapter_config.json",
    "pickle": "pickle",
    "link": "link out of",
    "cut": "truncated",
    "nan": "NaN or infinite",
    "shape": "lora_A",
    "name": "in_porj",
    "half": "a module needs both",
    "rank": "limits.max_lora_rank",
    "method": "LOHA",
    "variant": "trainable_token_indices",
    "begun": "pissa",
}


@pytest.mark.parametrize("kind", WORDS)
def test_a_bad_adapter_is_one_line_and_the_engine_goes_on(
    kind: str, engine: Engine, tmp_path: Path, directories: dict[str, Path]
) -> None:
    with pytest.raises(WeftError, match=WORDS[kind]) as caught:
        engine.load_lora("bad", spoiled(directories["a1"], tmp_path, kind))
    assert "\n" not in caught.value.message
    assert len(answers(engine, ["a1"])[0].tokens) == 12


def test_a_bad_adapter_at_the_start_ends_it(base: Path, directories: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="NaN"):
        Engine(str(base), loras={"bad": spoiled(directories["a0"], tmp_path, "nan")}, memory="64MiB")


def test_no_cache_salt_of_a_client_reaches_an_adapters_prefixes(directories: dict[str, Path]) -> None:
    adapter = read_adapter("a", directories["a0"])
    theirs = adapter.salt("")
    assert salted(None, theirs) != theirs
    assert salted(None, salted(None, theirs)) != theirs
    assert salted(adapter, "x") != salted(adapter, "")
    assert salted(None, "tenant") == "tenant"


def test_speculation_and_prompt_logprobs_are_the_adapters(
    engine: Engine, base: Path, directories: dict[str, Path]
) -> None:
    [guess] = answers(engine, ["a2"])
    engine.flush_cache()
    fields = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "progress": False, "prompt_logprobs": 0}
    [drafted] = engine.generate([PROMPT], lora="a2", prediction=guess.tokens, **fields)
    [plain] = engine.generate([PROMPT], **fields)
    assert drafted.tokens == guess.tokens
    assert drafted.prompt_logprobs != plain.prompt_logprobs


def test_a_store_keeps_adapters_apart_over_a_restart(base: Path, tmp_path: Path) -> None:
    """vllm 42125, with the cache on disk: other files under the same name and path find nothing stale."""
    path = lfm2_adapter(tmp_path / "same", 40)
    store = {"store": str(tmp_path / "store"), "store_size": "64MiB", "step_costs": GIVEN_COSTS}

    def life() -> tuple[list[int], int]:
        """Tokens of an answer, and how many of its prompt were cached."""
        with Engine(str(base), loras={"same": path}, memory="64MiB", **store) as engine:
            [answer] = answers(engine, ["same"])
            return answer.tokens, answer.cached_tokens

    first, _ = life()
    again, cached = life()
    assert cached > 0, "the control: the same files find their prefix on disk"
    assert again == first
    lfm2_adapter(path, 70)
    other, cached = life()
    assert cached == 0
    assert other != first


def test_the_control_without_the_digest_in_the_key_a_reload_finds_what_is_stale(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adapter, "salt", lambda self, cache_salt: f"\0{self.name}\0{cache_salt}")
    path = lfm2_adapter(tmp_path / "same", 40)
    for seed in (40, 70):
        lfm2_adapter(path, seed)
        with Engine(
            str(base),
            loras={"same": path},
            memory="64MiB",
            store=str(tmp_path / "store"),
            store_size="64MiB",
            step_costs=GIVEN_COSTS,
        ) as engine:
            [answer] = answers(engine, ["same"])
    assert answer.cached_tokens > 0, "the other files' prefix"


LIFE = """
import json, sys, time
from weft import Engine
base, path, store, costs, prompt = sys.argv[1:5] + [json.loads(sys.argv[5])]
with Engine(
    base, loras={"same": path}, memory="64MiB", store=store, store_size="64MiB", step_costs=costs
) as engine:
    end, turn = time.monotonic() + 120, -1
    while time.monotonic() < end:   # until it is killed
        turn += 1
        [one] = engine.generate([prompt if not turn else prompt[:5]], lora="same", max_tokens=12,
                                temperature=0, ignore_eos=True, progress=False)
        if not turn:
            print(json.dumps(one.tokens), flush=True)
"""


def test_after_kill_9_an_adapters_prefixes_come_back_and_never_anothers(base: Path, tmp_path: Path) -> None:
    path, other = lfm2_adapter(tmp_path / "same", 40), lfm2_adapter(tmp_path / "other", 70)
    store = tmp_path / "store"
    command = [sys.executable, "-c", LIFE, str(base), str(path), str(store), GIVEN_COSTS, json.dumps(PROMPT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        end = time.monotonic() + 60
        # Later turns reach no further than 17 tokens.
        while not any(64 <= position < len(PROMPT) for position in stored_snapshots(store)):
            assert process.poll() is None
            assert time.monotonic() < end, "no state of the prompt came into the store"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    with Engine(
        str(base),
        loras={"same": path, "other": other},
        memory="64MiB",
        store=str(store),
        store_size="64MiB",
        step_costs=GIVEN_COSTS,
    ) as engine:
        [stranger, plain] = answers(engine, ["other", None])
        [again] = answers(engine, ["same"])
    assert stranger.cached_tokens == plain.cached_tokens == 0
    assert again.cached_tokens >= 64
    assert again.tokens == first
    assert first not in (stranger.tokens, plain.tokens)


def test_many_registered_adapters_take_turns_in_little_memory(base: Path, tmp_path: Path) -> None:
    paths = {f"n{number}": lfm2_adapter(tmp_path / str(number), number) for number in range(40)}
    with Engine(str(base), loras=paths, memory="64MiB", lora_memory="1MiB") as engine:
        resident = engine.stats().adapters.resident
        assert 4 <= resident < 20
        names = [f"n{7 * at % 40}" for at in range(60)]
        alone = {name: answers(engine, [name], PROMPT[:9])[0].tokens for name in ("n0", "n7", "n39")}
        engine.flush_cache()
        for first in range(0, len(names), 3):  # three at a time, of adapters that mostly have to come first
            said = answers(engine, list(names[first : first + 3]), PROMPT[:9])
            for name, one in zip(names[first : first + 3], said, strict=True):
                assert one.tokens == alone.get(name, one.tokens)
        stats = engine.stats().adapters
        assert stats.held_bytes <= 1 << 20
        assert stats.evictions >= 40
        assert len({tuple(tokens) for tokens in alone.values()}) == 3


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantised_weights_take_adapters_as_they_are(form: str, base: Path, directories: dict[str, Path]) -> None:
    loras = {name: directories[name] for name in ("a0", "a1")}
    with Engine(str(base), loras=loras, memory="64MiB", quantize=form) as engine:
        together = answers(engine, ["a0", None, "a1"])
        alone = []
        for name in ("a0", None, "a1"):
            engine.flush_cache()
            alone += answers(engine, [name])
        assert [bits(one) for one in together] == [bits(one) for one in alone]
        assert len({tuple(one.tokens) for one in together}) == 3


def test_an_engine_that_dropped_its_weights_reads_its_adapters_again(engine: Engine) -> None:
    engine.flush_cache()
    before = answers(engine, ["a3", None])
    engine.sleep(2)
    engine.wake_up()
    assert engine.stats().adapters.resident == 0
    after = answers(engine, ["a3", None])
    assert [bits(one) for one in after] == [bits(one) for one in before]


def adapter_of(engine: Engine, directory: Path, *, alpha: float = 2.0) -> Path:
    """Factors of every matrix of the layers of whatever ``engine`` serves."""
    model = engine._core.executor.model  # type: ignore[attr-defined]
    tensors = {}
    for seed, name in enumerate(sorted(model.targets.stored)):
        target = model.targets.find(name)
        if target.kind == "product" and name.startswith("layers."):
            tensors |= factors(f"model.{name}", *target.whole_shape, seed=seed)
    return written(directory, tensors, lora_alpha=alpha)


def test_the_models_own_head_drafts_for_an_adapter_and_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = {}
    for speculate, drafter in (("mtp", costless_drafter()), ("off", None)):
        monkeypatch.setattr(assembly, "make_drafter", lambda *more, drafter=drafter: drafter)
        with Engine(memory="64MiB", speculate=speculate) as engine:
            engine.load_lora("a", adapter_of(engine, tmp_path / speculate, alpha=1.0))
            [adapted, plain] = engine.generate(
                ["Once upon a time"] * 2,
                lora=["a", None],
                max_tokens=32,
                temperature=0,
                ignore_eos=True,
                progress=False,
            )
            tokens[speculate] = adapted.tokens
            assert adapted.tokens != plain.tokens
            assert bool(engine.stats().speculation.sources["mtp"].proposed) is (speculate == "mtp")
    assert tokens["mtp"] == tokens["off"]


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_a_gguf_file_takes_the_adapters_of_its_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp 21125: rows of value heads are stored in another order, and an adapter met the wrong ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = []
    for model in (checkpoint(name), write_gguf(checkpoint(name), tmp_path / "model.gguf")):
        with Engine(str(model), memory="64MiB", dtype="float32") as engine:
            if not said:
                adapter_of(engine, tmp_path / "a")
            engine.load_lora("a", tmp_path / "a")
            said.append([one.tokens for one in answers(engine, ["a", None])])
    assert said[0] == said[1]
    assert said[0][0] != said[0][1]
