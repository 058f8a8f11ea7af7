"""Variants of the kernels of recurrent layers."""

from __future__ import annotations

from functools import partial

import torch
import triton

from tests.support.kernel_variants.compilation import TYPES, Compilation, by_choice, compilation_of
from weft.tensor.gpu.recurrence import in_chunks
from weft.tensor.kernels import causal_conv as conv
from weft.tensor.kernels import conv_and_gates as joined
from weft.tensor.kernels import delta_gates as gating
from weft.tensor.kernels import delta_rule as delta
from weft.tensor.kernels import mamba1, mamba2, running_max, wkv7


def of_delta_rule() -> list[Compilation]:
    """Return the variants for heads of 128 x 128 and states of ``--state-dtype``."""
    return [
        one
        for by_line in (False, True)
        for one in (*_delta_recurrent_compilations(by_line), *_delta_chunk_compilations(by_line))
    ]


def _delta_recurrent_compilations(by_line: bool) -> list[Compilation]:
    """Return the variants of decode for the inputs of models, and of prefill for float32 inputs, states in few bits."""
    variants = []
    for dtype, state, prefill in (
        ("*bf16", "*fp32", False),
        ("*bf16", "*bf16", False),
        ("*fp32", "*bf16", True),
        ("*fp16", "*fp16", False),
        ("*fp32", "*fp32", False),
    ):
        pointers = dict.fromkeys(("q", "k", "v", "out"), dtype) | dict.fromkeys(("g", "beta"), "*fp32")
        constants = {
            "GROUP": 2,
            "K": 128,
            "V": 128,
            "KP": 128,
            "BV": delta.RECURRENT.width,
            "BY_LINE": by_line,
            "PREFILL": prefill,
        }
        title = f"{_delta_form(by_line)} {'prefill' if prefill else 'decode'} {dtype[1:]} state {state[1:]}"
        variants.append(compilation_of(title, delta.recurrent, pointers | {"state": state}, constants, delta.RECURRENT))
    return variants


def _delta_chunk_compilations(by_line: bool) -> list[Compilation]:
    scratch = dict.fromkeys(("q_left", "k_up", "k_left", "decay", "g", "beta"), "*fp32")
    dim, group = 128, 1 if by_line else 2
    prepare, prepare_blocks, own = delta._prepare_form(by_line, group, dim)
    variants = []
    for of in (torch.bfloat16, torch.float32):
        dtype = TYPES[of]
        pointers = scratch | dict.fromkeys(("q", "k", "v", "out"), dtype)
        pointers |= dict.fromkeys(("t_scratch", "p"), "*i32" if delta.in_pairs(of, by_line) else "*fp32")
        common = {"H": 32, "K": dim}
        of_chunks = common | {"GROUP": group, "V": dim, "KP": dim, "BY_LINE": by_line}
        title = f"{_delta_form(by_line)} {{}} {dtype[1:]} {dim}".format
        variants.append(compilation_of(title("prepare"), prepare, pointers, common | own, prepare_blocks))
        states = [state for state in TYPES if in_chunks(of, state)]
        for (blocks, sides), only in by_choice(partial(delta.chunk_blocks, of, by_line)):
            sizes = of_chunks | {"BV": blocks.width, "SIDES": sides}
            for state in states:
                slots = dict.fromkeys(("state", "carry_in", "carry_out"), TYPES[state])
                named = title("chunks") + f" state {TYPES[state][1:]}"
                variants.append(compilation_of(named, delta.chunks, pointers | slots, sizes, blocks, only=only))
    return variants


def _delta_form(by_line: bool) -> str:
    return "delta rule by line" if by_line else "delta rule"


def of_wkv7() -> list[Compilation]:
    """Return the variants for heads of 64 x 64, as in all releases."""
    sizes = {"K": 64, "V": 64, "KP": 64, "BV": wkv7.RECURRENT.width}
    return [
        compilation_of(
            f"wkv7 {dtype[1:]} state {state[1:]} prefill {prefill}",
            wkv7.recurrent,
            dict.fromkeys(("r", "k", "v", "kk", "b", "out"), dtype) | {"g": "*fp32", "state": state},
            sizes | {"PREFILL": prefill},
            wkv7.RECURRENT,
        )
        for dtype, state in (("*bf16", "*fp32"), ("*bf16", "*bf16"), ("*fp32", "*fp32"))
        for prefill in (False, True)
    ]


def of_delta_gates() -> list[Compilation]:
    floats = dict.fromkeys(("bias", "decay", "g", "beta"), "*fp32")
    return [
        compilation_of(
            f"delta gates {dtype[1:]}, {lines} lines{', floored' * floored}",
            gating._gates,
            floats | {"a": dtype, "b": dtype},
            {"C": 32 * lines, "H": 32, "HP": 32, "BC": min(gating.COLUMNS.width, 32 * lines), "FLOORED": floored},
            gating.COLUMNS,
            ("beta_scale", "floor"),
        )
        for dtype in TYPES.values()
        for lines, floored in ((1, False), (128, False), (128, True))
    ]


def of_conv_and_gates() -> list[Compilation]:
    floats = dict.fromkeys(("dt_bias", "rates", "g", "beta"), "*fp32")
    sizes = {"C": 8192, "W": 3, "WP": 4, "BC": conv.ROWS.width, "H": 32, "HP": 32}
    return [
        compilation_of(
            f"conv and gates {dtype[1:]}",
            joined._rows_and_gates,
            floats | dict.fromkeys(("x", "weight", "window", "out", "a", "b"), dtype),
            sizes,
            conv.ROWS,
            ("beta_scale",),
        )
        for dtype in TYPES.values()
    ]


