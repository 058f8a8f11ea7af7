"""Vision towers: patches of a picture to rows of the language model."""
