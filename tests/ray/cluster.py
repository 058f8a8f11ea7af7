"""Replicas on a Ray cluster of three nodes: placed apart, moved when a node goes, scaled by queued work.

Run by tests/ray/run.sh. Each check prints a line; the exit code is 1 at the first that fails.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from tests.fleet.test_replicas import sung
from tests.server import running
from tests.server.running import RunningServer
from tests.server.scripted_engine import write_model_directory
from tests.support.child_path import child_path

START_S = 180.0
TOKENS = 400
QUEUED = 60


def replicas(server: RunningServer) -> list[dict[str, Any]]:
    answer = server.get("/v1/replicas")
    rows: list[dict[str, Any]] = answer.json()["data"] if answer.status_code == 200 else []
    return rows


def ready(server: RunningServer) -> int:
    return sum(row["state"] == "ready" for row in replicas(server))


def check(text: str, holds: Callable[[], bool], limit_s: float = START_S) -> None:
    began_s = time.monotonic()
    while not holds():
        if time.monotonic() - began_s > limit_s:
            raise SystemExit(f"FAILED: {text}")
        time.sleep(0.2)
    print(f"ok: {text} ({time.monotonic() - began_s:.1f} s)", flush=True)


def groups() -> list[dict[str, Any]]:
    """Placement groups that exist, with their nodes."""
    from ray.util import placement_group_table

    return [group for group in placement_group_table().values() if group["state"] == "CREATED"]


def nodes_in_use() -> set[str]:
    return {node for group in groups() for node in group["bundles_to_node_id"].values()}


def main() -> int:
    running.START_LIMIT_S = START_S
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = child_path()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    ray.init(address=cluster.address, namespace="weft", log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        # A model with a config.json: with --ray the server reads the tokenizer from its own directory.
        directory = write_model_directory(Path(folder))
        (directory / "config.json").write_text("{}")
        engine = {"model": str(directory), "max_num_seqs": 4}
        server = RunningServer(
            "tests.server.scripted_engine:build_paced",
            engine,
            {"ray": cluster.address, "replicas": "2..3"},
            "Ctrl-C finishes",
        )
        try:
            check("two replicas join", lambda: ready(server) == 2)
            check("Ray placed them on two nodes", lambda: len(nodes_in_use()) == 2)
            undisturbed = asyncio.run(sung(server, 4, max_tokens=TOKENS))
            lost = next(node for node in nodes if node.node_id in nodes_in_use())

            async def lose_a_node() -> list[str]:
                singing = asyncio.create_task(sung(server, 4, max_tokens=4 * TOKENS))
                await asyncio.sleep(0.5)
                await asyncio.to_thread(cluster.remove_node, lost, False)
                return await singing

            answers = asyncio.run(lose_a_node())
            check(
                "streams of the lost node went on with the same tokens",
                lambda: [text[: len(one)] for text, one in zip(answers, undisturbed, strict=True)] == undisturbed,
                0,
            )
            check("the replica is placed on another node", lambda: ready(server) == 2)
            check("on nodes that live", lambda: lost.node_id not in nodes_in_use() and len(groups()) == 2)
            cluster.add_node(num_cpus=1)

            async def queue_up() -> list[str]:
                singing = asyncio.create_task(sung(server, QUEUED, max_tokens=4 * TOKENS))
                await asyncio.to_thread(check, "a long queue brings a third replica", lambda: ready(server) == 3)
                return await singing

            queued = asyncio.run(queue_up())
            check("on a node of its own", lambda: len(nodes_in_use()) == 3, 0)
            check("the queue got the same tokens", lambda: queued[:4] == answers and len(queued) == QUEUED, 0)
        finally:
            server.interrupt()
            code = server.exit_code(30)
            check("an interrupt ends the server with code 0", lambda: code == 0, 0)
            check("Ray has its places back", lambda: not groups(), 60)
            server.stop()
            ray.shutdown()
            cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
