"""What all engines need: the null NIC, a sysfs tree that fits it, device nodes, venvs, children."""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
RAILS = 4
COUNTERS = ("posts", "wrs", "signalled", "polls", "useful", "mallocs")  # nullnic/counters.h
OURS = ("KVRAIL_", "NIXL_", "UCX_", "MC_", "NULLNIC_", "FAKEVERBS_", "LD_PRELOAD", "PYTHON")


def commit():
    """The commit that is measured, with a `+` when the tree has changes; empty without git."""
    words = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


class Missing(Exception):
    """An engine cannot run on this machine; the text says why."""


class Failed(Exception):
    """An engine ran and something went wrong."""


def end_group(child):
    """Ends a child and all that it started; each child has a process group of its own."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5)
            break


def run(command, env, limit_s):
    """The standard output of a command that must succeed."""
    command = [str(part) for part in command]
    child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             stdin=subprocess.DEVNULL, text=True, start_new_session=True)
    try:
        out, err = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise Failed(f"{' '.join(command)} took more than {limit_s} s") from None
    finally:
        end_group(child)
    if child.returncode != 0:
        raise Failed(f"{' '.join(command)} ended with {child.returncode}:\n{out}{err}")
    return out


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def sysfs(root, name, devices):
    """The files below /sys and /proc that kvrail, UCX and Mooncake read of such devices. Device i
    is rail i % 4 of host i // 4 + 1, as nullnic/device.c has it."""
    classes, addresses = root / "sys/class", []
    (classes / "infiniband").mkdir(parents=True)
    for i in range(devices):
        pci = root / f"sys/devices/pci0000:00/0000:{i + 1:02x}:00.0"
        device, net = pci / f"infiniband/{name}{i}", f"nn{i}"
        port, ip = device / "ports/1", (10, 1, i % RAILS, i // RAILS + 1)
        for file, text in {"numa_node": 0, "vendor": "0xfa4e"}.items():
            put(pci / file, text)
        put(device / "node_type", "1: CA")
        for file, text in {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "lid": "0x0",
                           "link_layer": "Ethernet", "rate": "100 Gb/sec (4X EDR)"}.items():
            put(port / file, text)
        mapped = "0000:0000:0000:0000:0000:ffff:%02x%02x:%02x%02x" % ip
        for entry, gid in enumerate((f"fe80:0000:0000:0000:0200:0000:0000:{256 + i:04x}", mapped)):
            put(port / f"gids/{entry}", gid)
            put(port / f"gid_attrs/types/{entry}", "RoCE v2")
            put(port / f"gid_attrs/ndevs/{entry}", net)
        (device / "device").symlink_to(pci)
        (classes / "infiniband" / f"{name}{i}").symlink_to(device)
        put(classes / f"infiniband_verbs/uverbs{i}/ibdev", f"{name}{i}")
        put(classes / f"infiniband_verbs/uverbs{i}/abi_version", 1)
        for file, text in {"ifindex": 10 + 2 * i, "operstate": "up", "carrier": 1, "mtu": 4200,
                           "speed": 100_000, "type": 1, "flags": "0x1003"}.items():
            put(classes / "net" / net / file, text)
        (classes / "net" / net / "device").symlink_to(pci)
        addresses.append("%s %d.%d.%d.%d/24" % (net, *ip))
    put(root / "proc/net/kvrail_ipv4", "\n".join(addresses))
    put(root / "proc/net/route", "Iface\tDestination\tGateway\tFlags")
    put(root / "sys/devices/system/node/node0/cpulist", 0)


@contextlib.contextmanager
def device_nodes(count):
    """UCX and Mooncake look for /dev/infiniband/uverbsN: makes those that are not there (they are
    /dev/null under another name), and removes what it made."""
    folder, made = Path("/dev/infiniband"), []
    if count == 0:
        yield
        return
    try:
        try:
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
            for path in (folder / f"uverbs{i}" for i in range(count)):
                if not path.exists():
                    os.mknod(path, 0o666 | 0o020000, os.makedev(1, 3))
                    made.append(path)
        except PermissionError as error:
            raise Missing(f"{error.filename or folder} cannot be made: run it as root") from None
        yield
    finally:
        for path in reversed(made):
            path.rmdir() if path.is_dir() else path.unlink()


def cache():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrail-bench"


def venv(name, packages):
    """The Python of a venv with these packages (without their dependencies), made once in the
    cache folder; NIXL's and Mooncake's wheels bring libraries of the same names."""
    folder = cache() / f"{name}-{sys.version_info[0]}.{sys.version_info[1]}"
    python, stamp = folder / "bin/python", folder / "packages"
    if stamp.is_file() and stamp.read_text() == "\n".join(packages):
        return python
    print(f"bench: installing {', '.join(packages)} into {folder}", file=sys.stderr)
    try:
        run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], None, 120)
        run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps",
             *packages], None, 900)
    except (Failed, OSError) as error:
        last = str(error).strip().splitlines()[-1]
        raise Missing(f"{' '.join(packages)} cannot be installed: {last}") from None
    stamp.write_text("\n".join(packages))
    return python


