"""The benches run: what they measure is left to whoever starts them."""

import errno
import itertools
import json
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hsap
from hsap import clusters
from hsap.data.document import Sample
from hsap.data.packing import Packing
from hsap.data.store import DocumentStore
from hsap.ir.heads import HeadShape
from hsap.ir.problem import Topology
from hsap.ir.program import Op
from hsap.planners import AUTO, PLANNERS
from tests.bench import accuracy, gpu, gpu_model, gpu_rows, loader, namespaces, nodes, packing, train
from tests.bench.attention import __main__ as attention
from tests.bench.attention import cases as attention_cases
from tests.bench.attention import interpreter
from tests.bench.packs import KINDS, pack, scaled
from tests.bench.planning import __main__ as planning
from tests.bench.planning import passes, tables
from tests.bench.planning.cases import BYTES, HEADS, MASKS, MORE_HEADS, SECTIONS, WORKLOADS, Case, cases, measure, peers
from tests.bench.record import caption, conditions, record
from tests.parity import REPOSITORY

SMALL = Case("planners", "small", ((40, 7, 90), (100,)), Topology(2, 2))


@pytest.mark.parametrize("planner", [*PLANNERS, AUTO])
def test_every_planner_has_a_line(planner):
    line = measure(SMALL, planner, 1)
    assert line["planner"] == planner and line["batches"] == 2 and line["tokens"] >= 1 and line["plan_ms"] > 0
    assert line["forward"].keys() == line["backward"].keys() == {*BYTES, "predicted_s"}
    assert len(tables.cells(line)) == len(tables.TITLES)


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_s_passes_are_timed(planner):
    timed = passes.row(planner, "small", next(SMALL.problems()), 1).split()
    assert timed[:3] == [planner, "small", "2x2"] and len(timed) == len(passes.HEADER.split())


def test_packing_is_measured(capsys):
    line = packing.row("ultrachat", 4096, 200)
    assert line["pack_tokens"] == 4096 and line["fill"] > 0.99 and line["balanced_steps"] > 100
    assert 1 <= line["spread"] < 1.05 < line["best_fit_spread"]
    assert capsys.readouterr().out.split()[:2] == ["ultrachat", "4096"]
    assert packing.speed("concat", 100)["documents"] == 100


def test_the_loader_is_measured(capsys):
    store = DocumentStore.from_samples(Sample(str(i), np.arange(20 + i, dtype=np.int32)) for i in range(9))
    made = loader.Stream("demo", store, Packing(64))
    line = loader.alone(made, "ring", loader.QUICK, 1, {"ring": 10.0})
    assert all(line[stage] > 0 for stage in ("pack", "batch", "plan")) and line["over"] == line["all"] / 10 > 0
    assert line["packs"] == loader.QUICK.packs and capsys.readouterr().out.split()[:2] == ["demo", "ring"]


def test_lines_are_means_over_batches():
    both = measure(SMALL, "ring", 1)
    each = [measure(Case("planners", "small", (batch,), Topology(2, 2)), "ring", 1) for batch in SMALL.batches]
    for key in BYTES:
        assert both["forward"][key] == sum(line["forward"][key] for line in each) / 2
    assert both["area"] == sum(line["area"] for line in each) / 2


def test_lines_name_the_shape_or_the_planner_that_was_chosen():
    assert tables.name(measure(SMALL, "auto:candidates=ring", 1)) == "auto:candidates=ring: ring"
    wide = Case("planners", "small", ((400,),), Topology(4, 1))
    assert tables.name(measure(wide, "usp:heads=2", 1)) == "usp:heads=2 as 2x2"
    assert tables.name(measure(wide, "ring", 1)) == "ring"


def test_what_a_planner_refuses_is_said():
    line = measure(SMALL, "sap:balance=mood", 1)
    assert "balance" in line["refused"] and "balance" in tables.text(line, 20)
    assert "balance" in tables.markdown("", [("case", line)])


def test_cases_are_those_of_the_peers():
    by_case = {(c.workload, c.topology.inter_sp): c for c in cases("planners", list(WORKLOADS), (16, 32, 64))}
    assert len(by_case) == 12
    counts = {key: len(case.batches) for key, case in by_case.items()}
    assert [counts["ldc@131072", r] for r in (16, 32, 64)] == [2, 3, 2]
    assert counts["single@131072", 32] == counts["ldc@524288", 64] == 1
    (dcp, *_) = peers(by_case["ldc@131072", 32])
    assert dcp["planner"] == "(dcp_pad)" and dcp["forward"]["bytes_total"] == 324 * 2**20
    assert not peers(by_case["single@131072", 64])


