"""Which replica computes a request: the protocol of routers, and routers. Pure: no clock, no I/O, no torch."""
