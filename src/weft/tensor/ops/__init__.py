"""Ops, one file for each computation.

Each is one row for the chooser of ``tensor.op``: its torch form, which has the signature, the documentation and the
formula; its C++ form; the module of its Triton form.

Models do not depend on the form that runs. ``docs/tensor-plane.md`` has the table of ops and their common rules (PAD,
fresh, taps). ``tests/ops`` compares each form with the op's naive twin.
"""
