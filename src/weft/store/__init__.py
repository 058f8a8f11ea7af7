"""Prefixes on disk and in object storage.

    open_store(path, identity, options) --> Store (``protocol``), whose values are in ``values``

``values`` and ``protocol`` are what an engine sees. The format on disk is docs/store.md.
"""
