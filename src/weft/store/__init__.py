"""Prefixes on disk and in object storage.

    open_store(path, identity, options) --> Store (``protocol``), whose values are in ``values``

An engine uses only ``values`` and ``protocol``. The format on disk is docs/store.md.
"""
