"""Which NICs become rails on this guest: the command, the C ABI and the NIXL plugin must agree.

usage: select_nics.py KVRAIL-COMMAND LIBKVRAIL.SO     (suite `select` of the lab runs it, with three
rails whose a ends are there: ra0, ra1, ra2)
The state of the guest is changed with ip(8), as an administrator would, and put back.
"""

import ctypes
import json
import os
import subprocess
import sys

KVRAIL, LIBRARY = sys.argv[1:3]
NONE = "no usable data-plane RoCE NIC on numa=-1"
BAD = 0  # verdicts that failed
VARIABLES = ("KVRAIL_NICS", "KVRAIL_TRANSPORT")


def shell(words):
    subprocess.run(words.split(), check=True)


def command():
    """Rails and words of `kvrail nics`."""
    run = subprocess.run([KVRAIL, "nics", "--json"], capture_output=True, text=True, check=False)
    found = json.loads(run.stdout)
    rails = [p["device"] for p in found["ports"] if p["verdict"] == "rail"]
    assert (run.returncode == 0) == bool(rails), f"exit status {run.returncode} with rails {rails}"
    words = [f"{p['device']}:{p['port']}: {p['reason']}" for p in found["ports"] if p["reason"]]
    if not rails:
        assert run.stderr.strip() == found["error"], "another error on standard error"
        words = run.stderr.strip().splitlines()
    return rails, words


class RailInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("index", ctypes.c_uint32),
        ("name", ctypes.c_char * 32),
        ("counters", ctypes.c_uint64 * 5),
    ]


class Library:
    """An engine through the C ABI, as far as its rails go."""

    def __init__(self):
        self.lib = ctypes.CDLL(LIBRARY)
        self.lib.kvr_last_error.restype = ctypes.c_size_t

    def error(self):
        text = ctypes.create_string_buffer(4096)
        self.lib.kvr_last_error(text, ctypes.c_size_t(4096))
        return text.value.decode()

    def rails(self):
        """Rails of a new engine, or [] and its error."""
        lib, config, engine = self.lib, ctypes.create_string_buffer(4096), ctypes.c_void_p()
        size = ctypes.c_size_t(len(config))
        assert lib.kvr_config_init(config, size) == 0, self.error()
        # Python's os.environ reaches getenv of this process.
        assert lib.kvr_config_env(config) == 0, self.error()
        if lib.kvr_engine_create(config, ctypes.byref(engine)) != 0:
            return [], self.error().splitlines()
        names, info = [], RailInfo(struct_size=ctypes.sizeof(RailInfo))
        while lib.kvr_rail_info_get(engine, len(names), ctypes.byref(info)) == 0:
            names.append(info.name.decode())
        assert lib.kvr_engine_destroy(engine) == 0, self.error()
        return [n.partition(":")[0] for n in names if n != "self"], []


AGENT = """
from rig import agent_of
agent = agent_of("chooser", params={})
print("made", flush=True)
"""


def plugin():
    """What an agent with backend RBLN says in a process of its own."""
    run = subprocess.run([sys.executable, "-c", AGENT], capture_output=True, text=True, check=False)
    return run.returncode == 0 and "made" in run.stdout, run.stdout + run.stderr


def check(what, want, reasons, env):
    """One verdict: rails `want`, and every one of `reasons` is said."""
    global BAD
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(env)
    try:
        rails, words = command()
        assert rails == want, f"kvrail nics has the rails {rails}, wanted {want}: {words}"
        for reason in reasons:
            assert any(reason in w for w in words), f"nothing says '{reason}': {words}"
        os.environ.setdefault("KVRAIL_TRANSPORT", "verbs")
        got, error = LIB.rails()
        assert got == want, f"the engine has the rails {got}, wanted {want}: {error}"
        if not want:
            error[0] = error[0].removeprefix("kvr_engine_create: ")
            assert error == words, f"the engine says {error}, the command {words}"
            assert words[0].startswith(NONE), f"the first line is '{words[0]}', not '{NONE}'"
            # Each port once, in order.
            assert [w.split(":")[0].strip() for w in words[1:]] == ["ra0", "ra1", "ra2"], words
    except Exception as e:
        print(f"lab: FAIL - {what}: {' / '.join(str(e).splitlines())[:400]}", flush=True)
        BAD += 1
        return []
    print(f"lab: ok - {what}: {','.join(rails) or 'none'}", flush=True)
    return words


def check_plugin(what, lines):
    """One verdict: an agent is made if `lines` is empty, else it says them."""
    global BAD
    made, said = plugin()
    missing = [line for line in lines if line.strip() not in said]
    good = made if not lines else not made and not missing
    if not good:
        print(f"made: {made}; not said: {missing}; it said:\n{said}")
        BAD += 1
    print(f"lab: {'ok' if good else 'FAIL'} - {what}", flush=True)


def main():
    check("all rails", ["ra0", "ra1", "ra2"], [], {})
    check_plugin("the plugin makes an agent", [])
    shell("ip route add default via 10.1.0.77 dev a0")
    check("the default route's NIC is no rail", ["ra1", "ra2"],
          ["ra0:1: default route: a0 holds"], {})
    check("KVRAIL_NICS names it all the same", ["ra0"], [], {"KVRAIL_NICS": "ra0"})
    check("KVRAIL_NICS, with ports", ["ra0", "ra2"], [], {"KVRAIL_NICS": "ra0:1,ra2/1"})
    shell("ip link set a1 down")
    check("a link that is down", ["ra2"], ["ra1:1: port not ACTIVE"], {})
    check("KVRAIL_NICS does not make it ACTIVE", ["ra2"], ["ra1:1: port not ACTIVE"],
          {"KVRAIL_NICS": "ra1,ra2"})
    shell("ip addr del 10.1.2.1/24 dev a2")
    words = check("no rail: one line for each port", [],
                  ["ra0:1: ", "ra1:1: port not ACTIVE", "ra2:1: no IPv4 address on a2"], {})
    check_plugin("the plugin says the same", words or ["nothing to compare with"])
    check("KVRAIL_NICS does not give it an address", ["ra0"], ["ra2:1: no IPv4 address"],
          {"KVRAIL_NICS": "ra2,ra0"})
    shell("ip addr add 10.1.2.1/24 dev a2")
    shell("ip link set a1 up")
    shell("ip route del default")
    check("put back", ["ra0", "ra1", "ra2"], [], {})
    return 1 if BAD else 0


if __name__ == "__main__":
    LIB = Library()
    sys.exit(main())
