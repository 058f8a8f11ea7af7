"""A million requests through a fleet with faults. See ``__main__``."""
