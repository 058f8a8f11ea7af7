"""Models: checkpoints in, ``CausalModel`` out; see docs/models.md. ``loading.load_model`` is the way in.

This file imports nothing, so that ``weft.models.hub`` works without torch.
"""
