"""Cluster files: what is read is what stands there, and what is wrong is said with its place."""

import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from hsap import clusters
from hsap.ir.cluster import BOUNDLESS, Cluster

ROOT = Path(__file__).resolve().parents[1]
GOOD = clusters.FOLDER.joinpath("dgx-a100.yaml").read_text(encoding="utf-8")
TAGGED = ("!!bool x", '!!int ""', '!!int "-"', '!!float ""', '!!timestamp "x"', "!!timestamp 2020-99-99", "!!binary é")
"""Values that aren't what their tag says; reading them makes errors of many classes."""


def test_the_testbeds_are_there() -> None:
    assert {"dgx-a100", "hgx-a100-80g", "p4de", "dgx-h100", "hgx-h200", "dgx-b200", "cpu-gloo"} == {*clusters.names()}
    for name in clusters.names():
        cluster = clusters.read(name)
        assert cluster.name == name and cluster == Cluster.preset(name)
        assert clusters.read(name, nodes=3) == replace(cluster, num_nodes=3)
        assert Cluster(**cluster.to_json()) == cluster  # as a plan keeps it
    hosts = [name for name in clusters.names() if clusters.read(name).is_host]
    assert hosts == ["cpu-gloo"] and clusters.read(hosts[0]).starting_at(0, 2).is_host
    assert clusters.read(hosts[0]).ranks_per_node == clusters.read(hosts[0]).cores == BOUNDLESS
    # DCP's testbed: 8 GPUs share four cards of 100 Gb/s.
    p4de = clusters.read("p4de")
    assert p4de.num_nics * p4de.inter_bytes_per_s == 400e9 / 8
    assert p4de.nic_of(18).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8]
    assert replace(p4de, first_rank=3).nic_of(6).tolist() == [1, 2, 2, 3, 3, 4]


def test_cards_of_the_largest_node() -> None:
    cluster = Cluster(ranks_per_node=BOUNDLESS, first_rank=BOUNDLESS - 2)
    assert cluster.nic_of(4).tolist() == [BOUNDLESS - 2 + i for i in range(4)]
    with pytest.raises(ValueError, match=f"ranks_per_node is .* to {BOUNDLESS}"):
        Cluster(ranks_per_node=BOUNDLESS + 1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("intra_bytes_per_s: 300.0e+9", "intra_bytes_per_s: 0"), "mine.yaml: .*intra_bytes_per_s is 0; it must be"),
        (("intra_bytes_per_s: 300.0e+9", "intra_bytes_per_s: fast"), "intra_bytes_per_s is 'fast'"),
        (("intra_bytes_per_s: 300.0e+9", ""), "mine.yaml: intra_bytes_per_s must be given"),
        (
            ("intra_bytes_per_s:", "intra_byte_per_s:"),
            "'intra_byte_per_s' is no field .* mean intra_bytes_per_s",
        ),
        (("comm_share: 0.07", "comm_share: 1.0"), "comm_share is 1.0; it must be from 0 to 0.95"),
        (("comm_share: 0.07", "duplex: 0.5"), "duplex is 0.5; it must be from 1 to 2"),
        (("comm_share: 0.07", "num_nics: 9"), "num_nics is 9, more than the 8 ranks"),
        (("comm_share: 0.07", "cores: -1"), "cores .* is -1"),
        (("comm_share: 0.07", "rows_efficiency: [[8, 0.5], [8, 1]]"), "rows_efficiency .* each number once"),
        (("comm_share: 0.07", "rows_efficiency: [[8, 1.5]]"), "the part at 8 rows is 1.5"),
        (("comm_share: 0.07", "rows_efficiency: 3"), r"give a list of \[rows, part\] pairs"),
        (("ranks_per_node: 8", "ranks_per_node: 1.5"), "ranks_per_node is 1.5"),
        (("comm_share: 0.07", "comm_share: 0.07\ncomm_share: 0.1"), "mine.yaml: comm_share given twice"),
        (("intra_bytes_per_s: 300.0e+9", "intra_bytes_per_s: 1.0e-300"), "intra_bytes_per_s is 1e-300"),
        (("ranks_per_node: 8", "ranks_per_node: " + "9" * 5000), "mine.yaml: not YAML"),
        (("name: dgx-a100", 'name: "\\e[31m"'), "name is .*give a word"),
        ((GOOD, "- a\n- b\n"), "mine.yaml: it holds .*give its fields"),
        ((GOOD, ""), "mine.yaml: it holds None"),
        ((GOOD, "a: [\n"), "mine.yaml: not YAML"),
        *((("tile_tokens: 128", f"tile_tokens: {tagged}"), "mine.yaml: not YAML") for tagged in TAGGED),
        ((GOOD, "name: !!float " + "x" * 5000), "mine.yaml: not YAML: .{,400}$"),
        ((GOOD, "!!python/object:os.system {}\n"), "mine.yaml: not YAML"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_field(tmp_path, change, told) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace(*change), encoding="utf-8")
    with pytest.raises(ValueError, match=told) as refused:
        clusters.read(str(path))
    assert "\n" not in str(refused.value)


def test_names_and_paths_that_are_none(tmp_path) -> None:
    for name, told in (("abacus", "unknown preset 'abacus'"), (3, "unknown preset 3"), ("auto", "unknown preset"),
                       (str(tmp_path / "no.yaml"), "no.yaml: No such file")):  # fmt: skip
        with pytest.raises(ValueError, match=told):
            clusters.read(name)
    with pytest.raises(ValueError, match="nodes is 0"):
        clusters.read("p4de", 0)


def test_what_is_written_is_read(tmp_path) -> None:
    odd = Cluster("odd", 3, 1, 1.25e9, 2.0, 0.0, 1e-6, 3e10, 4, rows_efficiency=((8, 0.25), (64, 1.0)), cores=2.5)
    for cluster in (odd, *map(clusters.read, clusters.names())):
        path = tmp_path / "kept.yaml"
        clusters.write(cluster, path, {"cores": "why"}, "a head\nof two lines")
        assert clusters.read(str(path)) == cluster
        assert path.read_text(encoding="utf-8").startswith("# a head\n# of two lines\nname: ")
    # YAML 1.1 takes 3e10 for a text; here it is the number it looks like.
    path.write_text(GOOD.replace("312.0e+12", "312e12"), encoding="utf-8")
    assert clusters.read(str(path)) == clusters.read("dgx-a100")


@pytest.mark.slow
def test_a_wheel_has_the_files(tmp_path) -> None:
    """The link becomes files, so that an installed package knows the clusters and models too."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "hsap", source / "hsap", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", source / "configs")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=True)
    inside = zipfile.ZipFile(source / done.stdout.split()[-1]).namelist()
    assert {f"hsap/configs/cluster/{name}.yaml" for name in clusters.names()} <= set(inside)
    models = {path.name for path in (ROOT / "configs" / "model").glob("*.yaml")}
    assert models and {f"hsap/configs/model/{name}" for name in models} <= set(inside)