def of_mamba1() -> list[Compilation]:
    sizes = {"C": 8192, "N": 16, "NP": 16, "BC": mamba1.CHANNELS.width}
    weights = dict.fromkeys(("A", "D", "dt_bias", "begins", "steps"), "*fp32")
    variants = [
        compilation_of(
            f"mamba1 link state {state[1:]}", mamba1._link, weights | {"state": state}, sizes, mamba1.CHANNELS
        )
        for state in TYPES.values()
    ]
    for name, dtype in TYPES.items():
        pointers = weights | dict.fromkeys(("x", "dt", "b", "c", "out"), dtype)
        short = str(name).removeprefix("torch.")
        for state, prefill in _recurrent_states(name):
            variants.append(
                compilation_of(
                    f"mamba1 recurrent {short} state {state[1:]} prefill {prefill}",
                    mamba1._recurrent,
                    pointers | {"state": state},
                    sizes | {"PREFILL": prefill},
                    mamba1.CHANNELS,
                )
            )
        for flag in (False, True):
            variants.append(
                compilation_of(
                    f"mamba1 scan {short} ends {flag}", mamba1._scan, pointers, sizes | {"ENDS": flag}, mamba1.CHANNELS
                )
            )
    return variants


def _recurrent_states(inputs: torch.dtype) -> list[tuple[str, bool]]:
    """Return types of states, each with its PREFILL: that of decodes, and those of prefills token by token."""
    return [(TYPES[inputs], False), *((TYPES[state], True) for state in TYPES if not in_chunks(inputs, state))]


def of_mamba2() -> list[Compilation]:
    """Return the variants for the inputs of models and the states of ``--state-dtype``."""
    sizes = {"GROUP": 16, "P": 64, "N": 128, "NP": 128}
    gates, limits = dict.fromkeys(("A", "D", "dt_bias"), "*fp32"), ("low", "high")
    variants = []
    for name, dtype in TYPES.items():
        pointers = gates | dict.fromkeys(("x", "dt", "b", "c", "out"), dtype)
        short = str(name).removeprefix("torch.")
        for state, prefill in _recurrent_states(name):
            variants.append(
                compilation_of(
                    f"mamba2 recurrent {short} state {state[1:]} prefill {prefill}",
                    mamba2._recurrent,
                    pointers | {"state": state},
                    sizes | {"BP": mamba2.RECURRENT.width, "PREFILL": prefill},
                    mamba2.RECURRENT,
                    limits,
                )
            )
    scratch = dict.fromkeys(("scores", "sizes", "whole_sums", "rest_sums", "pushes", "decay", "chunk_states"), "*fp32")
    for inputs, width in ((torch.bfloat16, 128), (torch.float32, 128), (torch.bfloat16, 256)):
        kind = TYPES[inputs]
        pointers = gates | scratch | dict.fromkeys(("x", "dt", "b", "c", "out"), kind)
        heads = {"H": 32, "GROUP": 16, "N": width, "NP": width}
        before = mamba2.states_blocks(width)
        variants.append(
            compilation_of(
                f"mamba2 prepare {kind[1:]} {width}",
                mamba2._prepare,
                pointers,
                heads | {"BH": 16},
                mamba2.PREPARE,
                limits,
            )
        )
        for state in (state for state in TYPES if in_chunks(inputs, state)):
            slots = dict.fromkeys(("state", "carry_in", "carry_out"), TYPES[state])
            variants.append(
                compilation_of(
                    f"mamba2 states {kind[1:]} {width} state {TYPES[state][1:]}",
                    mamba2._states,
                    pointers | slots,
                    heads | {"P": 64, "BP": before.width},
                    before,
                )
            )
        for head_dim in (16, 32, 64):
            variants += [
                compilation_of(
                    f"mamba2 outputs {kind[1:]} {width} P {head_dim}",
                    mamba2._outputs,
                    pointers,
                    heads | {"P": head_dim, "BP": after.width},
                    after,
                    limits,
                    only=only,
                )
                for after, only in by_choice(partial(mamba2.outputs_blocks, width, head_dim))
            ]
    return variants


def of_running_max() -> list[Compilation]:
    floats = dict.fromkeys(("log_decay", "x", "out"), "*fp32")
    return [
        compilation_of(
            f"running max state {dtype[1:]} prefill {prefill}",
            running_max._running_max,
            floats | {"state": dtype},
            {"H": 8, "HP": 16, "PREFILL": prefill},
            running_max.HEADS,
        )
        for dtype in TYPES.values()
        for prefill in (False, True)
    ]


def of_causal_conv() -> list[Compilation]:
    variants = []
    for name, dtype in TYPES.items():
        pointers = dict.fromkeys(("x", "gate", "after", "weight", "bias", "window", "out"), dtype)
        for width, gated in ((3, False), (2, True)):
            form = {"C": 8192, "W": width, "BIAS": gated, "SILU": not gated, "GATED": gated}
            title = f"{'short' if gated else 'causal'}_conv {{}} {str(name).removeprefix('torch.')}"
            variants.append(
                compilation_of(
                    title.format("tokens"),
                    conv._tokens,
                    pointers,
                    form | {"KP": 4, "BC": conv.TOKENS.width},
                    conv.TOKENS,
                )
            )
            variants.append(
                compilation_of(
                    title.format("rows"),
                    conv._rows,
                    pointers,
                    form | {"WP": triton.next_power_of_2(width), "BC": conv.ROWS.width},
                    conv.ROWS,
                )
            )
    return variants