def test_other_sections_say_topology_heads_and_masks():
    assert [str(c.topology) for c in cases("topologies", ["ldc@131072"], (32,))] == ["16x2", "4x8"]
    assert [c.kv_replication for c in cases("topologies", ["ldc@131072"], (32,))] == [1, 4]
    assert [c.mask for c in cases("masks", list(WORKLOADS), (16, 32, 64))] == [*MASKS] * 2
    assert cases("heads", ["ldc@131072"], (16,))[0].heads.num_kv_heads == 8


def test_the_whole_bench_prints_and_keeps_its_lines(capsys, tmp_path):
    kept, document = tmp_path / "a.json", tmp_path / "a.md"
    asked = "--planner ring --workload single@131072 --ranks 32 --section planners passes"
    planning.main([*asked.split(), "--json", str(kept), "--markdown", str(document)])
    out = capsys.readouterr().out
    lines = json.loads(kept.read_text(encoding="utf-8"))["lines"]
    assert [line["planner"] for line in lines[:2]] == ["ring", "(dcp_pad)"]
    # KV of 128 MiB: 31 hops in all; every rank receives 31 / 32 of it; 4 nodes each lack 3 / 4 of it.
    figures = {"bytes_total": 31 * 128, "max_recv_bytes_per_rank": 124, "bytes_internode_once_per_node": 3 * 128}
    assert {key: lines[0]["forward"][key] / 2**20 for key in figures} == figures
    for words in ("single@131072", "(dcp_pad)", "3968.0"):
        assert words in out and words in document.read_text(encoding="utf-8")


def test_each_section_changes_one_thing():
    made = {section: cases(section, ["ldc@131072"], (16, 32)) for section in SECTIONS}
    found = {
        section: [(str(case.topology), case.heads, case.mask) for case in several] for section, several in made.items()
    }
    assert found == {
        "planners": [("16x1", HEADS, "causal"), ("32x1", HEADS, "causal")],
        "topologies": [(shape, HEADS, "causal") for shape in ("8x2", "2x8", "16x2", "4x8")],
        "heads": [("16x1", MORE_HEADS, "causal"), ("32x1", MORE_HEADS, "causal")],
        "masks": [("32x1", HEADS, mask) for mask in MASKS],
    }
    for section, several in made.items():
        assert all(case.section == section and case.workload == "ldc@131072" for case in several)
        assert all([*map(list, case.batches)] == WORKLOADS["ldc@131072"][: len(case.batches)] for case in several)
        assert {problem.layout.num_tokens for case in several for problem in case.problems()} == {131072}


def test_the_accuracy_bench_measures_every_tensor():
    errors = accuracy.measured(accuracy.hsap.Topology(2, 1), "sap", "fp32", "native", "fp32")
    assert len(errors) == len(accuracy.TENSORS) and (errors > 0).all() and errors.max() < 1e-5


def test_a_record_is_a_dated_line_with_machine_and_versions(tmp_path):
    path = record("some", {"wall_s": 1.5}, folder=tmp_path)
    assert record("some", {"wall_s": 2.5}, found=conditions(), folder=tmp_path) == path == tmp_path / "some.jsonl"
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    assert [line["figures"]["wall_s"] for line in lines] == [1.5, 2.5]
    for line in lines:
        assert (
            datetime.fromisoformat(line["date"]).tzinfo and line["machine"]["cores"] >= 1 and line["versions"]["numpy"]
        )
        assert str(line["machine"]["cores"]) in caption(line, ranks=8) and "ranks 8" in caption(line, ranks=8)
    with pytest.raises(ValueError, match="JSON"):
        record("some", {"wall_s": float("nan")}, folder=tmp_path)


@pytest.mark.slow
def test_the_attention_bench_compares_with_one_process_and_with_others(capsys):
    case = attention_cases.Case("one", (512,))
    lines = attention.measure(case, 2, ["deepspeed", "context_parallel", "sap", "basp:mood=1"], 2)
    assert [line["method"] for line in lines] == ["deepspeed", "context_parallel", "sap", "basp:mood=1"]
    for line in lines[:3]:
        assert line["max_error"] < 1e-5 and line["cpu_s"] > 0 and line["wall_s"] > 0 and line["ratio"] > 0
    assert "sharding strategy" in lines[1]["refusal"] and "refusal" not in lines[2]
    assert lines[2]["us_per_instruction"] > 0 and {"kernel", "launch", "wait"} <= lines[2]["parts_s"].keys()
    assert "mood" in lines[3]["refused"] and "mood" in capsys.readouterr().out


