"""A checkpoint in fewer bits: as compressed-tensors lays it out, or as one GGUF file."""
