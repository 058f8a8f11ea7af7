"""The ops: one folder each, ``ops/<op>/{__init__,naive,cpu}.py``.

    __init__  the signature, its promise, and the choice of implementation
    naive     the dull twin: token by token in float64; the truth that tests compare with
    cpu       batched torch; what runs

A faster kernel is one more file in the folder and one more line in ``__init__``; models never see which
one runs. Import the function from its folder: ``from weft.tensor.ops.gated_delta import gated_delta``.
``docs/kernels.md`` has the table of ops and the rules they share (PAD, fresh, taps).
"""
