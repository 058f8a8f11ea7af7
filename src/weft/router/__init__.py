"""Routers, which choose the replica that computes a request, and their protocol. Pure: no clock and no I/O."""
