"""The demo as its user runs it: real processes, real agents, real signals.

KVRAIL_DEMO_BACKEND=UCX runs the same tests without our plugin."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BACKEND = os.environ.get("KVRAIL_DEMO_BACKEND", "RBLN")
SMALL = ("--tokens", "80")
LIMIT = 60
# A dial to a stopped process ends after 3 s by itself; the demo's own limit is what is tested.
LONG_DIAL = {"KVRAIL_CONNECT_TIMEOUT_MS": "60000"}
needs_kvrail = pytest.mark.skipif(BACKEND != "RBLN", reason="asks the plugin of this project")


class Demo:
    """A run in a process group of its own, marked so that its workers are found again."""

    def __init__(self, *flags, env=None, backend=BACKEND):
        self.mark = uuid.uuid4().hex
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvrail_demo", "--backend", backend, *flags],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={
                **os.environ, "PYTHONPATH": str(REPOSITORY / "bindings" / "python"),
                "KVRAIL_DEMO_MARK": self.mark, **(env or {}),
            },
        )

    def workers(self):
        """{role: process id} of the workers that run now."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or self.mark not in (entry / "environ").read_text():
                    continue
                words = (entry / "cmdline").read_text().split("\0")
                if "kvrail_demo.worker" in words:
                    found[words[words.index("kvrail_demo.worker") + 1]] = int(entry.name)
            except OSError:
                continue
        return found

    def catches(self, *signums):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = int(status.split("SigCgt:")[1].split()[0], 16)
        return all(caught >> (signum - 1) & 1 for signum in signums)

    def wait_for(self, text):
        """Reads standard error until a line has `text`."""
        seen = ""
        for line in self.process.stderr:
            seen += line
            if text in line:
                return seen
        raise AssertionError(f"never said {text!r}: {seen}")

    def end(self, limit=LIMIT):
        out, err = self.process.communicate(timeout=limit)
        assert "Traceback" not in err, err
        self.no_orphans()
        return self.process.returncode, out, err

    def no_orphans(self, limit=5):
        until = time.monotonic() + limit
        while self.workers():
            assert time.monotonic() < until, f"still running: {self.workers()}"
            time.sleep(0.05)


def with_code(folder, text):
    """The environment of a demo each of whose processes runs this as Python starts."""
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": f"{REPOSITORY / 'bindings' / 'python'}:{folder}"}


def run(*flags, **more):
    return Demo(*flags, **more).end()


def run_json(*flags, **more):
    code, out, err = run("--json", *flags, **more)
    assert out.count("\n") == 1, out
    return code, json.loads(out), err


@pytest.mark.parametrize("rails", [1, 3])
@pytest.mark.parametrize("direction", ["pull", "push"])
def test_a_kv_cache_moves_and_every_byte_is_right(direction, rails):
    flags = ("--direction", direction, "--rails", str(rails), "--seed", "5")
    code, report, err = run_json(*SMALL, *flags)
    assert code == 0 and report["ok"] is True and report["error"] is None, err
    assert report["bytes"] == 80 * (112 << 10) == report["check"]["compared"]
    assert report["descriptors"] == 28 * 5 >= report["merged_descriptors"] > 28
    assert report["seconds"] > 0 and report["gb_per_s"] > 0 and report["post_us"] > 0
    note = report["notification"]
    receiver, sender = ("prefill", "decode") if direction == "pull" else ("decode", "prefill")
    assert note["by"] == receiver and note["from"].startswith(sender)
    assert note["text"] == "cmpl-00000005:1"
    # pull: the sender's used blocks are freed; push: they must still be there.
    spare = report["blocks"]["decode"] - 5
    kept = report["blocks"]["prefill"] - (5 if direction == "pull" else 0)
    assert report["check"]["untouched"] == 28 * (spare + kept) * report["block_bytes"]
    if BACKEND == "RBLN":
        assert report["transport"] == "local"
        assert len(report["rails"]) == rails
        assert sum(rail["bytes"] for rail in report["rails"]) == report["bytes"]
        assert 0 < report["work_requests"] <= report["descriptors"]
        assert report["engine_post_us"] > 0
    else:
        assert report["rails"] is None and report["transport"] is None


