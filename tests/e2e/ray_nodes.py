"""A Ray cluster of several nodes on this machine, in a process of its own that does what its input says.

Lines in: ``add CPUS`` starts a node, ``remove`` kills the newest. A line out for each, the first with the
cluster's address. At the end of the input all nodes end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ray.cluster_utils import Cluster


def main(cpus: Sequence[str]) -> None:
    """Serve a cluster of nodes with so many CPUs each."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": int(cpus[0]), "include_dashboard": False}
    )
    try:
        nodes = [cluster.add_node(num_cpus=int(each)) for each in cpus[1:]]
        cluster.wait_for_nodes()
        print(cluster.address, flush=True)
        for line in sys.stdin:
            word, *given = line.split()
            if word == "add":
                nodes.append(cluster.add_node(num_cpus=int(given[0])))
            else:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            print(word, flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
