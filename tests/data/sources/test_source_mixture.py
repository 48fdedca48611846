"""Mixtures: proportions to a document, determined by the seed, and what happens where a source ends."""

import json
import random
from collections import Counter
from fractions import Fraction
from itertools import islice

import pytest

from hsap.data import sources
from hsap.data.sources.mixture import Mixture, _fair


@pytest.fixture
def make(tmp_path):
    def make(sizes, weights, shard=(0, 1), **options):
        opened = {}
        for name, size in sizes.items():
            path = tmp_path / f"{name}.jsonl"
            path.write_text("".join(json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(size)))
            opened[name] = sources.open(path, shard=shard)
        return Mixture(opened, weights, **options)

    return make


@pytest.mark.parametrize("seed", range(12))
def test_after_any_number_of_turns_each_has_its_share_to_less_than_one(seed):
    rng = random.Random(seed)
    weights = [Fraction(rng.choice([1, 2, 50, 1000])) * Fraction(rng.random()) for _ in range(rng.randint(1, 8))]
    shares = [weight / sum(weights) for weight in weights]
    had = [0] * len(shares)
    for turn, index in enumerate(islice(_fair(shares), 400), 1):
        had[index] += 1
        assert all(abs(count - share * turn) < 1 for count, share in zip(had, shares))


def test_proportions_hold_over_every_window(make):
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    mixture = make({"a": 600, "b": 400, "c": 300}, weights, window=100, exhausted="stop")
    names = [document.text.split()[0] for document in mixture]
    for first in range(0, len(names) - 99, 100):
        assert Counter(names[first : first + 100]) == {"a": 50, "b": 30, "c": 20}
    assert names[:100] != sorted(names[:100])


def test_the_seed_alone_decides(make):
    sizes, weights = {"a": 50, "b": 50}, {"a": 1, "b": 2}
    first = [document.id for document in make(sizes, weights, seed=3)]
    assert first == [document.id for document in make(sizes, weights, seed=3)]
    assert first != [document.id for document in make(sizes, weights, seed=4)]
    mixture = make(sizes, weights, seed=3)
    assert [[document.id for document in mixture] for _ in range(2)] == [first, first]


def test_restart_goes_on_until_each_source_has_ended_once(make):
    mixture = make({"a": 5, "b": 60}, {"a": 1, "b": 1}, window=10)
    ids = [document.id for document in mixture]
    assert len(set(ids)) == len(ids)
    assert {f"b/b.jsonl:{i}" for i in range(1, 61)} <= set(ids)
    assert "a/a.jsonl:1@2" in ids and not any(one.startswith("b") and "@" in one for one in ids)
    assert abs(sum(one.startswith("a") for one in ids) - 60) <= 5
    assert mixture.tally.num_documents >= 60


def test_stop_ends_with_the_first_source_that_ends(make):
    ids = [document.id for document in make({"a": 5, "b": 60}, {"a": 1, "b": 1}, window=10, exhausted="stop")]
    assert sum(one.startswith("a") for one in ids) == 5 and len(ids) <= 20


def test_what_a_source_of_several_rounds_leaves_out_is_counted_once(make, tmp_path):
    mixture = make({"a": 6, "b": 40}, {"a": 1, "b": 1}, window=4)
    with open(tmp_path / "a.jsonl", "a") as stream:
        stream.write('{"text": ""}\n{"text": "a 12", "tokens": []}\n')
    for _ in range(2):
        rounds = Counter()
        for document in mixture:
            assert mixture.again == (rounds[document.text] > 0)
            rounds[document.text] += 1
        assert rounds["a 2"] > 3 and rounds["b 2"] == 1, "a is walked several times"
        assert mixture.tally.counts == {"no text and no tokens": 1}
        assert mixture.tally.num_documents == 7 + 40
        assert len(mixture.tally.examples) == 1


def test_readers_mix_their_own_documents(make):
    sizes, weights = {"a": 30, "b": 90}, {"a": 1, "b": 3}
    ids = [[d.id for d in make(sizes, weights, shard=(i, 3), window=4)] for i in range(3)]
    assert sorted(one for part in ids for one in part if "@" not in one) == sorted(
        d.id for d in make(sizes, weights, window=4) if "@" not in d.id
    )


@pytest.mark.parametrize(
    ("weights", "options", "told"),
    [
        ({"a": 1}, {}, "has sources a, b and weights for a; give each"),
        ({"a": 1, "b": 0}, {}, "weight of b is 0; it must be"),
        ({"a": 1, "b": float("nan")}, {}, "weight of b is nan"),
        ({"a": 1, "b": 1e-300}, {}, "weight of b is 1e-300, less than a millionth of another's; .* never end"),
        ({"a": 1, "b": 1}, {"exhausted": "loop"}, "mixtures have no 'loop'; known ones are restart, stop"),
    ],
)
def test_what_does_not_fit_is_refused(make, weights, options, told):
    with pytest.raises(ValueError, match=told):
        make({"a": 1, "b": 1}, weights, **options)