def test_the_table_shows_what_was_asked_for():
    code, out, err = run(*SMALL, "--seed", "6")
    assert code == 0, err
    rows = {line.split("  ")[0] for line in out.splitlines()}
    assert rows >= {
        "model", "request", "path", "bytes", "descriptors", "work requests", "time",
        "time in post", "notification", "check", "seed",
    }
    assert "GB/s" in out and "cmpl-00000006:1" in out
    for phase in ("filling", "moving", "checking"):
        assert f"{phase:<9}[{'#' * 30}] 100%" in err
    assert "prefill got 'cmpl-00000006:1' from decode-" in err


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_a_wrong_block_is_found(direction):
    code, report, err = run_json(*SMALL, "--spoil", "--direction", direction)
    assert code == 1 and report["ok"] is False
    assert "bytes differ from block" in report["error"] and "decode: layer 0" in report["error"]
    assert "the check failed" in err


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_a_block_in_a_wrong_place_is_found_where_it_should_be_and_where_it_is(direction):
    code, report, _ = run_json(*SMALL, "--spoil", "target", "--direction", direction)
    assert code == 1
    assert "bytes differ from block" in report["error"]
    assert "bytes differ from its untouched pattern" in report["error"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--model", "llama-3.1-70b", "--tokens", "16"),
        ("--model", "llama-3.1-70b", "--tokens", "64", "--tp", "8", "--direction", "push"),
        ("--model", "llama-3.1-8b", "--tokens", "100", "--block-size", "64"),
        ("--tokens", "3", "--block-size", "1"),
        ("--tokens", "1"),
    ],
)
def test_other_shapes(flags):
    code, report, err = run_json(*flags)
    assert code == 0 and report["ok"], err


def test_a_registration_longer_than_one_notification_goes_in_parts():
    """12,000 block numbers are more than the 64 KiB that a notification carries."""
    flags = ("--tokens", "12000", "--block-size", "1", "--tp", "8", "--direction", "push")
    code, report, err = run_json(*flags)
    assert code == 0 and report["descriptors"] == 28 * 12000, err


def test_what_does_not_fit_is_refused_before_it_is_allocated():
    demo = Demo("--json", "--model", "llama-3.1-70b", "--tokens", "100000000")
    code, out, err = demo.end()
    assert code == 2 and json.loads(out)["ok"] is False
    assert "needs" in err and "GiB" in err and "use --tokens " in err
    assert time.monotonic() - demo.began < 10


