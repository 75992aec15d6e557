"""Checks that the driver of `make test` tells red from green. Run by its part `driver`."""

import contextlib
import io
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kvtest import fuzz, loom, runner, script  # noqa: E402
from kvtest.runner import Count, Part  # noqa: E402

SH = "/bin/sh"


def quiet_run(parts, **options):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        results = runner.run_all(parts, **options)
        code = runner.report(results, 1.0)
    return code, results, out.getvalue()


def shell(text):
    return lambda part: runner.command(part, [SH, "-c", text])


class Parts(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.old = os.getcwd()
        os.chdir(self.folder.name)

    def tearDown(self):
        os.chdir(self.old)
        self.folder.cleanup()

    def test_all_parts_run_and_one_failure_fails_the_whole(self):
        parts = [Part("a", "", 9, shell("exit 3")), Part("b", "", 9, shell("true"))]
        code, results, text = quiet_run(parts)
        self.assertEqual(code, 1)
        self.assertEqual([r[1].passed for r in results], [0, 1])
        self.assertTrue(text.rstrip().endswith("1 passed, 1 failed, 0 skipped"))
        self.assertIn("exit code 3", text)

    def test_green_is_green(self):
        code, _, text = quiet_run([Part("a", "", 9, shell("true"))])
        self.assertEqual((code, text.splitlines()[-1]), (0, "1 passed, 0 failed, 0 skipped"))

    def test_a_part_that_ran_nothing_fails(self):
        code, results, _ = quiet_run([Part("a", "", 9, lambda part: Count())])
        self.assertEqual((code, results[0][1].notes), (1, ["nothing was run"]))
        self.assertEqual(quiet_run([])[0], 1)

    def test_a_skip_is_counted_with_its_reason_and_strict_refuses_it(self):
        def part():
            return Part("a", "", 9, shell("true"), [], lambda: "no such device")

        code, results, text = quiet_run([part(), Part("b", "", 9, shell("true"))])
        self.assertEqual((code, results[0][1].skipped), (0, 1))
        self.assertIn("a: SKIPPED, no such device", text)
        self.assertEqual(quiet_run([part()], strict=True)[0], 1)

    def test_a_missing_file_is_a_failure_and_no_skip(self):
        code, _, text = quiet_run([Part("a", "", 9, shell("true"), ["tests/none"])])
        self.assertEqual(code, 1)
        self.assertIn("tests/none: not in this checkout", text)

    def test_a_hang_ends_at_the_limit_and_leaves_no_process(self):
        child = "sleep 60 & echo $! > child; wait"
        started = time.monotonic()
        code, _, text = quiet_run([Part("a", "", 1, shell(child))])
        self.assertLess(time.monotonic() - started, 20)
        self.assertEqual(code, 1)
        self.assertIn("ran out of time", text)
        self.assertFalse(alive(int(Path("child").read_text())))

    def test_what_a_green_part_leaves_running_is_ended(self):
        code, _, _ = quiet_run([Part("a", "", 9, shell("sleep 60 & echo $! > child"))])
        self.assertEqual(code, 0)
        self.assertFalse(alive(int(Path("child").read_text())))

    def test_a_fault_of_the_driver_is_red(self):
        code, _, text = quiet_run([Part("a", "", 9, lambda part: 1 // 0)])
        self.assertEqual(code, 1)
        self.assertIn("ZeroDivisionError", text)

    def test_junit_counts(self):
        Path("r.xml").write_text(
            '<testsuites><testsuite><testcase classname="t" name="a"/>'
            '<testcase classname="t" name="b"><failure message="boom"/></testcase>'
            '<testcase classname="t" name="c"><error message="pop"/></testcase>'
            '<testcase classname="t" name="d"><skipped message="no gpu"/></testcase>'
            "</testsuite></testsuites>")
        count = runner.count_junit("r.xml")
        self.assertEqual((count.passed, count.failed, count.skipped), (1, 2, 1))
        self.assertIn("no gpu", count.notes[-1])


def alive(pid):
    """True while the process runs; an ended one that nobody has waited for does not count."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


class Cargo(unittest.TestCase):
    OK = "test a ... ok\ntest b ... ignored, needs root\n\ntest result: ok. 1 passed; 0 failed; " \
         "1 ignored; 0 measured; 0 filtered out; finished in 0.0s\n"

    def test_counts_and_names(self):
        count = runner.count_cargo(["cargo"], 0, self.OK * 2)
        self.assertEqual((count.passed, count.failed, count.skipped), (2, 0, 2))
        self.assertIn("b ignored: needs root", count.notes)
        red = self.OK + "test c ... FAILED\ntest result: FAILED. 0 passed; 1 failed; 0 ignored;\n"
        count = runner.count_cargo(["cargo"], 101, red)
        self.assertEqual((count.failed, count.notes[0]), (1, "c failed"))

    def test_no_test_a_build_error_and_a_hang_are_failures(self):
        none = self.OK.replace("1 passed", "0 passed")
        self.assertEqual(runner.count_cargo(["cargo"], 0, none).failed, 1)
        self.assertEqual(runner.count_cargo(["cargo"], 101, "error[E0433]\n").failed, 1)
        self.assertEqual(runner.count_cargo(["cargo"], None, self.OK).failed, 1)
        # One program's green summary does not hide that the next one did not end well.
        self.assertEqual(runner.count_cargo(["cargo"], 101, self.OK).failed, 1)


class Mutants(unittest.TestCase):
    M = loom.Mutant("weak", "loom_slot", "publish_is_seen")

    def test_table(self):
        table, errors = loom.parse("# head\nweak loom_slot publish_is_seen  # Release in post\n")
        self.assertEqual((table, errors), ([self.M], []))
        bad = "weak loom_slot\nweak a b\nok a b # r\nok a b # r\n"
        self.assertEqual(len(loom.parse(bad)[1]), 3)

    def test_code_and_table_must_agree(self):
        code = {"src/a.rs": 'if mutant("weak") {Relaxed} else {Release}'}
        self.assertEqual(loom.compare([self.M], code), [])
        self.assertEqual(len(loom.compare([], code)), 1)
        self.assertEqual(len(loom.compare([self.M], {})), 1)

    def test_only_a_refusal_by_the_named_model_counts(self):
        line = "test publish_is_seen ... "
        red = "test result: FAILED. 0 passed; 1 failed;\n"
        self.assertIsNone(loom.judge(self.M, 101, f"{line}FAILED\n{red}"))
        # Killed in mid-test: loom's panic inside a drop aborts.
        self.assertIsNone(loom.judge(self.M, 101, f"{line}thread panicked\nSIGABRT\n"))
        self.assertIn("SURVIVED", loom.judge(self.M, 0, f"{line}ok\ntest result: ok.\n"))
        self.assertIn("did not build", loom.judge(self.M, 101, "error: expected `;`\n"))
        self.assertIn("no such model", loom.judge(self.M, 0, "running 0 tests\ntest result: ok."))
        self.assertIn("in time", loom.judge(self.M, None, line))


class Fuzz(unittest.TestCase):
    def test_names_and_verdicts(self):
        bins = '[[bin]]\nname = "blob"\npath = "b"\n[[bin]]\nname="ops"\n'
        manifest = '[package]\nname = "x"\n' + bins
        self.assertEqual(fuzz.target_names(manifest), ["blob", "ops"])
        self.assertEqual(fuzz.judge("a", 0, "Done 5000 runs in 20 second(s)\n").passed, 1)
        self.assertEqual(fuzz.judge("a", 0, "Done 5 runs in 20 second(s)\n").failed, 1)
        self.assertEqual(fuzz.judge("a", 77, "Done 5000 runs in 20 second(s)\n").failed, 1)
        self.assertEqual(fuzz.judge("a", 0, "").failed, 1)
        self.assertIn(f"FUZZ_SEED={fuzz.SEED}", fuzz.judge("a", 77, "").notes[0])

    def test_a_short_run_starts_anew_and_a_long_one_goes_on(self):
        here = os.getcwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                for seconds, length in ((0, "-runs=500"), (9, "-max_total_time=9")):
                    fuzz.SECONDS = seconds
                    corpus = Path(fuzz.arguments("cabi")[-1])
                    (corpus / "found").touch()
                    again = fuzz.arguments("cabi")
                    self.assertIn(length, again)
                    self.assertIn(f"-seed={fuzz.SEED}", again)
                    self.assertEqual((corpus / "found").exists(), seconds > 0)
            finally:
                fuzz.SECONDS = 0
                os.chdir(here)


class Lab(unittest.TestCase):
    def test_its_closing_line_and_notes_count(self):
        text = "boot, 1 rails: 5\n\n  boot: FAIL - ra0\n5 passed, 1 failed, 2 skipped\n"
        count = script.judge(["x.sh"], 1, text)
        self.assertEqual((count.passed, count.failed, count.skipped), (5, 1, 2))
        self.assertEqual(count.notes, ["boot: FAIL - ra0"])
        self.assertEqual(script.judge(["x.sh"], 0, "3 passed, 0 failed, 1 skipped\n").passed, 3)

    def test_a_machine_that_cannot_is_a_skip(self):
        text = "  SKIPPED: the lab cannot run here: no apt\n0 passed, 0 failed, 1 skipped\n"
        count = script.judge(["x.sh"], 77, text)
        self.assertEqual((count.failed, count.skipped), (0, 1))
        self.assertIn("no apt", count.notes[0])

    def test_no_closing_line_no_verdict_and_a_hidden_failure_are_red(self):
        self.assertEqual(script.judge(["x.sh"], 0, "").failed, 1)
        self.assertEqual(script.judge(["x.sh"], None, "boot, 1 rails: 5 passed\n").failed, 1)
        self.assertEqual(script.judge(["x.sh"], 0, "0 passed, 0 failed, 2 skipped\n").failed, 1)
        self.assertEqual(script.judge(["x.sh"], 1, "4 passed, 0 failed, 0 skipped\n").failed, 1)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-q"])