def test_the_interpreter_is_measured_with_nothing_to_compute(monkeypatch):
    """A clock goes on by 1 ms when it is read: so long takes a run of a rank and direction, and so does each step."""
    plan = hsap.compile(attention_cases.QUICK[0].problem(4), "sap")
    small = interpreter.miniature(plan)
    assert small.num_ranks == plan.num_ranks == 4 and small.planner == "sap"
    assert small.problem.layout.num_tokens == interpreter.SMALL_TOKENS
    ticks = itertools.count()
    monkeypatch.setattr(interpreter, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * 1e-3))
    found = interpreter.dispatch(plan, 3)
    assert found.instructions == small.num_instructions
    assert found.us_per_instruction == pytest.approx(4 * 2 * 1e3 / small.num_instructions)
    ops = {Op(op).name.lower() for pair in small.programs for programs in pair for op in programs.op}
    assert {"attend", "attend_grad", "launch", "wait", "copy", "merge", "sum"} <= ops
    # A round's messages are joined to its launch, and accumulators are emptied before they are used.
    assert found.us_by_step.keys() == {"empty", *ops} - {"send", "recv"}
    assert [*found.us_by_step.values()] == pytest.approx([1e3] * len(found.us_by_step))


def test_scaled_packs_keep_their_documents_shares():
    assert scaled((30, 10, 0, 1), 41) == (30, 10, 1) and scaled((30, 10), 8) == (6, 2)
    for kind in KINDS:
        assert sum(pack(kind, 1000, batch=3)) == 1000


NO_NODES = namespaces.refusal()
needs_nodes = pytest.mark.skipif(NO_NODES is not None, reason=str(NO_NODES))


@needs_nodes
def test_nodes_are_shaped_both_ways_and_gone_when_asked():
    with namespaces.nodes(2, 2, 1e6) as made:
        assert [place.namespace for place in made.inside] == [f"/proc/{made.holders[i]}/ns/net" for i in (0, 0, 1, 1)]
        assert made.inside[0].cores == made.inside[1].cores and len(made.inside[0].cores) == max(made.cores, 1)
        for where, port in ((made.holders[1], namespaces.PORT), (made.holders[2], "port1")):
            shaped = subprocess.run(
                ["nsenter", f"--net=/proc/{where}/ns/net", "tc", "qdisc", "show", "dev", port],
                capture_output=True,
                text=True,
                check=True,
            )
            assert "tbf" in shaped.stdout and "rate 8Mbit" in shaped.stdout
        assert reaches(made)
        made.cut(1)
        assert not reaches(made)
        made.mend(1)
        assert reaches(made)
    assert not any(Path(f"/proc/{holder}").exists() for holder in made.holders)


def test_nodes_have_equally_many_cores():
    assert [namespaces.part_of_cores(i, 2, (0, 1, 2, 3, 7)) for i in range(2)] == [(0, 1), (2, 3)]
    # Fewer than nodes: some share.
    assert [namespaces.part_of_cores(i, 3, (4, 5)) for i in range(3)] == [(4,), (5,), (4,)]


def reaches(made):
    """Whether a connection from node 0 finds node 1, where nobody listens: it is refused there, if it arrives."""
    code = f"import socket; s = socket.socket(); s.settimeout(0.5); print(s.connect_ex(({made.address(1)!r}, 9)))"
    return int(made.run(0, sys.executable, "-c", code)) == errno.ECONNREFUSED


@needs_nodes
def test_a_killed_bench_leaves_no_node_behind():
    code = (
        "import time; from tests.bench.namespaces import nodes\n"
        "with nodes(2, 1) as made: print(*made.holders, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as bench:
        holders = bench.stdout.readline().split()
        bench.kill()
    assert len(holders) == 3
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{holder}").exists() for holder in holders) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{holder}").exists() for holder in holders)


@needs_nodes
@pytest.mark.slow
def test_planners_run_over_emulated_nodes(capsys):
    packs, planners = (("ldc", (300, 200, 12)),), ("ring", "usp:heads=3", "auto")
    setting = nodes.Setting(2, 1, packs, planners, 1, turns=1, heads=HeadShape(4, 4, 16, "fp32"))
    (row,) = nodes.measure(setting)
    assert row["kind"] == "ldc" and row["tokens"] == 512 and row["network_over_compute"] > 0
    assert "refused" in row["planners"]["usp:heads=3"] and row["planners"]["auto"]["chose"][0] in PLANNERS
    # KV of half of the pack goes each way; backward it goes again, and its gradient comes home.
    ring = row["planners"]["ring"]
    assert ring["network_s"] == pytest.approx(3 * 256 * 2 * 4 * 16 * 4 / 125e6, rel=0.02) and ring["wall_s"] > 0
    assert "2 nodes × 1 ranks" in capsys.readouterr().out


