"""The cases of the drive. A case is a dictionary; what it leaves out has its default."""

from itertools import combinations, product

import layout

DEFAULTS = {
    "direction": "pull", "split": False, "areas": 4, "slices": 4, "layers": 2, "tokens": 2900,
    "step": 512, "order": "same", "extra": {}, "heartbeat": False,
    "beside": False,    # NIXL makes backend UCX first; else RBLN is the only one
    "buffer": "rbln",   # cpu: host bounce
    "window": 0,        # tokens of a sliding window: a second KV group over the same memory
    "kernel": 0,        # tokens of that group's kernel blocks; 0: as the window
    "stream": False,    # push_stream: what is computed leaves while the prefill goes on
    "consumers": 1, "p_tp": 1, "d_tp": 1, "p_pp": 1,
    "d_areas": 0, "d_slices": 0,  # of the consumers, where they differ
    "kill": "",         # producer, consumer: killed after a request, and back with its engine id;
                        # stopped: the producer falls silent, with its NICs, before it is killed
    "fault": "",        # of the connector, which must show: see FAULTS
    "links": "",        # down: the producer's network links go and come; exit: link_down_exit_s
    "rails": 0,         # over verbs, with so many NICs of the fake libibverbs on each side
    "nics": [],         # over verbs, with NICs of this machine: the producers' names and the
                        # consumers', each separated by commas
    "cut": "",          # between two transfers, during one: the link of a NIC that carried bytes
                        # goes down, then the request once more; mended: between, and up again
    "requests": 1,      # of each consumer, started before the first of them is done
    "mla": False,       # a model with one latent a token, of all heads, in place of K and V
    "limits": {},       # kvrail's times, where they are not those of wires.py
    "absent": False,    # no nixl_rbln
    "backend": "RBLN",  # UCX: the same without our plugin
    "lease": 60.0,      # seconds
    "error": "",        # what the connector must refuse the case with
    "spoil": "",        # order: blocks permuted; area: two areas swapped; replica: one not written;
                        # rail: the NIC that is cut off carried nothing
    "folder": "",
}
WORDS = {
    "kill": ("", "producer", "consumer", "stopped"), "links": ("", "down", "exit"),
    "cut": ("", "between", "during", "mended"), "backend": ("RBLN", "UCX"),
    "fault": ("", "late", "forgotten", "unanswered", "halves"),
    "spoil": ("", "order", "area", "replica", "rail"),
}
# Each combination of two values below is in at least one case.
AXES = {
    "direction": ("pull", "push"),
    "split": (False, True),
    "areas": (1, 2, 4, 8),
    "replicas": (1, 2),
    "moves": ("blocks", "chunks of 512", "chunks of 128", "window", "window of blocks"),
    "order": ("same", "reversed", "random"),
    "heartbeat": (False, True),
}
MOVES = {
    "blocks": {},
    "chunks of 512": {"extra": {"chunk_mode": True}, "step": 512, "tokens": 2400},
    "chunks of 128": {"extra": {"chunk_mode": True}, "step": 128, "tokens": 2400},
    # The window of the last 128 tokens begins in the block before.
    "window": {"extra": {"swa_window_mode": True}, "window": 128, "tokens": 2 * 1024 + 50},
    "window of blocks": {"extra": {"swa_window_mode": True}, "window": 256, "kernel": 1024},
}
# A rail over a link that is slow on purpose is not silent.
PATIENT, VERY_PATIENT = {"rail_timeout_ms": 2000}, {"rail_timeout_ms": 60000}
SPECIAL = [
    {"spoil": "order", "slices": 2},
    {"spoil": "area"},
    {"spoil": "replica", "slices": 2},
    {"buffer": "cpu", "order": "random"},
    {"buffer": "cpu", "direction": "push", "order": "reversed"},
    {"buffer": "cpu", "absent": True},
    {"absent": True, "error": "requires the 'nixl-rbln' adapter package"},
    {"consumers": 2, "slices": 2, "order": "random"},
    {"consumers": 2, "direction": "push", "order": "random"},
    {"kill": "producer"},
    {"kill": "producer", "heartbeat": True, "direction": "push"},
    {"direction": "push", "stream": True, "extra": {"push_stream": True}},
    {"direction": "push", "stream": True, "extra": {"push_stream": True, "chunk_mode": True},
     "tokens": 2400, "split": True},
    {"p_tp": 2, "d_tp": 1, "areas": 4, "slices": 4, "split": True},
    {"p_tp": 1, "d_tp": 2, "slices": 2},
    {"p_tp": 2, "d_tp": 1, "direction": "push", "slices": 2},
    {"p_pp": 2, "order": "random"},
    {"p_pp": 2, "direction": "push"},
    {"rails": 2, "slices": 2, "order": "random", "extra": {"stripe_width": 0}, "cut": "during",
     "limits": PATIENT},
    {"rails": 4, "direction": "push", "heartbeat": True, "cut": "between"},
    {"rails": 3, "direction": "push", "cut": "during", "limits": PATIENT},
    {"rails": 2, "cut": "between", "spoil": "rail"},
    {"rails": 1, "kill": "stopped", "limits": {"peer_timeout_ms": 1000}},
    {"rails": 3, "requests": 3, "tokens": 1024, "limits": VERY_PATIENT},
    {"mla": True, "order": "random", "slices": 2},
    {"rails": 1, "kill": "producer"},
    {"links": "down"},
    {"links": "exit", "extra": {"link_down_exit_s": 1}},
]
# What the published connector itself does wrong, over our plugin and on UCX
# (bindings/rbln/README.md). A case is red when its fault does not show.
FAULTS = [
    {"direction": "push", "fault": "late"},
    {"direction": "push", "kill": "consumer", "fault": "forgotten"},
    {"direction": "push", "kill": "producer", "fault": "unanswered"},
    {"buffer": "cpu", "p_tp": 2, "d_tp": 1, "fault": "halves"},
]
NIGHTLY = [
    *FAULTS, *({**case, "backend": "UCX"} for case in FAULTS),
    {"rails": 2, "direction": "push", "stream": True, "extra": {"push_stream": True}},
    {"rails": 3, "p_tp": 2, "consumers": 2, "cut": "between"},
    {"rails": 2, "buffer": "cpu", "order": "random", "cut": "between"},
    {"rails": 2, "cut": "mended", "extra": {"stripe_width": 0}},
    {"rails": 2, "direction": "push", "cut": "mended", "extra": {"stripe_width": 0}},
    {"rails": 4, "split": True, "areas": 8, "cut": "during", "limits": PATIENT},
    {"rails": 2, "buffer": "cpu", "order": "random", "cut": "during", "limits": PATIENT},
    {"rails": 2, "direction": "push", "cut": "between", "spoil": "rail"},
    {"rails": 3, "requests": 3, "direction": "push", "tokens": 1024, "limits": VERY_PATIENT},
    {"requests": 4, "order": "random", "tokens": 1500, "slices": 2},
    {"requests": 4, "order": "random", "tokens": 1500, "direction": "push", "heartbeat": True},
    {"requests": 3, "tokens": 1500, "extra": {"chunk_mode": True}, "consumers": 2},
    {"requests": 2, "buffer": "cpu", "tokens": 1500},
    {"mla": True, "direction": "push", "areas": 8, "slices": 8, "heartbeat": True},
    {"mla": True, "areas": 1, "slices": 1, "requests": 2, "order": "reversed", "beside": True},
    {"mla": True, "p_tp": 2, "d_tp": 2}, {"mla": True, "p_pp": 2, "direction": "push"},
    {"mla": True, "rails": 2, "cut": "between", "extra": {"stripe_width": 0}},
    {"mla": True, "extra": {"chunk_mode": True}, "tokens": 2400, "slices": 2,
     "error": "needs unreplicated chiplet areas that divide the block"},
    {"rails": 1, "kill": "stopped"},
    {"rails": 2, "kill": "stopped", "direction": "push", "heartbeat": True},
    {"rails": 2, "kill": "producer", "heartbeat": True, "extra": {"stripe_width": 0}},
    {"rails": 2, "p_pp": 2, "direction": "push", "areas": 8, "slices": 2, "cut": "between"},
    {"kill": "consumer"},
    {"kill": "producer", "beside": True},
    {"kill": "producer", "heartbeat": True},
    {"kill": "producer", "heartbeat": True, "beside": True},
    {"kill": "producer", "heartbeat": True, "direction": "push", "rails": 2},
    {"p_tp": 2, "d_tp": 4, "areas": 4, "slices": 2, "d_areas": 4, "d_slices": 2},
    {"p_tp": 4, "slices": 2, "d_tp": 1, "d_areas": 4, "d_slices": 4, "split": True},
    {"p_tp": 1, "d_tp": 2, "direction": "push", "areas": 4, "slices": 2, "split": True},
    {"p_tp": 1, "d_tp": 4, "direction": "push", "d_areas": 4, "d_slices": 2},
    {"p_tp": 8, "d_tp": 8, "split": True, "tokens": 2900},
    {"p_tp": 2, "d_tp": 2, "split": True, "direction": "push", "extra": {"chunk_mode": True},
     "tokens": 2400},
    {"p_pp": 2, "split": True, "extra": {"chunk_mode": True}, "tokens": 2400},
    {"p_pp": 2, "d_tp": 2, "slices": 2},
    {"direction": "push", "stream": True, "window": 128, "tokens": 2 * 1024 + 50,
     "extra": {"push_stream": True, "swa_window_mode": True, "chunk_mode": True}, "slices": 2},
    {"direction": "push", "stream": True, "step": 128, "tokens": 3000, "slices": 2,
     "extra": {"push_stream": True, "chunk_mode": True}},
    {"window": 128}, {"window": 128, "direction": "push"},
    {"buffer": "cpu", "direction": "push"},
    {"layers": 28, "tokens": 2900, "slices": 4}, {"tokens": 10000, "areas": 8, "slices": 4},
    {"tokens": 1}, {"tokens": 1024, "direction": "push"},
]


