"""``python -m weft.fleet.ray_placer``: Ray chooses nodes for replicas and watches them.

    server --{"target": N}--> placer (a Ray driver) --placement group, actor--> node
                                                         actor --stdin--> weft.fleet.ray_member
                                                                             '== CURVE ==> server

The process that an actor starts joins as ``weft join`` does, so routing, tokens and resumption do not depend on Ray. A
placement group with one bundle for each replica keeps the ranks of a replica on one node. The placer is a process of
its own, since Ray brings threads, logs and signal handlers. The keys of the link pass through Ray: a Ray cluster runs
code of every client, so it must be trusted anyway.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

_LOOK_S = 0.5
_AGAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class PlacerOrder:
    """The first line on stdin. ``address``: the Ray cluster. ``server``: where members join, with "" for the
    host: this node's address in the cluster. ``token`` of the link; ``own``: options of the members. ``cpus``
    and ``gpus``: of one replica."""

    address: str
    server: str
    token: str
    own: dict[str, Any]
    cpus: float
    gpus: float


class MemberActor:
    """The actor on the node of a replica."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weft.fleet.ray_member"], stdin=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def watch(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        return self._process.wait()

    def leave(self) -> None:
        """Drain the replica: ``watch`` returns then."""
        self._process.terminate()


@dataclass(slots=True)
class Member:
    group: Any
    actor: Any
    watch: Any
    leaving: bool = False


class Placer:
    """The members of a fleet, placed by Ray. ``ray`` is the module: it is an extra of weft, which only ``main``
    imports."""

    def __init__(self, ray: Any, order: PlacerOrder) -> None:
        self._ray = ray
        self._order = order
        self._members: list[Member] = []

    def reconcile(self, target: int) -> None:
        """Compare members with the target once: replace members that ended, start or drain others."""
        for member in list(self._members):
            done, _ = self._ray.wait([member.watch], timeout=0)
            if done:
                self._ended(member)
        staying = [member for member in self._members if not member.leaving]
        for _ in range(len(staying), target):
            self._members.append(self._place())
        for member in staying[target:]:
            member.leaving = True
            placed, _ = self._ray.wait([member.group.ready()], timeout=0)
            if placed:
                member.actor.leave.remote()
            else:
                self._remove(member)

    def _place(self) -> Member:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        order = self._order
        resources = {"CPU": order.cpus, **({"GPU": order.gpus} if order.gpus else {})}
        group = placement_group([resources], strategy="STRICT_PACK")
        actor = (
            self._ray.remote(MemberActor)
            .options(
                num_cpus=order.cpus,
                num_gpus=order.gpus,
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group),
            )
            .remote({"server": order.server, "token": order.token, "own": order.own})
        )
        return Member(group, actor, actor.watch.remote())

    def _ended(self, member: Member) -> None:
        try:
            code = self._ray.get(member.watch)
            say(f"a member ended with code {code}")
        except self._ray.exceptions.RayError as error:
            say(f"a member is lost: {type(error).__name__}")
        self._remove(member)
        if not member.leaving:
            time.sleep(_AGAIN_S)

    def _remove(self, member: Member) -> None:
        """Remove a member, and free its placement group."""
        from ray.util.placement_group import remove_placement_group

        self._members.remove(member)
        self._ray.kill(member.actor)
        remove_placement_group(member.group)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    import ray

    order = PlacerOrder(**json.loads(sys.stdin.readline()))
    targets = [0]

    def read() -> None:
        for line in sys.stdin:
            targets.append(int(json.loads(line)["target"]))
        targets.append(-1)

    threading.Thread(target=read, daemon=True).start()
    ray.init(address=order.address, namespace="weft", log_to_driver=True, logging_level=logging.WARNING)
    host, _, port = order.server.rpartition(":")
    if not host:
        order = PlacerOrder(
            order.address, f"{ray.util.get_node_ip_address()}:{port}", order.token, order.own, order.cpus, order.gpus
        )
    say(f"connected to Ray at {order.address}; members join {order.server}")
    placer = Placer(ray, order)
    while targets[-1] >= 0:
        placer.reconcile(targets[-1])
        time.sleep(_LOOK_S)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
