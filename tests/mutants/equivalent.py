"""Mutants that no test can notice: the file, the lines before and after the change, and the reason.

An entry whose line is gone from its file goes too; ``make mutants`` names it.
"""

EQUIVALENT: tuple[tuple[str, str, str, str], ...] = ()
