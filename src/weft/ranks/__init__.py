"""Several processes that compute one model: rank 0 is the engine, the other ranks follow its plans."""
