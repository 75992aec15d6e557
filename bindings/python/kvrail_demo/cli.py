"""The parent: reads the flags, runs the two workers, checks and shows what they report."""

import argparse
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

from kvrail_demo import geometry, show, stats
from kvrail_demo.children import Child, ChildFailed, Children, Silent
from kvrail_demo.signals import Interrupted

ROLES = ("prefill", "decode")
OK, FAILED, REFUSED = 0, 1, 2
LONGEST_S = 86400


class Refused(Exception):
    """The run cannot start: a bad flag, no plugin, not enough memory."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(f"{message} (see --help)")


def parse(argv):
    parser = Parser(
        prog="kvrail_demo",
        description="Moves the KV cache of one request from a prefill to a decode process: two "
        "NIXL agents, backend RBLN. Every byte is checked. One rank of a tp group is moved.",
        epilog="Exit status: 0 moved and checked, 1 failed, 2 could not start, 128 + n ended by "
        "signal n. The engine's variables (KVRAIL_...) count in both processes, where no option "
        "says otherwise. KVRAIL_LOG or NIXL_LOG_LEVEL show what both processes log; without them "
        "only warnings and errors of kvrail are shown, at the end.",
    )
    add = parser.add_argument
    add("--model", choices=geometry.MODELS, default="qwen3-0.6b", help="default: %(default)s")
    add("--tokens", type=int, help="tokens of the request; default 4096 (70b: 1536)")
    add("--block-size", type=int, default=16, help="tokens in a block; default: %(default)s")
    add("--tp", type=int, default=1, help="tensor-parallel size; default: %(default)s")
    add("--direction", choices=("pull", "push"), default="pull",
        help="pull: decode READs; push: prefill WRITEs; default: %(default)s")
    add("--rails", type=int,
        help="rails of each side, 1 to 16; default: KVRAIL_RAILS, or 2 if it is not set")
    add("--stripe-width", type=int, choices=(0, 1),
        help="1: one rail a transfer; 0: every rail; default: KVRAIL_STRIPE_WIDTH, or if it is not "
        "set 0 with more than one rail")
    add("--seed", type=int, help="of patterns and block tables; default: a new one, shown")
    add("--json", action="store_true",
        help="print one JSON object and nothing else on standard output; progress goes to stderr")
    add("--spoil", nargs="?", choices=("source", "target"), const="source",
        help="take one block from (or put it in) a wrong place: the check must fail the run")
    add("--timeout", type=float, default=60.0,
        help="seconds without any progress that end the run, more than 0, at most 86400; default: "
        "%(default)s")
    add("--backend", default="RBLN", help=argparse.SUPPRESS)  # development: UCX
    add("--hold", type=float, default=0.0, help=argparse.SUPPRESS)  # tests: wait before the post
    args = parser.parse_args(argv)
    if args.rails is None:
        args.rails = variable("KVRAIL_RAILS", 1, 16, 2)
    if not 1 <= args.rails <= 16:
        raise Refused(f"--rails is {args.rails}, it must be 1 to 16")
    if not 0 < args.timeout <= LONGEST_S:  # nan is in no range
        raise Refused(
            f"--timeout is {args.timeout}, it must be more than 0 and at most {LONGEST_S} seconds"
        )
    if args.seed is None:
        args.seed = int.from_bytes(os.urandom(4), "little")
    if not 0 <= args.seed < 1 << 62:
        raise Refused(f"--seed is {args.seed}, it must be between 0 and {(1 << 62) - 1}")
    if args.stripe_width is None:
        args.stripe_width = variable("KVRAIL_STRIPE_WIDTH", 0, 1, 1 if args.rails == 1 else 0)
    return args


def variable(name, least, most, default):
    """The engine's variable, read as it does; the demo's default where that is not set."""
    text = os.environ.get(name, "")
    if not text:
        return default
    # More digits are out of range, and `int` refuses thousands of them in words of its own.
    digits = text.strip(" \t\r\n").lstrip("0")[:4] or "0"
    if not re.fullmatch(r"\s*[0-9]+\s*", text, re.ASCII) or not least <= int(digits) <= most:
        raise Refused(f"{name} is {text!r}, it must be {least} to {most}, or not set")
    return int(digits)


def environment(backend, folder, role):
    """What a worker gets: our package, the plugin's directory, a file for the figures."""
    env = dict(os.environ, KVRAIL_STATS=str(Path(folder, f"{role}.stats")))
    package = str(Path(__file__).resolve().parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (package, env.get("PYTHONPATH"))))
    if backend == "RBLN":
        env["NIXL_PLUGIN_DIR"] = str(plugin_dir())
    return env


def plugin_dir():
    named = os.environ.get("NIXL_PLUGIN_DIR")
    repository = Path(__file__).resolve().parents[3]
    return Path(named) if named else repository / "build" / "plugins"


def check_installed(backend):
    if importlib.util.find_spec("nixl") is None or importlib.util.find_spec("numpy") is None:
        raise Refused(
            f"{sys.executable} has no nixl or no numpy: run `make demo`, which makes its own "
            "virtual environment, or `pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1 numpy`"
        )
    plugin = plugin_dir() / "libplugin_RBLN.so"
    if backend == "RBLN" and not plugin.is_file():
        source = "NIXL_PLUGIN_DIR" if os.environ.get("NIXL_PLUGIN_DIR") else "its default place"
        raise Refused(f"{plugin} ({source}) does not exist: run `make demo`, which builds it")


