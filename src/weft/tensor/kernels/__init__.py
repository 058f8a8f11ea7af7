"""The Triton kernels, a file for each op. Imported by the first call that needs them; see ``tensor.gpu``."""
