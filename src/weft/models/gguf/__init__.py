"""GGUF files, llama.cpp's: a file becomes a directory that looks like a checkpoint, for the loader that
exists."""
