"""Limits: how long the links alone would take, in seconds. n ranks, each on its own host, S bytes, links of B bytes/s.

ring         2(n−1)/n · S/B     every link carries 2(n−1)/n of the data each way, whatever n; no all-reduce of whole
                                vectors needs less (Patarasuk and Yuan 2009). With several ranks per host that reduce
                                inside it first, n counts the hosts.
star         2(n−1) · S/B       the root's link takes n−1 vectors in, then gives n−1 out: it grows with n
push, pull   n·S / (k·B)        each way: n workers' S bytes cross the links of k servers, and S bytes a worker's own
"""

from __future__ import annotations


def ring_s(hosts: int, num_bytes: int, bits_per_s: int) -> float:
    return 2 * (hosts - 1) / hosts * num_bytes * 8 / bits_per_s


def star_s(hosts: int, num_bytes: int, bits_per_s: int) -> float:
    return 2 * (hosts - 1) * num_bytes * 8 / bits_per_s


def one_way_s(workers: int, servers: int, num_bytes: int, bits_per_s: int) -> float:
    """A push of all workers' gradients, or a pull. More servers than workers do not help: then workers' links limit."""
    return max(1.0, workers / servers) * num_bytes * 8 / bits_per_s
