"""How fast weft serves, over HTTP, beside transformers' ``generate`` on the same weights in the same run."""
