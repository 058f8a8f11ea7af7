"""Diagnosis of a measured run: the limiting part, flags that would make it faster, and the distance from the machine's
ceilings.

    engine   least seconds at the ceilings, of prompts, of reading weights, of products    --> of_engine
    server   means of the clients' times, and of the queue if the server reports it               --> of_server

Both use only these figures. With a share below SHARE_OF_CEILINGS something other than weights and products takes the
time, so neither is named as the limit. Flags that the run already had are not proposed, and neither are defaults of a
server with unknown flags.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE_OF_CEILINGS = 0.25
LARGER = 1.2
"""Minimum speed-up of products of another dtype before its flag is suggested."""
CLIENT_BUSY = 0.8
"""Share of the time that a client works, or waits for a core, above which it reads events late."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    limit: str
    faster: str
    ceilings: str

    def rows(self) -> dict[str, str]:
        return {"limited by": self.limit, "faster with": self.faster, "ceilings": self.ceilings}


@dataclass(frozen=True, slots=True)
class LeastSeconds:
    """Least seconds at the ceilings: products of prompts; in decode steps, reading weights and computing products,
    which overlap."""

    prefill: float
    read: float
    products: float

    @property
    def decode(self) -> float:
        return max(self.read, self.products)

    @property
    def total(self) -> float:
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Figures of a run of the engine. ``byte_gain``: speed of byte products here, relative to products in the run's
    dtype; 1 if unknown. ``cpp_kernels``: True also if none are needed."""

    seconds: float
    least: LeastSeconds
    rows: float
    quantize: str = "none"
    speculates: bool = True
    threads: int = 1
    cores: int = 1
    cpp_kernels: bool = True
    byte_gain: float = 1.0


@dataclass(frozen=True, slots=True)
class ServerRun:
    """Mean seconds of a request; ``queued``: None if the server does not report it. ``at_once``: most open requests.
    ``here``: whether the server is on this machine. ``client_share``: share of the time in which this client worked or
    waited for a core."""

    ttft: float
    e2el: float
    at_once: int
    here: bool
    queued: float | None = None
    client_share: float = 0.0


def of_engine(run: EngineRun) -> Diagnosis:
    least, share = run.least, run.least.total / run.seconds
    reads = least.read >= least.products
    faster = []
    if share < SHARE_OF_CEILINGS and not run.cpp_kernels:
        limit = "kernels of torch, for the C++ kernels were not built"
    elif share < SHARE_OF_CEILINGS:
        limit = "work other than weights and products: attention, states, sampling, the steps themselves"
        faster = ["more requests at once, which share a step"]
    elif least.prefill >= least.decode:
        limit = "arithmetic, in the products of prompts"
        faster = [*_byte_products(run), "prompts that begin alike, with --prefix-cache"]
    elif reads:
        limit = (
            "one request at a time: each step reads all weights for one token"
            if run.rows < 2
            else "memory bandwidth: each step reads all weights"
        )
        faster = _less_reading(run)
    else:
        limit = "arithmetic, in the products of decode steps"
        faster = _byte_products(run)
    if run.threads < run.cores:
        faster.insert(0, f"--threads {run.cores}")
    if not run.cpp_kernels:
        faster.insert(0, "a C++ compiler, then weft installed again")
    times = (
        f"{100 * share:.0f} % of this machine's: at least {least.total:.3g} of {run.seconds:.3g} s "
        f"(prompts {least.prefill:.2g}, weights {least.read:.2g} or products {least.products:.2g})"
    )
    beyond = "; over 100 % where a step makes several tokens" if share > 1 else ""
    return Diagnosis(limit, "; ".join(faster) or "a faster device, or a smaller model", times + beyond)


def _byte_products(run: EngineRun) -> list[str]:
    return ["--quantize w8a8"] if run.byte_gain >= LARGER and run.quantize != "w8a8" else []


def _less_reading(run: EngineRun) -> list[str]:
    smaller = {"none": "int8", "int8": "int4", "w8a8": "int4"}.get(run.quantize)
    ways = [f"--quantize {smaller}"] if smaller else []
    balanced = int(run.rows * run.least.read / run.least.products) if run.least.products else 0
    if balanced > run.rows:
        ways.append(f"more requests at once, up to about {balanced}")
    return [*ways, *([] if run.speculates else ["--speculate auto"])]


def of_server(run: ServerRun) -> Diagnosis:
    """Return the diagnosis of a server. Proposed flags are the server's, except those of the load."""
    queued = run.queued or 0.0
    prefill, decode = max(0.0, run.ttft - queued), run.e2el - run.ttft
    of_all = f"of {run.e2el * 1e3:,.0f} ms a request"
    unknown = "" if run.queued is not None else "; the server does not tell its queue"
    if run.client_share > CLIENT_BUSY:
        limit = (
            f"this client: it had work for {100 * run.client_share:.0f} % of the time, so it may "
            "read tokens late, and the server may be faster than these figures"
        )
        faster = "several clients at once, each with a part of the load (--num-prompts, --max-concurrency)"
    elif queued > max(prefill, decode):
        limit = f"waiting in the queue, {queued * 1e3:,.0f} {of_all}"
        faster = "more --max-num-seqs or --memory; more replicas; fewer requests at once (--max-concurrency)"
    elif prefill > decode:
        limit = f"the time to the first token, {prefill * 1e3:,.0f} {of_all}{unknown}"
        faster = (
            "prompts that begin alike, with --prefix-cache; fewer requests at once (--max-concurrency); more --threads"
        )
    elif run.at_once < 2:
        limit = f"one request at a time: {decode * 1e3:,.0f} {of_all} are its decode steps"
        faster = "more requests at once (--max-concurrency); --quantize int8"
    else:
        limit = f"decode steps of {run.at_once} requests at once, {decode * 1e3:,.0f} {of_all}"
        faster = "--quantize int8; more --threads"
    ceilings = (
        "not compared: the server's model and threads are unknown here; `weft bench throughput` with "
        "its flags compares with this machine's"
        if run.here
        else "not compared: the server's machine is unknown"
    )
    return Diagnosis(limit, faster, ceilings)
