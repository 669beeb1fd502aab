"""Texts of `hora explain` for the collectives, one story per schedule of collectives/schedule.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Story:
    """`rules` describes each phase; `steps` and the rest are for the summary. `uneven` replaces `share` if n is not a
    power of two."""

    title: str
    idea: str
    rules: dict[str, str]
    steps: str
    share: str
    root: str
    good: str
    cost: str
    uneven: str = ""


ALONE = (
    "With one rank there is nothing to send: its own vector is the sum of all. The same code runs, with no steps and "
    "no messages. Try it with 2 to 16 ranks."
)

REDUCE = (
    "Every rank has a vector, and one rank, the root, needs the sum. It can receive them one after the other, or the "
    "ranks can add up in pairs on the way, all pairs at the same time."
)

_REDUCE_UP = (
    "In its round k = 0, 1, 2, … the ranks with rank mod 2^(k+1) = 2^k send their whole vector to rank − 2^k, which "
    "adds it. The distance doubles each time."
)

STORIES: dict[str, Story] = {
    "ring": Story(
        title="ring all-reduce",
        idea="The vector is cut into as many chunks as there are ranks, and the chunks travel round a ring. Each rank "
        "adds its own numbers to a chunk and passes it on, until every chunk is complete on one rank. Then the "
        "complete chunks travel round once more, so that every rank has all of them.",
        rules={
            "scatter-reduce": "In its step i = 0, 1, 2, … rank j sends chunk (j − i) mod {n} to rank (j + 1) mod {n}, "
            "which adds it to its own. All links work at the same time. At the end rank j owns one complete chunk, "
            "number (j + 1) mod {n}.",
            "all-gather": "Nothing is added any more. In its step i rank j sends the complete chunk (j + 1 − i) mod "
            "{n} to rank (j + 1) mod {n}, which puts it in place of its own partial sum.",
        },
        steps="2(n − 1): n − 1 for the sums, n − 1 for the distribution",
        share="every rank sends 2(n − 1)/n of the data: less than twice its vector, for any number of ranks. No "
        "all-reduce by messages between ranks needs less.",
        root="none: all ranks send, receive and add the same amount, and only to and from their two neighbours.",
        good="large tensors, and links of equal speed.",
        cost="the number of steps grows with n, and each costs one latency: slow for small tensors. One slow link "
        "slows down all ranks.",
    ),
    "tree": Story(
        title="tree all-reduce",
        idea="In every round the ranks that still hold a sum pair up, and one of each pair sends its sum to the other, "
        "which halves their number, until rank 0 holds the sum of all. Then the result goes down the same tree.",
        rules={
            "reduce up": _REDUCE_UP,
            "broadcast down": "The same edges in the other direction, the last first: a rank that has the result sends "
            "it on.",
        },
        steps="2⌈log2 n⌉: ⌈log2 n⌉ up, ⌈log2 n⌉ down",
        share="a rank sends one whole vector up and one down to each of its children: 1 + children (the root only "
        "children), at most ⌈log2 n⌉. A leaf sends 1.",
        root="rank 0 receives, adds and sends back ⌈log2 n⌉ whole vectors, where a star's root has n − 1.",
        good="small tensors, where the number of steps is what counts.",
        cost="whole vectors in every step, and most ranks wait in each step: wasteful for large tensors.",
    ),
    "halving": Story(
        title="halving-doubling all-reduce",
        idea="In every round two ranks split the range that both work on: each keeps one half, adds what the other has "
        "there and sends the other half away, so the messages halve while the sums double. At the end each rank owns "
        "one complete chunk, and the same exchanges backwards distribute them.",
        rules={
            "fold in": "The exchanges need a power of two; the largest here is p = {p}. So of the first 2(n − p) = "
            "{folding} ranks every odd one sends its whole vector to the even one before it, and waits. The remaining "
            "ranks, {left}, get the numbers v = 0 … p − 1 in this order.",
            "halving": "In its round k = 0, 1, 2, … {who} v works with {who} v XOR {p}/2^(k+1): half of them away at "
            "first, the neighbour at last. The lower of the two keeps the lower half of their range, the upper one "
            "the upper half.",
            "doubling": "The same pairs backwards, neighbours first: both send all the complete chunks they own, so "
            "each owns twice as many after every round.",
            "fold out": "The ranks that were folded in get the whole result from their partner.",
        },
        steps="2⌈log2 n⌉: as many halvings as doublings, and one fold each way if n is not a power of two",
        share="every rank sends 2(n − 1)/n of the data, as in the ring: less than twice its vector.",
        uneven="with p the largest power of two below n, a rank that exchanges sends 2(p − 1)/p of the data; one that "
        "also folds for another sends a whole vector more, 2(p − 1)/p + 1, and a folded rank sends 1. The ring's "
        "2(n − 1)/n is reached only when n is a power of two.",
        root="none: all ranks that exchange do the same work.",
        good="medium tensors: the few steps of the tree with the little data of the ring, if n is a power of two.",
        cost="partners are far apart, so it needs a network where all pairs are equally near. When n is not a power "
        "of two, each fold costs a whole vector more.",
    ),
    "star": Story(
        title="star all-reduce",
        idea="Every rank sends its vector to rank 0, which adds them up and sends the result back. It is the simplest "
        "algorithm, and the baseline for the others.",
        rules={
            "reduce at the root": "Ranks 1, 2, 3, … send their whole vector; rank 0 receives them in this order, one "
            "at a time, so the order of summation is always the same.",
            "send back": "Rank 0 sends the result to each rank in turn.",
        },
        steps="2(n − 1): the root handles one vector at a time, n − 1 in and n − 1 out",
        share="every rank but the root sends its vector once; the root sends n − 1.",
        root="rank 0 receives n − 1 vectors, adds n − 1 and sends n − 1, while the others mostly wait: its cost grows "
        "with n.",
        good="a few ranks, tiny tensors, and as a baseline with one fixed order of summation.",
        cost="twice the ranks, twice the time.",
    ),
    "reduce-serial": Story(
        title="A. Serial: one after the other",
        idea="Every rank sends directly to the root, which receives and adds one vector at a time.",
        rules={"reduce at the root": "Ranks 1, 2, 3, … send their whole vector to rank 0, which adds it."},
        steps="n − 1",
        share="every rank but the root sends its vector once.",
        root="rank 0 receives and adds all n − 1 vectors itself.",
        good="a few ranks; it needs no coordination.",
        cost="the time grows with n, and all of it is spent at the root.",
    ),
    "reduce-tree": Story(
        title="B. Tree: all pairs at once",
        idea="Neighbours add up in pairs, then the receivers do the same, as in a tournament. Each round halves the "
        "number of ranks that still hold a sum.",
        rules={"reduce up": _REDUCE_UP},
        steps="⌈log2 n⌉",
        share="every rank but the root sends its vector once, as in the serial way.",
        root="rank 0 receives and adds only ⌈log2 n⌉ vectors; the other additions happen elsewhere at the same time.",
        good="any number of ranks; with two there is no difference.",
        cost="ranks in the middle must receive and add before they can send.",
    ),
}
