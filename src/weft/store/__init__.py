"""Prefixes on disk and in object storage. ``values`` and ``protocol`` are what an engine sees."""
