"""`hsap doctor`: its page, and what it says of a machine where something is broken."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch

from hsap.cli import main
from hsap.doctor import devices, examine, kernels, links, report, system, versions
from hsap.doctor.config import check_config
from hsap.doctor.report import FAILED, OK, WARNING, Line, Report
from hsap.runtime.kernels.cpu_flash import CpuFlashKernel
from tests.parity import REPOSITORY

FEW = ("causal", "window:33")


@pytest.fixture
def few(monkeypatch):
    """Small cases, and links as two ranks would have measured them."""
    monkeypatch.setattr(kernels, "MASKS", FEW)
    monkeypatch.setattr(kernels, "LENGTHS", (37, 1, 60))
    pairs = [{"pairs": [[1 - rank, 1e-4, 1e-2, True]], "everybody_s": 1e-3} for rank in range(2)]
    monkeypatch.setattr(examine, "run_ranks", lambda ranks, *_, **__: pairs)


def page(capsys, *arguments):
    code = main(["doctor", "--device", "cpu", *arguments])
    return code, capsys.readouterr().out


def test_the_page_of_a_machine_that_is_fit(few, capsys, tmp_path):
    code, out = page(capsys, "--out", str(tmp_path))
    lines = out.splitlines()
    assert code == 0, out
    assert len(lines) < 50 and max(map(len, lines)) <= report.WIDTH
    for about in ("python", "torch", "numba", "gloo", "disk", "kernel cpu_flash fp32", "kernel math bf16", "P2P"):
        (line,) = [line for line in lines if line[8:].startswith(f"{about} ")]
        assert line.split()[0] in (OK, WARNING)
    code, out = page(capsys, "--out", str(tmp_path), "--json")
    told = json.loads(out)
    assert told["ok"] and {line["status"] for line in told["lines"]} <= {OK, WARNING}


def test_a_kernel_that_is_wrong_fails_and_is_named(few, capsys, monkeypatch):
    right = CpuFlashKernel.attend_grad

    def wrong(self, prepared, q, kv, do, lse, delta, dq, dkv, scale):
        right(self, prepared, q, kv, do, lse, delta, dq, dkv, scale)
        if q.dtype == torch.float32:
            dq[-1] += 1e-3

    monkeypatch.setattr(CpuFlashKernel, "attend_grad", wrong)
    code, out = page(capsys, "--json")
    failed = [line for line in json.loads(out)["lines"] if line["status"] == FAILED]
    assert code == 1 and [line["about"] for line in failed] == ["kernel cpu_flash fp32"], out
    assert "mask" in failed[0]["told"] and "kernel=" in failed[0]["told"]


@pytest.mark.parametrize("broken", ["raises", "nan"])
def test_a_kernel_that_raises_or_gives_nan_fails(broken, few, monkeypatch):
    def attend(self, prepared, q, kv, o, lse, scale):
        if broken == "raises":
            raise RuntimeError("no kernel image\nis available")
        o.fill_(math.nan)

    monkeypatch.setattr(CpuFlashKernel, "attend", attend)
    found = {line.about: line for line in kernels.try_kernels(torch.device("cpu"))}
    assert found["kernel cpu_flash fp32"].status == FAILED and found["kernel math fp32"].status == OK
    if broken == "raises":
        assert "RuntimeError: no kernel image is available" in found["kernel cpu_flash bf16"].told


@pytest.mark.slow
def test_ranks_talk():
    lines = examine._links("cpu", 2)
    assert [line.status for line in lines] == [OK, OK], lines
    assert "1 pair of ranks, every byte right" in lines[0].told and "2 ranks, 1 MiB to each" in lines[1].told


def test_ranks_that_can_t_talk_are_told_of(monkeypatch):
    def run_ranks(*_, **__):
        raise TimeoutError("ranks of a bench: not done after 120 s")

    monkeypatch.setattr(examine, "run_ranks", run_ranks)
    (line,) = examine._links("cpu", 2)
    assert line.status == FAILED and "not done after 120 s" in line.told and "NCCL_DEBUG" in line.told


@pytest.mark.parametrize("num_ranks", range(1, 10))
def test_every_rank_meets_each_other_once(num_ranks):
    met = [pair for pairs in links.rounds(num_ranks) for pair in pairs]
    assert sorted(met) == [(a, b) for a in range(num_ranks) for b in range(a + 1, num_ranks)]
    for pairs in links.rounds(num_ranks):
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)


def measured(num_ranks, slow=(), wrong=()):
    by_rank = []
    for rank in range(num_ranks):
        pairs = []
        for peer in range(num_ranks):
            if peer != rank:
                pair = (min(rank, peer), max(rank, peer))
                pairs.append([peer, 1e-5, 0.5 if pair in slow else 0.01, pair not in wrong])
        by_rank.append({"pairs": pairs, "everybody_s": 0.1})
    return by_rank


def test_links_are_judged_inside_nodes_and_between_them():
    inside, between, everybody = links.judge_links(measured(4), "cpu", 2)
    assert (inside.about, between.about) == ("P2P inside nodes", "P2P between nodes")
    assert "2 pairs" in inside.told and "4 pairs" in between.told and "0.03 GB/s" in everybody.told
    slow = links.judge_links(measured(4, slow=[(0, 3)]), "cpu", 4)[0]
    assert slow.status == WARNING and "slowest 0–3" in slow.told and "50.0 times slower" in slow.told
    wrong = links.judge_links(measured(4, wrong=[(1, 2)]), "cpu", 4)[0]
    assert wrong.status == FAILED and "ranks 1 and 2" in wrong.told
    assert links.judge_links(measured(1), "cpu", 1)[0].status == OK


def test_versions_are_judged_by_what_they_cost():
    found = versions.own_versions()
    assert found["torch"] and all(line.status != FAILED for line in versions.judge_versions(False, found))
    odd = {**found, "python": "3.9.1", "torch": "2.8.0+cu128", "numba": None, "flash-attn": None, "transformers": "5.9"}
    told = {line.about: line for line in versions.judge_versions(True, odd)}
    assert [told[name].status for name in ("python", "torch", "numba")] == [FAILED] * 3
    assert [told[name].status for name in ("flash-attn", "transformers")] == [WARNING] * 2
    assert "2.9 or later" in told["torch"].told and "hsap[flash]" in told["flash-attn"].told
    assert versions.judge_versions(False, odd)[-2].status == OK
    (same,) = versions.compare_versions([found, found])
    assert same.status == OK
    (other,) = versions.compare_versions([found, {**found, "torch": "2.12"}])
    assert other.status == FAILED and "rank 1" in other.told and "torch" in other.about


def test_little_room_is_told_of(monkeypatch, tmp_path):
    def free(num_bytes):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=num_bytes, total=1 << 40))
        return {line.about: line.status for line in system.check_system(str(tmp_path / "not" / "there"))}

    assert free(1 << 40)["disk"] == OK
    assert free(3 << 30)["disk"] == WARNING
    assert free(1 << 20)["disk"] == FAILED and free(1 << 20)["shared memory"] == WARNING
    file = tmp_path / "file"
    file.write_text("")
    assert system.disk(str(file)).status == FAILED
    monkeypatch.setattr(system.resource, "getrlimit", lambda _: (256, 1 << 20))
    (files,) = [line for line in system.check_system(str(tmp_path)) if line.about == "open files"]
    assert files.status == WARNING and "ulimit -n" in files.told


def test_gpus_that_torch_can_t_see_are_warned_of(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.describe_devices()[0].status == OK or torch.version.cuda
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert devices.describe_devices()[0].status == WARNING
    monkeypatch.setattr(devices.dist, "is_gloo_available", lambda: False)
    assert devices.describe_devices()[1].status == FAILED


def test_several_faults_of_a_configuration_are_told_at_once():
    faults = check_config(["topology=2x1", "optim.lr=-1", "train.steps=0", "planner=zigzga", "engine.device=cpu"])
    told = [line.told for line in faults]
    assert all(line.status == FAILED and "\n" not in line.told for line in faults) and len(told) == 3, told
    for what in ("optim.lr=-1", "train.steps=0", "zigzag"):
        assert sum(what in one for one in told) == 1
    assert [line.status for line in check_config([])] == [OK]
    for bad, what in (
        ("nosuch.key=1", "nosuch"),
        ("topology=2y1", "2y1"),
        ("--multirun", "name one configuration"),
    ):
        (line,) = check_config([bad])
        assert line.status == FAILED and what in line.told, line
    tokenizer = REPOSITORY / "datasets/demo/tokenizer.json"
    (fine,) = check_config(["topology=2x1", "engine.device=cpu", f"data.tokenizer={tokenizer}", "planner=sap"])
    assert fine.status == OK, fine


def test_ranks_lines_come_together_as_the_worst():
    good, bad = Line("disk", OK, "much"), Line("disk", FAILED, "none")
    assert report.together([[good], [bad]]) == (Line("disk", FAILED, "rank 1: none"),)
    assert report.together([[good], [good]]) == (good,)
    shown = str(Report("here", (Line("a", OK, "x " * 100), bad)))
    assert max(map(len, shown.splitlines())) <= report.WIDTH and shown.endswith("1 failed")


def test_flags_are_refused_in_one_paragraph(capsys):
    for arguments in (["--ranks", "0"], ["--device", "tpu"]):
        assert main(["doctor", *arguments]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
