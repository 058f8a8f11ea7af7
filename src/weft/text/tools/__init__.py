"""Calls of tools: what a request may ask for, how each family writes them, and how they are read back."""
