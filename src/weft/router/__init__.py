"""Which replica computes a request: the protocol of routers, and routers. Pure: no clock and no I/O."""