class Rig:
    """The null NIC as it was built, and the environments to use it."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.nic = self.folder / "nic"
        run([HERE / "nullnic/build.sh", self.nic], None, 300)
        self.library = self.nic / "libibverbs.so.1"
        self.clean = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
        self.clean |= {"LD_BIND_NOW": "1", "OPENBLAS_NUM_THREADS": "1"}
        for name, devices in (("fake", 2 * RAILS), ("null", 2)):
            sysfs(self.folder / name, name, devices)
        # The names that benches/null/work.rs knows: fake0 to fake3, and fake4 to fake7 of a peer.
        self.kvrail = self.clean | {
            "NULLNIC_ROOT": str(self.folder / "fake"), "NULLNIC_NAME": "fake",
            "NULLNIC_DEVICES": str(2 * RAILS), "NULLNIC_ROCE": "1", "KVRAIL_LOG": "error",
            "KVRAIL_IBVERBS": str(self.library), "KVRAIL_SYSROOT": str(self.folder / "fake"),
        }
        self.peers = self.clean | {"NULLNIC_ROOT": str(self.folder / "null")}
        self.serial = 0

    def file(self, name):
        self.serial += 1
        return self.folder / f"{name}.{self.serial}"

    def counting(self, env, path):
        """The environment with counters, which cost time: not for runs that are timed."""
        before = env.get("LD_PRELOAD")
        preload = [str(self.nic / "libmallocs.so"), *([before] if before else [])]
        return env | {"NULLNIC_COUNTERS": str(path), "NULLNIC_MALLOCS": str(path),
                      "LD_PRELOAD": ":".join(preload)}


def counters(path):
    values = struct.unpack(f"={len(COUNTERS)}Q", path.read_bytes())
    return dict(zip(COUNTERS, values))


def callgrind(out, toggles):
    return ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--fair-sched=yes",
            *(f"--toggle-collect={name}" for name in toggles)]


def total(path):
    """All instructions in one file of callgrind's."""
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("totals:"):
            return int(line.split()[1])
    raise Failed(f"{path} has no line `totals:`: callgrind did not finish it")


class Child:
    """A worker (worker.py) that answers lines of JSON."""

    def __init__(self, command, env, log, limit_s=300):
        self.log = log
        self.limit_s = limit_s
        with open(log, "w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                [str(part) for part in command], env=env, stdin=subprocess.PIPE, text=True,
                stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
        try:
            self.read()
        except BaseException:  # a signal too: nobody else knows of the child yet
            end_group(self.process)
            raise

    def read(self):
        """The next answer. The worker is ended when none comes in time, and so is this."""
        with contextlib.suppress(ValueError):
            return json.loads(bounded_line(self.process, self.limit_s))
        tail = self.log.read_text(errors="replace").splitlines()[-12:]
        end_group(self.process)
        raise Failed("\n  ".join([f"{' '.join(map(str, self.process.args))} gave no answer:",
                                  *tail]))

    def ask(self, **what):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
        return self.read()

    def end(self):
        """Ended by itself if it can: callgrind and counters have to write."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        end_group(self.process)


def bounded_line(process, limit_s):
    """One line of the child's output; empty when it ended or the time is up."""
    timer = threading.Timer(limit_s, end_group, [process])
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()


def settled(pattern, count, limit_s=20):
    """The files OUT.1, OUT.2, ... that callgrind writes at marks, once `count` are there."""
    until = time.monotonic() + limit_s
    while True:
        files = sorted(pattern.parent.glob(pattern.name + ".*"), key=lambda f: int(f.suffix[1:]))
        if len(files) >= count or time.monotonic() > until:
            return files
        time.sleep(0.05)