def test_without_the_right_to_emulate_nodes_a_paragraph_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert nodes.main(["--quick"], tmp_path) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "this is not root" in said and not list(tmp_path.iterdir())


def test_training_s_real_tokens_are_those_of_its_documents():
    size = train.Size(64, 2, 1, 2)
    corpus = train.Corpus.of("ultrachat", size)
    assert corpus.lengths.max() <= 64 and corpus.lengths.sum() >= 4 * 2 * 64
    corpus = train.Corpus("own", np.array([24, 40, 24, 40]))
    # A mean of 32 tokens: four padded sequences hold the real tokens of two packs of 64, and an epoch is one step.
    assert corpus.packs_per_step(True, size) == 4 and corpus.real_tokens(True, size) == [(128, 256)] * 3
    assert corpus.packs_per_step(False, size) == 2 and corpus.real_tokens(False, size) == [(128, 128)] * 3


@pytest.mark.slow
def test_the_training_bench_counts_real_tokens(capsys):
    size = train.Size(64, 1, 1, 1)
    corpus = train.Corpus("own", np.array([10, 20, 30, 40, 20, 7]))
    methods = (train.METHODS[0], train.METHODS[3])
    (row,) = train.measure(corpus, size, ["2x1"], methods)
    padded, packed = row["methods"]["batching"], row["methods"]["sap"]
    assert padded["waste"] == pytest.approx(1 - padded["real_tokens"] / (3 * 64)) and packed["planners"] == {"sap": 1}
    assert packed["tokens_per_s"] == pytest.approx(packed["real_tokens"] / packed["step_s"])
    assert "batching" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to run on")
def test_the_gpu_bench_says_that_there_is_no_gpu(capsys, tmp_path):
    assert gpu.main(["--quick"], tmp_path) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "CUDA" in said and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_gpu_bench_measures_whatever_the_device(capsys):
    """All of it but CUDA's own calls."""
    case = attention_cases.Case("some", (100, 20, 8))
    direct, known, other = gpu.one_rank(case, "cpu", ("cpu_flash", "cuda_flash"), 1)
    assert direct["method"] == "direct" and direct["of_direct"] == 1 and "cuda" in other["refused"]
    assert known["error"] < 1e-5 and known["forward_s"] > 0 and len(known["tflops_per_s"]) == 2
    assert "of the direct call, forward and backward; aim 95%" in capsys.readouterr().out
    several = gpu.many_ranks(case, "cpu", 2, ("deepspeed", "sap", "usp:heads=3"), 1)
    assert all(line["wall_s"] > 0 and line["tflops_per_s"] > 0 for line in several[:2])
    assert "heads=3" in several[2]["refused"] and "on 2 ranks" in capsys.readouterr().out


@pytest.mark.slow
def test_the_gpu_bench_trains_the_model_whatever_the_device():
    small = ("model.num_layers=1", "model.hidden_dim=32", "model.ffn_dim=64", "engine.dtype=fp32")
    figures = gpu_model.measure("cpu", "a CPU", 256, 2, *small)
    assert (figures["steps"], figures["tokens"], figures["mfu"]) == (2, 256, None)
    assert figures["tokens_per_s"] > 0 and figures["first_loss"] == pytest.approx(10.8, abs=0.5)
    assert "a CPU, packs of 256 tokens" in gpu_model.table(figures)


def test_the_gpu_bench_times_row_operations_whatever_the_device():
    lines = gpu_rows.measure("cpu", 33, 3, 16, 1)
    assert [line["operation"] for line in lines][:2] == ["merge", "gather, merge, scatter"]
    assert all(line["torch_gb_per_s"] > 0 and line["triton_s"] is None for line in lines)
    assert gpu_rows.table(lines).count("\n") == len(lines)


def test_peaks_are_those_of_the_data_sheets():
    names = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}
    for name, peak in names.items():
        assert clusters.read(gpu_model.cluster_of(name)).flops_per_s == peak
    assert gpu_model.cluster_of("NVIDIA GeForce RTX 4090") is None
