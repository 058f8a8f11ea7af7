"""How the checkpoints that ship with weft are made: `python -m train.run` (see train/README.md)."""
