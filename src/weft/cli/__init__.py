"""The ``weft`` command: an edge that nothing imports."""
