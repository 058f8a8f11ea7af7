"""The blocks of families that are rarely served; see ``weft.families.more``."""
