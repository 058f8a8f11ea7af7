"""``--tp 2`` on a Ray cluster: the ranks of a replica are on one node, and a killed rank is replaced.

Run by tests/ray/run.sh. Nodes have one, two and two CPUs; a replica takes two, so the first gets none.
"""

from __future__ import annotations

import os
import signal
import sys

import psutil
import ray
from ray.cluster_utils import Cluster

from tests.fixtures.checkpoints import checkpoint
from tests.fleet.test_resume import resumes
from tests.ranks.test_server import ASKED, answer, rank_pids
from tests.ray.cluster import START_S, check, groups, nodes_in_use, ready
from tests.server import running
from tests.server.running import RunningServer
from tests.support.child_path import child_path


def ranks_on_this_machine() -> set[int]:
    """Of the actors of the cluster, whose nodes are all processes here."""
    return {
        child
        for process in psutil.process_iter(["cmdline"])
        if "weft.fleet.ray_member" in (process.info["cmdline"] or ())
        for child in rank_pids(process.pid)
    }


def main() -> int:
    running.START_LIMIT_S = START_S
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = child_path()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    small, *large = [cluster.add_node(num_cpus=cpus) for cpus in (1, 2, 2)]
    ray.init(address=cluster.address, namespace="weft", log_to_driver=False)
    engine = {
        "model": str(checkpoint("lfm2")),
        "memory": "32MB",
        "threads": 1,
        "max_model_len": 512,
        "tp": 2,
        "speculate": "off",
    }
    server = RunningServer("", engine, {"ray": cluster.address, "replicas": "2"}, "Ctrl-C finishes")
    try:
        check("two replicas of two ranks join", lambda: ready(server) == 2)
        check(
            "each on a node with room for both ranks",
            lambda: nodes_in_use() == {node.node_id for node in large} and len(groups()) == 2,
        )
        check("no rank is on the small node", lambda: small.node_id not in nodes_in_use(), 0)
        before = ranks_on_this_machine()
        check("each engine started one rank beside itself", lambda: len(before) == 2, 0)
        expected = answer(server)
        tokens, killed = list[int](), set[int]()
        for chunk in server.client().completions.create(**ASKED, stream=True):
            tokens += chunk.choices[0].token_ids or []
            for rank in before - killed:
                os.kill(rank, signal.SIGKILL)
                killed.add(rank)
        check("both ranks were killed in a stream, and it resumed", lambda: killed == before and resumes(server) > 0, 0)
        check("its tokens are those of an undisturbed run", lambda: tokens == expected, 0)
        check(
            "both replicas have ranks again",
            lambda: ready(server) == 2 and len(ranks_on_this_machine() - before) == 2,
            90,
        )
    finally:
        server.interrupt()
        code = server.exit_code(60)
        check("an interrupt ends the server with code 0", lambda: code == 0, 0)
        check("no rank is left", lambda: not ranks_on_this_machine(), 60)
        server.stop()
        ray.shutdown()
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
