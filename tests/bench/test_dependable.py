"""Faults and soak in their short forms: a fault is made and judged, and a short run is watched and repeated."""

import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from tests.bench import soak
from tests.bench.curves import Panel, svg
from tests.bench.faults import __main__ as faults
from tests.bench.faults.cases import CASES, KINDS, QUICK, STEP, Case
from tests.bench.faults.inject import MOMENTS
from tests.bench.faults.trial import Bench, Verdict, said
from tests.bench.namespaces import refusal
from tests.bench.runs import SAME, cut_back, figures
from tests.bench.slopes import slope

needs_mounts = pytest.mark.skipif(refusal() is not None, reason=str(refusal()))


@needs_mounts
@pytest.mark.slow
def test_a_killed_rank_ends_the_run_with_a_message_and_it_goes_on(tmp_path):
    bench = Bench(tmp_path, forked=True)
    for case in QUICK[:1]:
        verdict = bench.try_(case)
        assert not verdict.wrong, (verdict, (tmp_path / case.folder / "told").read_text()[-3000:])
        assert verdict.resumed_from == STEP - 1 and verdict.seconds < case.limit_s
        told = faults.table([verdict], "here")
        assert "1 of 1 cases passed" in told and f"| {KINDS[case.kind]} | {case.where} |" in told


def test_every_kind_meets_every_moment_where_it_can_strike():
    assert len(CASES) >= 40 and len(set(CASES)) == len(CASES)
    assert {case.kind for case in CASES} == KINDS.keys() and {*QUICK} <= {*CASES}
    assert {case.fault["moment"] for case in CASES} == {*MOMENTS, "start"}


def test_a_run_cut_back_has_its_steps_up_to_a_checkpoint(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    for step in (2, 4):
        (run / "checkpoints" / f"step{step}").mkdir(parents=True)
        (run / "checkpoints" / f"step{step}" / "state").write_text(str(step))
    (run / "checkpoints" / "latest").write_text("step4")
    lines = [
        dict.fromkeys(SAME, 0.5) | {"step": step} | ({"eval_loss": 7.0} if step == 2 else {}) for step in (1, 2, 3, 4)
    ]
    whole = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(whole + '{"step": 5')
    assert [step["step"] for step in figures(run)] == [1, 2, 3, 4] and figures(other) == []
    assert [step["eval_loss"] for step in figures(run)] == [None, 7.0, None, None]
    cut_back(run, 2, other)
    assert figures(other) == figures(run)[:2]
    assert sorted(path.name for path in (other / "checkpoints").iterdir()) == ["latest", "step2"]
    assert (other / "checkpoints" / "latest").read_text() == "step2"
    assert (other / "checkpoints" / "step2" / "state").read_text() == "2"


HANG = (
    "train.py: rank 1: no rank has moved for 8 s (guard.timeout_s=8), so the run ends. At fault: rank 2 (pid 7 on h) "
    "is stopped (kill -CONT 7 would let it go on), last seen at #3 attend q (layer 1, forward, step 5); ranks 0 and 1 "
    "each wait{} at #4 recv kv from rank 2 (layer 1, forward, step 5) for 8 s. What to do: …\n"
)


@pytest.mark.parametrize(
    "told, codes, wrong",
    [
        (HANG.format("s"), [1], ()),
        (f"40%|### | 4/10 [00:15<00:22, loss=7.5]{HANG.format('s')}", [1], ()),
        (HANG.format("s"), [0], ("exit codes",)),
        (HANG.format("s") * 2, [1], ("2 messages",)),
        (HANG.replace("rank 2 (pid", "rank 3 (pid"), [1], ("no message",)),
        (f"Traceback\n{HANG.format('s')}", [1], ("a traceback",)),
        ("", [1], ("no message",)),
    ],
)
def test_what_a_run_says_is_judged(told, codes, wrong):
    _, found = said(Case("stop", "forward"), told, codes)
    assert len(found) == len(wrong) and all(part in one for one, part in zip(found, wrong))


def test_a_case_that_failed_says_so_in_the_table():
    verdict = Verdict(Case("disk", "writing"), None, "a | b", None, ("/dev/shm/x",), ("no message", "a traceback"))
    told = faults.table([verdict], "here")
    assert "0 of 1 cases passed" in told and "| a \\| b | no | 1 | no message; a traceback |" in told


@pytest.mark.slow
def test_a_short_soak_is_watched_verified_and_repeated(tmp_path):
    home = tmp_path / "soak"
    assert soak.main(["--quick", "--topology", "2x1", "--out", str(home)], tmp_path) == 0
    told = soak.Soak(home, soak.Size())
    assert told.plans()["used"] >= 4 and told.plans()["unverified"] == 0
    ranks = told.samples()
    assert len(ranks) == 2 and "store_keys" in ranks[0] and "store_keys" not in ranks[1]
    assert all({"own", "malloc", "blocks", "descriptors", "threads", "arena"} <= rank.keys() for rank in ranks)
    ElementTree.fromstring(soak.drawn(ranks))
    # A difference would be seen, and a plan that nobody has verified.
    metrics = home / "second" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": ', '"loss": 1', 1))
    (home / "first-seen" / "used-0.txt").open("a").write("0" * 16 + "\n")
    assert told.repeated()["differ"] == [1] and told.plans()["unverified"] == 1


STEPS = np.arange(0, 3000, 5)


@pytest.mark.parametrize("seed", range(4))
def test_growth_is_told_from_noise(seed):
    random = np.random.default_rng(seed)
    noise = random.normal(0, 2e5, len(STEPS)) + 3e5 * np.sin(STEPS / 90) + 5e6 * (random.random(len(STEPS)) < 0.02)
    flat = slope(STEPS, 4e8 + noise)
    assert not flat.grows(1e6) and flat.noise > 0
    leak = slope(STEPS, 4e8 + noise + 1000 * STEPS)
    assert leak.grows(1e6) and leak.per_step == pytest.approx(1000, abs=300) and leak.low < leak.per_step < leak.high
    assert not slope(STEPS, 4e8 + noise / 10 + 8e6 * (1 - np.exp(-STEPS / 500))).grows(2e6), "a cache that fills up"
    assert slope(STEPS, 30 + STEPS // 400).grows(0.5), "a descriptor now and then"
    assert not slope(STEPS, 30 + (STEPS > 1500)).grows(0.5), "one, once"


def test_too_few_samples_are_not_judged():
    assert slope(range(23), range(23)) is None and slope(range(24), range(24)).per_step == 1
    assert not slope(range(24), [7] * 24).grows(0)


def test_curves_are_drawn():
    lines = {"rank 0": ([1, 2, 3], [5.0, 5.0, 5.0]), "rank <1>": ([1, 2, 3], [1.0, 9.0, 4.0])}
    drawn = svg([Panel("a & b", lines, (2.0, "MiB")), Panel("none", {}), Panel("flat", {"x": ([1], [3])})], 2.0)
    root = ElementTree.fromstring(drawn)
    assert sum(one.tag.endswith("polyline") for one in root.iter()) == 3 and "4.5" in drawn
