"""The ops: one folder each, ``ops/<op>/{__init__,naive,cpu}.py``.

    __init__  the signature, its promise, and the choice of implementation
    naive     the reference: token by token in float64; tests compare with it
    cpu       batched torch, for every device

A faster kernel is one more file in the folder and one more line in ``__init__``; models never see which
implementation runs. Import the function from its folder: ``from weft.tensor.ops.gated_delta import
gated_delta``. ``docs/kernels.md`` has the table of ops and their common rules (PAD, fresh, taps).
"""
