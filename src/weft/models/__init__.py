"""Models: checkpoints in, ``CausalModel`` out. What others call is here; see docs/models.md."""

from weft.hub import resolve_model
from weft.models.decoder import CausalModel
from weft.models.generation import GenerationDefaults
from weft.models.loading import LoadedModel, load_model

__all__ = ["CausalModel", "GenerationDefaults", "LoadedModel", "load_model", "resolve_model"]