@pytest.mark.parametrize(
    "flags, text",
    [
        (("--tokens", "0"), "--tokens is 0"),
        (("--tp", "3"), "--tp is 3"),
        (("--rails", "0"), "--rails is 0"),
        (("--timeout", "0"), "--timeout is 0.0, it must be more than 0 and at most 86400 seconds"),
        (("--timeout", "nan"), "--timeout is nan"),
        (("--timeout", "inf"), "--timeout is inf"),
        (("--timeout", "1e10"), "--timeout is 10000000000.0"),
        (("--timeout", "86400.1"), "--timeout is 86400.1"),
        (("--model", "gpt-2"), "'gpt-2'"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_a_bad_flag_is_refused_in_json_too(flags, text):
    code, report, err = run_json(*flags)
    assert code == 2 and text in report["error"] and text in err


@needs_kvrail
def test_the_engines_variables_count_where_no_flag_says_otherwise():
    env = {"KVRAIL_RAILS": "4", "KVRAIL_STRIPE_WIDTH": " 1 "}
    code, report, err = run_json(*SMALL, env=env)
    assert code == 0 and len(report["rails"]) == 4 and report["stripe_width"] == 1, err
    # One rail a transfer: the three others carry nothing.
    assert sorted(rail["bytes"] for rail in report["rails"])[:3] == [0, 0, 0]
    code, report, err = run_json(*SMALL, "--rails", "3", "--stripe-width", "0", env=env)
    assert code == 0 and len(report["rails"]) == 3 and report["stripe_width"] == 0, err
    code, report, err = run_json(*SMALL, env={"KVRAIL_RAILS": "1", "KVRAIL_STRIPE_WIDTH": ""})
    assert code == 0 and len(report["rails"]) == 1 and report["stripe_width"] == 1, err


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("KVRAIL_RAILS", "17", "1 to 16"),
        ("KVRAIL_RAILS", "0", "1 to 16"),
        ("KVRAIL_RAILS", "two", "1 to 16"),
        ("KVRAIL_RAILS", "9" * 5000, "1 to 16"),
        ("KVRAIL_STRIPE_WIDTH", "-1", "0 to 1"),
    ],
)
def test_a_bad_variable_is_refused_by_its_name(name, value, allowed):
    code, _, err = run(*SMALL, env={name: value})
    assert code == 2 and f"{name} is '{value}', it must be {allowed}, or not set" in err


@needs_kvrail
def test_what_kvrail_warns_of_is_shown_once_and_the_usual_line_is_not():
    code, out, err = run(*SMALL, "--json", env={"KVRAIL_STRIPEWIDTH": "0"})
    told = [line for line in err.splitlines() if line.startswith("kvrail:")]
    assert code == 0 and len(told) == 1, err
    assert told[0].startswith("kvrail: warn: ") and "did you mean KVRAIL_STRIPE_WIDTH?" in told[0]
    json.loads(out)


def test_a_missing_plugin_is_named(tmp_path):
    code, _, err = run(env={"NIXL_PLUGIN_DIR": str(tmp_path)}, backend="RBLN")
    assert code == 2
    assert str(tmp_path / "libplugin_RBLN.so") in err and "make demo" in err


def test_a_plugin_that_nixl_does_not_have_is_named():
    code, _, err = run(*SMALL, backend="NO_SUCH")
    assert code == 1 and "no plugin NO_SUCH" in err


@pytest.mark.parametrize("whom", ["group", "parent"])
def test_interrupted_in_the_middle(whom):
    demo = Demo("--json", "--hold", "30", *SMALL)
    demo.wait_for("filling")
    assert set(demo.workers()) == {"prefill", "decode"}
    interrupt(demo, whom)
    code, out, err = demo.end(15)
    assert code == 130 and "stopped by SIGINT" in err
    assert json.loads(out)["ok"] is False


def interrupt(demo, whom):
    pid = demo.process.pid
    os.killpg(pid, signal.SIGINT) if whom == "group" else os.kill(pid, signal.SIGINT)


@pytest.mark.parametrize("after", [0, 0.02, 0.05, 0.1, 0.3, 0.8, 1.6])
def test_interrupted_at_any_time(after):
    demo = Demo("--hold", "30", *SMALL)
    # Before this point Python itself is still starting: it answers SIGINT with a traceback.
    while not demo.catches(signal.SIGINT, signal.SIGHUP):
        time.sleep(0.001)
    time.sleep(after)
    interrupt(demo, "group")
    assert demo.end(15)[0] == 130


def test_an_interrupt_in_a_destructor_is_not_lost(tmp_path):
    """Python prints and drops what is raised there. The destructor runs at a worker's start."""
    env = with_code(
        tmp_path,
        "import os, signal, sys\n"
        "class Late:\n"
        "    def __del__(self): os.kill(os.getpid(), signal.SIGINT)\n"
        "def hook(event, _):\n"
        "    if event == 'subprocess.Popen': Late()\n"
        "if 'kvrail_demo' in sys.orig_argv: sys.addaudithook(hook)\n"
    )
    demo = Demo("--hold", "30", *SMALL, env=env)
    code, _, err = demo.end(15)
    assert code == 130 and "stopped by SIGINT" in err and "ignored" not in err


def test_more_interrupts_change_nothing():
    demo = Demo("--hold", "30", *SMALL)
    demo.wait_for("filling")
    while demo.process.poll() is None:
        interrupt(demo, "group")
        time.sleep(0.001)
    assert demo.end(15)[0] == 130


def test_an_interrupt_means_nothing_to_a_worker():
    """A terminal sends it to all three; what it means is the parent's to say."""
    demo = Demo("--hold", "1", *SMALL)
    demo.wait_for("filling")
    for pid in demo.workers().values():
        os.kill(pid, signal.SIGINT)
    assert demo.end()[0] == 0


def test_terminated():
    demo = Demo("--hold", "30", *SMALL)
    demo.wait_for("filling")
    demo.process.terminate()
    assert demo.end(15)[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_is_named_and_the_other_ends(role):
    demo = Demo("--json", "--hold", "30", *SMALL)
    demo.wait_for("filling")
    os.kill(demo.workers()[role], signal.SIGKILL)
    code, out, err = demo.end(15)
    assert code == 1 and f"{role} was killed by SIGKILL" in err
    assert json.loads(out)["error"].startswith(f"{role} was killed by SIGKILL")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_stopped_worker_ends_the_run_within_the_timeout_and_is_named(role):
    demo = Demo("--timeout", "3", "--hold", "1", *SMALL, env=LONG_DIAL)
    demo.wait_for("filling")
    began = time.monotonic()
    os.kill(demo.workers()[role], signal.SIGSTOP)
    code, _, err = demo.end(30)
    assert code == 1 and "no news from either process for 3.0 s: prefill in phase '" in err
    assert f"{role} in phase '" in err and err.count("', stopped by a signal") == 1
    assert f"{role} in" in err.split(", stopped by")[0].rsplit("', ", 1)[-1]
    assert "a larger --timeout" in err
    assert time.monotonic() - began > 3


@pytest.mark.parametrize("direction, slow", [("pull", "decode"), ("push", "prefill")])
def test_a_worker_waits_for_a_slow_one_as_long_as_that_one_moves(direction, slow, tmp_path):
    """Filling and checking take longer than the timeout, each step of them much less."""
    env = with_code(
        tmp_path,
        "import sys, time\n"
        f"if 'kvrail_demo.worker' in sys.orig_argv and '{slow}' in sys.orig_argv:\n"
        "    from kvrail_demo.pattern import DATA, Pattern\n"
        "    def slowly(call, at):\n"
        "        def wrapped(*args):\n"
        "            time.sleep(0.25 if at is None or args[at] == DATA else 0)\n"
        "            return call(*args)\n"
        "        return wrapped\n"
        "    Pattern.fill = slowly(Pattern.fill, None)\n"
        "    Pattern.compare = slowly(Pattern.compare, 3)\n"
    )
    demo = Demo("--timeout", "5", "--direction", direction, *SMALL, env=env)
    code, _, err = demo.end()
    assert code == 0, err
    assert time.monotonic() - demo.began > 2 * 28 * 0.25


def test_time_in_which_all_processes_are_stopped_does_not_count():
    """Ctrl-Z, and fg after longer than the timeout."""
    demo = Demo("--timeout", "2", "--hold", "1", *SMALL, env=LONG_DIAL)
    demo.wait_for("filling")
    os.killpg(demo.process.pid, signal.SIGSTOP)
    time.sleep(4)
    os.killpg(demo.process.pid, signal.SIGCONT)
    code, _, err = demo.end()
    assert code == 0, err


def test_the_workers_end_with_a_killed_parent():
    demo = Demo("--hold", "30", *SMALL)
    demo.wait_for("filling")
    demo.process.kill()
    demo.process.communicate()
    demo.no_orphans()
