"""weft beside other engines on the same machine: they live in an environment of their own (``make_env``)."""
