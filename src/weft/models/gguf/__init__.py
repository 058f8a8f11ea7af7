"""GGUF files, llama.cpp's: a file becomes a directory that looks like a checkpoint, for the loader that
exists."""

METHOD = "gguf"
"""The ``quant_method`` of a view's config.json (``view``)."""
