"""What a step, a restore and a verified draft cost in seconds: measured, or by a data sheet. No clock."""
