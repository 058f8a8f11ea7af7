"""Costs of a step, a restore and a verified draft in seconds: measured, or by a data sheet. No clock."""
