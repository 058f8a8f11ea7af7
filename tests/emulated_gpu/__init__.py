"""A GPU for tests on a machine without one: the CPU build of torch behaves as CUDA does, in what breaks.

    torch operator or Triton launch --> work with the bytes that it reads and writes --> queue of its stream
    event, .item(), pageable copy   --> the host waits: the queue runs, no earlier

The faults of a GPU path are rarely in its arithmetic. They are in places, order, lifetime and waiting, and
each of these is emulated (``docs/testing.md`` has the list, and what is not emulated):

    tensors      say ``cuda:0``; their bytes are on the host; operators that mix places raise
    queues       work runs when something waits for it, as late as CUDA allows, in any legal order
    allocator    blocks and segments as torch's, with a budget; freed memory is poison, and is given out again
    graphs       recording does not run; a replay works on the addresses of the recording, of whoever has them
    launches     kernels run in Triton's interpreter, on device memory alone; a first launch is a compilation

``emulated()`` puts it in the place of torch's public names. The product knows nothing of it. What goes wrong
without an error is in ``Card.reports``: a correct run leaves it empty.
"""

from __future__ import annotations

from tests.emulated_gpu.install import emulated

__all__ = ["emulated"]