def made(choice):
    """The case that a choice of one value an axis stands for."""
    case = {name: choice[name] for name in ("direction", "split", "areas", "order", "heartbeat")}
    case["slices"] = max(1, case["areas"] // choice["replicas"])
    return {**case, **MOVES[choice["moves"]]}


def choices():
    """Choices such that any two values of two axes are together in one: the next one is always
    that with the most pairs that are still missing."""
    names = list(AXES)
    every = [dict(zip(names, values)) for values in product(*AXES.values())]
    every = [choice for choice in every if choice["areas"] >= choice["replicas"]]

    def pairs(choice):
        return {(a, choice[a], b, choice[b]) for a, b in combinations(names, 2)}

    missing = set().union(*map(pairs, every))
    chosen = []
    while missing:
        best = max(every, key=lambda choice: len(pairs(choice) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def pairwise():
    """The cases of these choices. Backend UCX costs as much as all the rest of a case."""
    return [{**made(choice), "beside": at % 5 == 0} for at, choice in enumerate(choices())]


def everything():
    """Each choice, but heartbeats and UCX beside only in turn."""
    names = list(AXES)
    lists = list(AXES.values())
    cases = []
    for at, values in enumerate(product(*lists[:-1])):
        choice = dict(zip(names, (*values, bool(at & 1))))
        if choice["areas"] >= choice["replicas"]:
            cases.append({**made(choice), "beside": at % 5 == 0})
    return cases


def listed(nightly):
    if nightly:
        return [*SPECIAL, *NIGHTLY, *everything()]
    return [*SPECIAL, *pairwise()]


def check_nics(case):
    """How many NICs of this machine a side has; only the fake ones can be slow, or come back."""
    nics = case["nics"]
    counts = {len(names.split(",")) for names in nics}
    if len(nics) != 2 or len(counts) != 1:
        raise ValueError(f"nics {nics!r} must be two lists of equally many names")
    for name, allowed in (("rails", (0,)), ("requests", (1,)), ("cut", ("", "between"))):
        if case[name] not in allowed:
            raise ValueError(f"{name} {case[name]!r} with nics; allowed: {allowed}")
    return counts.pop()


def full(case):
    """The case with its defaults; raises ValueError for what it cannot be."""
    unknown = set(case) - set(DEFAULTS)
    if unknown:
        raise ValueError(f"unknown key {', '.join(sorted(unknown))}; known: {', '.join(DEFAULTS)}")
    case = {**DEFAULTS, **case}
    known = {**{name: AXES[name] for name in ("direction", "order")}, **WORDS}
    for name, words in known.items():
        if case[name] not in words:
            raise ValueError(f"{name} {case[name]!r}; known: {', '.join(filter(None, words))}")
    if case["requests"] > 1 and (case["stream"] or case["window"]):
        raise ValueError(f"requests {case['requests']} must be 1 with stream or window")
    if case["rails"] and (case["requests"] > case["rails"] or
                          case["requests"] > 1 and case["consumers"] > 1):
        raise ValueError(f"requests {case['requests']}: over NICs, at most rails {case['rails']}, "
                         f"and consumers {case['consumers']} must be 1 then")
    rails = case["rails"]
    if case["nics"]:
        rails = check_nics(case)
    if case["cut"] and rails < 2:
        raise ValueError(f"cut {case['cut']!r} takes at least 2 rails, not {rails}")
    sides = [("p_tp", "areas", "slices"), ("d_tp", "areas", "slices")]
    if case["d_areas"]:
        sides[1] = ("d_tp", "d_areas", "d_slices")
    for ranks, areas, slices in sides:
        heads = 1 if case["mla"] else layout.HEADS // case[ranks]
        if case[slices] < 1 or case[areas] % case[slices] or heads > 1 and heads % case[slices]:
            raise ValueError(f"{slices} {case[slices]} must divide {areas} {case[areas]} and the "
                             f"{heads} heads of each of {ranks} {case[ranks]} ranks")
    return case
