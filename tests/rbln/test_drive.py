"""The cases of the drive: what CI runs of them stands for all combinations."""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "drive"))
import cases  # noqa: E402


def test_every_pair_of_values_is_in_a_case_of_ci():
    chosen = cases.choices()
    for (a, ours), (b, theirs) in itertools.combinations(cases.AXES.items(), 2):
        for pair in itertools.product(ours, theirs):
            if (a, b, pair) == ("areas", "replicas", (1, 2)):
                continue  # one area is one replica
            assert any((one[a], one[b]) == pair for one in chosen), f"{a} and {b}: {pair}"


def test_every_listed_case_is_possible():
    assert len(cases.listed(True)) > len(cases.listed(False)) > len(cases.SPECIAL)
    for case in [*cases.listed(False), *cases.listed(True)]:
        cases.full(case)


def test_slices_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match="slices 4 must divide areas 4 and the 2 heads of each of"):
        cases.full({"p_tp": 4})
    with pytest.raises(ValueError, match="slices 3 must divide areas 4 and the 8 heads"):
        cases.full({"slices": 3})
    with pytest.raises(ValueError, match="d_slices 0 must divide d_areas 2"):
        cases.full({"d_areas": 2})


def test_what_is_unknown_is_named():
    with pytest.raises(ValueError, match="direction 'pushh'; known: pull, push"):
        cases.full({"direction": "pushh"})
    with pytest.raises(ValueError, match="unknown key colour; known: direction, "):
        cases.full({"colour": 1})


def test_words_and_numbers_that_cannot_be_are_named():
    for case, wanted in (
            ({"cut": "twice", "rails": 2}, "cut 'twice'; known: between, during, mended"),
            ({"cut": "during", "rails": 1}, "cut 'during' takes at least 2 rails, not 1"),
            ({"fault": "slow"}, "fault 'slow'; known: late, "),
            ({"requests": 2, "window": 128}, "requests 2 must be 1 with stream or window"),
            ({"requests": 3, "rails": 2}, "requests 3: over NICs, at most rails 2")):
        with pytest.raises(ValueError, match=wanted):
            cases.full(case)


def test_every_fault_of_the_connector_is_seen_on_ucx_too():
    nightly = [case for case in cases.listed(True) if case.get("fault")]
    assert {case["fault"] for case in nightly} == set(cases.WORDS["fault"]) - {""}
    for case in cases.FAULTS:
        assert case in nightly and {**case, "backend": "UCX"} in nightly
