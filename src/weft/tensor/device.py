"""Device of the model: the meaning of ``--device`` on this machine, torch's reports, waits for a GPU.

    auto      cuda where torch has a GPU, the CPU elsewhere
    cpu       the CPU
    cuda      the GPU that torch calls current          cuda:N    the GPU with that number

    event recorded after work --query, pause, query, ...--> done, or DeviceTimeoutError after WAIT_MAX_S

``assemble`` resolves the device once; everything below takes a ``torch.device`` and looks nothing up.

``event.synchronize()`` has no deadline: a kernel that never ends, or a card that fell off the bus, would hang the
engine until an operator kills it. With a deadline the engine ends with a reason, and a supervisor can start it again.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Protocol

import torch

from weft.errors import ConfigError
from weft.tensor import gpu

TESTED = {"torch": "2.13", "triton": "3.9"}
"""The pair of versions that the tests of this build ran with."""
OLDEST = (8, 0)
"""Compute capability of Ampere, the oldest for which the Triton kernels are compiled."""


def choose_device(requested: str) -> torch.device:
    """Return the device that ``requested`` (the value of ``--device``) names, with its number.

    Raises ConfigError for an unknown name, for a GPU that torch cannot use (with torch's reason), and for a number
    beyond the last GPU.
    """
    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    number = re.fullmatch(r"cuda(?::(\d+))?|auto", requested)
    if number is None:
        raise ConfigError(f"--device is {requested!r}; it may be auto, cpu, cuda or cuda:N", param="--device")
    why = _why_not()
    if why is not None:
        raise ConfigError(
            f"--device is {requested}, which torch {torch.__version__} cannot use: {why}; install "
            "a driver and a build of torch for CUDA, or use --device cpu",
            param="--device",
        )
    count, wanted = torch.cuda.device_count(), int(number[1] or 0)
    if number[1] is None:
        wanted = torch.cuda.current_device()
    if wanted >= count:
        raise ConfigError(
            f"--device is {requested}, and the last GPU of this machine is cuda:{count - 1}", param="--device"
        )
    use(torch.device("cuda", wanted))
    return torch.device("cuda", wanted)


HOST_MEMORY = frozenset({"cpu"})
"""Kinds of devices whose memory the host reads and writes directly."""


def is_remote(device: torch.device) -> bool:
    """Return whether the host reaches the memory of ``device`` only by copies."""
    return device.type not in HOST_MEMORY


def use(device: torch.device) -> None:
    """Make a GPU the current device of this thread; Triton launches there. Does nothing for a CPU, and for a
    GPU without a number, which is the current one already."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which ``device`` is the current GPU of this thread; the previous one is restored on exit."""
    # For calls on threads that weft did not start. Operators of torch take the device of their tensors;
    # Triton, graphs and pinned memory use the current device.
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _why_not() -> str | None:
    """Return why torch has no usable GPU, in its own words; None if it has one."""
    cuda: Any = torch.cuda
    try:
        cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).strip().split("\n")[0].rstrip(".")
    return None if torch.cuda.is_available() else "it sees no GPU"


def describe(device: torch.device) -> str:
    """Return the name of a device: ``cpu``, or ``cuda:0 (NVIDIA H100 80GB HBM3)``."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def kernels_in_words() -> str:
    """Return the kernels that a GPU runs, for the start-up line."""
    if not gpu.in_use():
        return "torch" if gpu.INSTALLED else "torch (Triton is not installed)"
    with contextlib.suppress(ImportError):  # no such distribution: some builds have another package name
        return f"Triton {version('triton')}"
    return "Triton"


def remarks(device: torch.device) -> list[str]:
    """Return warnings about a GPU for the user: features that will be slow, or were never tested."""
    if device.type != "cuda":
        return []
    said = []
    if not gpu.INSTALLED:
        said.append(
            "Triton is not installed, so the GPU runs torch's own operators, many times slower: "
            "pip install 'weft[gpu]'."
        )
    versions = {"torch": str(torch.__version__)}
    with contextlib.suppress(ImportError):  # no such distribution: some builds have another package name
        versions["triton"] = version("triton")
    others = [f"{name} {have}" for name, have in versions.items() if not have.startswith(f"{TESTED[name]}.")]
    if others:
        said.append(
            f"{' and '.join(others)}: the tests of this version of weft ran with torch "
            f"{TESTED['torch']} and Triton {TESTED['triton']} only."
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        said.append(
            f"{describe(device)} has compute capability {capability[0]}.{capability[1]}; the kernels "
            f"are made for {OLDEST[0]}.{OLDEST[1]} and newer."
        )
    return said


def multiplies_fp8(device: torch.device) -> bool:
    """Return whether torch multiplies fp8 by fp8 with a scale for 1 x 128 numbers: only on Hopper, by cuBLAS of CUDA
    12.9 and newer.
    """
    if device.type != "cuda" or not hasattr(torch.nn.functional, "scaled_mm"):
        return False
    release = [int(part) for part in (torch.version.cuda or "0.0").split(".")[:2]]
    return torch.cuda.get_device_capability(device) == (9, 0) and release >= [12, 9]


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability, None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, after torch returned its cached blocks."""
    # The driver counts other processes' memory; torch does not.
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


WATCH_S = 0.1
"""Seconds between two looks at the processes on which a wait depends."""
_watches: list[Callable[[], None]] = []


def watch_while_waiting(check: Callable[[], None]) -> Callable[[], None]:
    """Call ``check`` during waits for the device, until the returned function is called. ``check`` raises if a process
    that a collective waits for has ended: such a collective never ends, and in a graph it has no deadline.
    """
    _watches.append(check)

    def end() -> None:
        if check in _watches:
            _watches.remove(check)

    return end


WAIT_MAX_S = 300.0
"""Most seconds of a wait for the device: far longer than any step with its copies."""
_PAUSE_MIN_S = 20e-6
_PAUSE_MAX_S = 1e-3
_PAUSE_SHARE = 0.02


class DeviceEvent(Protocol):
    """Recorded event, such as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Return whether all work before it is done."""


class DeviceTimeoutError(RuntimeError):
    """Error of a device that did not finish in time."""


def recorded(device: torch.device, event: Any = None) -> Any:
    """Record ``event``, or a new one, after the present work of the current stream and return it; None without
    a GPU.
    """
    if device.type != "cuda":
        return None
    cuda: Any = torch.cuda
    event = event or cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(
    event: DeviceEvent,
    *,
    deadline_s: float = WAIT_MAX_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until ``event`` is done. Raises DeviceTimeoutError, the errors of ``query`` for a fault of the device, and
    those of ``watch_while_waiting``.
    """
    # Most waits are for work that is over.
    if event.query():
        return
    began_s = watched_s = clock()
    # The pause grows with the time waited: a wait is at most 2 % too long, or the 0.1 ms of a wake-up.
    while not event.query():
        waited_s = clock() - began_s
        if waited_s > deadline_s:
            raise DeviceTimeoutError(
                f"the GPU has not finished its work in {deadline_s:g} s: a kernel hangs, or the card is "
                "lost; the driver's log (dmesg) may say which"
            )
        if waited_s - (watched_s - began_s) > WATCH_S:
            watched_s = clock()
            for check in tuple(_watches):
                check()
        sleep(min(_PAUSE_MAX_S, max(_PAUSE_MIN_S, _PAUSE_SHARE * waited_s)))
