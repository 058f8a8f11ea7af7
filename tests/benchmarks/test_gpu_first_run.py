"""The run that nobody watches: what fails leaves the others their turn, and what was said is kept."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bare_machine, gpu_first_run, gpu_parts, gpu_tune, kernels
from weft.planning.geometries import find_geometry

ROOT = Path(__file__).resolve().parents[2]
DIES_AT_1 = """
import json, os, sys
for number in range(int(sys.argv[1]), 3):
    print("@" + json.dumps({"number": number, "begins": f"kernel {number}"}), flush=True)
    if number == 1:
        os._exit(3)
    print("@" + json.dumps({"number": number, "name": f"kernel {number}"}), flush=True)
"""


def test_a_kernel_that_takes_its_process_with_it_leaves_the_others_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(part: str, more: Any, after: int) -> list[str]:
        if part == "check":
            return [sys.executable, "-c", DIES_AT_1, str(after)]
        return [sys.executable, "-c", "print('no result'); raise SystemExit(2)"]

    monkeypatch.setattr(gpu_first_run, "command_of", command)
    output = tmp_path / "results" / "gpu.json"
    code = gpu_first_run.main(["--output", str(output), "--only", "check", "decode", "--budget-s", "600"])
    found = json.loads(output.read_text())
    assert [one["name"] for one in found["check"]["results"]] == ["kernel 0", "kernel 2"]
    assert found["check"]["lost"] == ["kernel 1"]
    assert found["check"]["exit_code"] == 0
    assert found["decode"]["exit_code"] == 2
    assert found["decode"]["last_lines"] == ["no result"]
    assert code == 1


def test_a_part_that_cannot_even_begin_is_not_tried_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def command(part: str, more: Any, after: int) -> list[str]:
        started.append(after)
        return [sys.executable, "-c", "raise SystemExit(1)"]

    monkeypatch.setattr(gpu_first_run, "command_of", command)
    gpu_first_run.main(["--output", str(tmp_path / "gpu.json"), "--only", "kernels"])
    assert started == [0]


def test_names_of_failed_tests_are_kept_however_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = [
        "tests/gpu/test_a.py::test_one FAILED [ 1%]",
        "tests/gpu/test_a.py::test_two PASSED [ 2%]",
        "[gw0] FAILED tests/gpu/test_b.py::test_three",
        *["."] * 100,
    ]
    monkeypatch.setattr(
        gpu_first_run,
        "command_of",
        lambda part, more, after: [sys.executable, "-c", f"print({chr(10).join(says)!r}); raise SystemExit(1)"],
    )
    output = tmp_path / "gpu.json"
    gpu_first_run.main(["--output", str(output), "--only", "tests"])
    assert json.loads(output.read_text())["tests"]["failed"] == [says[0], says[2]]


def test_parts_for_which_there_is_no_time_are_said_to_be_left_out(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    gpu_first_run.main(["--output", str(output), "--budget-s", "0"])
    found = json.loads(output.read_text())
    assert set(found) == set(gpu_first_run.SHARES_S)
    assert all("no time" in part["left_out"] for part in found.values())


def test_kernels_and_the_engine_need_torch_triton_and_numpy_alone() -> None:
    """On a machine that has nothing else: every kernel file as it is, and steps with stand-ins."""
    script = """
import importlib.util, sys
from benchmarks import bare_machine
real = importlib.util.find_spec

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in bare_machine.WANTED:
            raise ModuleNotFoundError(name, name=name)

hidden = Hidden()
sys.meta_path.insert(0, hidden)
from tests.support.compile_gate import kernel_modules
assert len(kernel_modules()) > 15
sys.meta_path.remove(hidden)
importlib.util.find_spec = lambda name: None if name in bare_machine.WANTED else real(name)
absent = bare_machine.with_stand_ins()
assert set(absent) == set(bare_machine.WANTED)
sys.meta_path.insert(0, sys.meta_path.pop())
import weft_tools.bench.kernels, weft.engine.engine, weft.models.loading, weft.runner.torch_executor
from weft.request import Request, SamplingParams
request = Request(request_id="a", prompt_tokens=[1], sampling=SamplingParams(temperature=0.0))
assert request.sampling.greedy and request.boundaries == []
"""
    variables = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    ran = subprocess.run([sys.executable, "-c", script], env=variables, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_a_stand_in_exists_for_each_dependency() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    # Without blake3 files are hashed by blake2b.
    named = {re.split(r"[^\w-]", one)[0].replace("-", "_").lower() for one in listed} - {"blake3"}
    imported = {"pillow": "PIL", "pyzmq": "zmq"}
    assert {imported.get(name, name) for name in named} == {"torch", "numpy", *bare_machine.WANTED}


def test_the_stand_in_for_a_struct_keeps_what_it_is_given() -> None:
    class One(bare_machine.Struct):
        first: int
        rest: list[int] = []

    class Two(One):
        last: str = "z"

    one, other = Two(1), Two(2, last="y")
    one.rest.append(5)
    assert (one.first, one.rest, one.last) == (1, [5], "z")
    assert (other.first, other.rest, other.last) == (2, [], "y")
    with pytest.raises(AttributeError):
        Two()


def test_each_group_of_launch_parameters_gives_back_those_that_weft_takes() -> None:
    from weft.tensor.kernels import delta_rule, moe, paged_attention, quantized_linear

    def taken() -> tuple[object, ...]:
        decodes, chunks = paged_attention.decode_blocks, delta_rule.CHUNKS
        return moe.product_blocks, quantized_linear.blocks_of, decodes, chunks

    before, groups = taken(), list(gpu_tune.groups())
    changed = set()
    for group in groups:
        assert find_geometry(group.geometry) is not None
        assert group.variants[0] is None
        for variant in group.variants[1:]:
            group.apply(variant)
            changed |= {at for at, one in enumerate(taken()) if one is not before[at]}
        group.apply(None)
        assert taken() == before, group.name
    assert changed == set(range(len(before)))
    assert len({group.name for group in groups}) == len(groups)


def test_a_part_that_needs_packages_is_left_out_without_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu_first_run.NEEDED, "rivals", ("no_package", "neither"))
    output = tmp_path / "gpu.json"
    gpu_first_run.main(["--output", str(output), "--only", "rivals"])
    assert json.loads(output.read_text())["rivals"]["left_out"] == "no_package or neither is not installed"


def test_every_part_is_a_command_that_takes_its_arguments() -> None:
    """A part of ``gpu_parts`` that is misspelt would say so after a minute on a GPU."""
    for part in gpu_first_run.SHARES_S:
        command = gpu_first_run.command_of(part, ["--device", "cpu"], 3)
        if "benchmarks.gpu_parts" in command:
            args = gpu_parts.parser().parse_args(command[command.index("benchmarks.gpu_parts") + 1 :])
            assert args.part in gpu_parts.PARTS
            assert (args.after, args.device) == (3, "cpu")
            assert all(map(find_geometry, (args.geometry, *args.geometries)))
            assert set(args.groups) <= set(kernels.GROUPS)