def run(args, plan, bar):
    params = {}
    if args.backend == "RBLN":
        params = {"rails": str(args.rails), "stripe_width": str(args.stripe_width)}
    start = {
        "backend": args.backend, "params": params, "direction": args.direction, "seed": args.seed,
        "request": f"cmpl-{args.seed:08x}", "hold": args.hold, "spoil": args.spoil,
        "plan": plan.to_dict(),
    }

    def make(role, folder):
        return Child(role, folder, env=environment(args.backend, folder, role))

    initiator = "decode" if args.direction == "pull" else "prefill"
    results, hello = {}, {}
    with Children(ROLES, make) as children:
        for child in children.all.values():
            child.command("start", **start)
        figures = Path(children.folder.name, f"{initiator}.stats")
        for child, event in children.events(args.timeout):
            kind = event["event"]
            if kind == "progress":
                note = rails_now(figures, args.direction) if event["phase"] == "move" else ""
                bar.update(child.role, event["phase"], event["done"], event["total"], note)
            elif kind == "hello":
                hello[child.role] = event
                if len(hello) == 2:
                    # What vLLM's proxy and handshake tell decode. Prefill is told nothing.
                    children.all["decode"].command("peer", **hello["prefill"])
            elif kind == "notification":
                bar.say(f"{child.role} got '{event['text']}' from {event['from']}")
            elif kind == "result":
                results[child.role] = event
                if len(results) == 2:
                    bar.finish()
                    for each in children.all.values():
                        each.command("bye")
        children.exit_codes()
        for line in children.warnings():
            bar.say(line)
        return results, stats.read(figures)


def rails_now(path, direction):
    figures = stats.read(path)
    if figures is None:
        return ""
    rails = stats.rails(figures, direction)
    return " ".join(f"{rail['name']} {100 * rail['share']:.0f}%" for rail in rails)


def report(args, plan, results, figures):
    """One object with everything. `ok` is true only when each check held."""
    initiator = "decode" if args.direction == "pull" else "prefill"
    receiver = "prefill" if args.direction == "pull" else "decode"
    moved, note = results[initiator]["moved"], results[receiver]["notification"]
    errors = [
        f"{role}: {text}" for role in ROLES for text in results[role]["check"]["wrong"]
    ]
    rails = stats.rails(figures, args.direction) if figures else None
    if rails is not None and sum(rail["bytes"] for rail in rails) != plan.bytes:
        counted = sum(rail["bytes"] for rail in rails)
        errors.append(f"the rails count {counted} bytes, but the request has {plan.bytes}")
    counts = figures["transfers"] if figures else {}
    return {
        "ok": not errors, "error": "; ".join(errors) or None,
        "backend": args.backend, "transport": figures["transport"] if figures else None,
        "direction": args.direction, "stripe_width": args.stripe_width, "seed": args.seed,
        "model": plan.model, "layers": plan.layers, "kv_heads": plan.kv_heads,
        "head_dim": plan.head_dim, "tp": plan.tp, "tokens": plan.tokens,
        "block_size": plan.block_size, "block_bytes": plan.block_bytes,
        "blocks": {
            "used": plan.used, "prefill": plan.prefill_blocks, "decode": plan.decode_blocks,
        },
        "bytes": plan.bytes, "descriptors": plan.descriptors,
        "merged_descriptors": moved["merged"], "work_requests": counts.get("work_requests"),
        "seconds": moved["seconds"], "gb_per_s": plan.bytes / moved["seconds"] / 1e9,
        "post_us": moved["post_us"],
        "engine_post_us": counts["post_ns"] / 1e3 if "post_ns" in counts else None,
        "rails": rails,
        "notification": {"by": receiver, "from": note["from"], "text": note["text"]},
        "check": {
            "compared": sum(results[role]["check"]["compared"] for role in ROLES),
            "untouched": sum(results[role]["check"]["untouched"] for role in ROLES),
        },
    }


def main(argv):
    """Exit status 0: moved and checked; 1: failed; 2: could not start; 128 + n: signal n."""
    as_json = "--json" in argv
    bar = show.Bar()

    def fail(code, text):
        bar.finish()
        print(f"kvrail_demo: {text}", file=sys.stderr)
        if as_json:
            print(json.dumps({"ok": False, "error": text}))
        return code

    try:
        args = parse(argv)
        plan = geometry.make_plan(args.model, args.tokens, args.block_size, args.tp)
        geometry.check_memory(plan, geometry.available_bytes())
        check_installed(args.backend)
        outcome = report(args, plan, *run(args, plan, bar))
    except (Refused, ValueError, geometry.DoesNotFit) as error:
        return fail(REFUSED, str(error))
    except Silent as error:
        return fail(FAILED, f"{error}; a larger --timeout (up to {LONGEST_S}) waits longer")
    except ChildFailed as error:
        return fail(FAILED, str(error))
    except Interrupted as stop:
        return fail(stop.code, f"stopped by {stop}; both processes are ended")
    if as_json:
        print(json.dumps(outcome))
    if not outcome["ok"]:
        wrong = outcome["error"].replace("; ", "\n  ")
        print(f"kvrail_demo: the check failed (seed {args.seed}):\n  {wrong}", file=sys.stderr)
        return FAILED
    if not as_json:
        print(show.table(outcome))
    return OK
