"""Which part of each stored tensor a rank holds: tables by mixer (``tables``), read by name (``lookup``)."""

from weft.models.cuts.lookup import Cutter, RankHeaders, StoredCut
from weft.models.cuts.tables import Cut, Part, RankPlace

__all__ = ["Cut", "Cutter", "Part", "RankHeaders", "RankPlace", "StoredCut"]
