"""What launchers say of a process's place, whichever names they use, and what isn't a place."""

import pytest

from hsap.launched import Place
from hsap.train.processes import look_around


@pytest.mark.parametrize(
    ("told", "place"),
    [
        ({}, Place(0, 1, 0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Place(3, 4, 1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_SIZE": "2"}, Place(3, 4, 1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, Place(3, 4, 3, 4)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "1", "LOCAL_WORLD_SIZE": "2"}, Place(1, 2, 1, 2)),
    ],
)
def test_a_place_is_what_the_launcher_says(told, place):
    assert Place.of(told) == place
    around = look_around(told)
    assert (around.rank, around.world_size, around.local_world_size) == (
        place.rank,
        place.world_size,
        place.local_world_size,
    )


@pytest.mark.parametrize("wrong", [{"RANK": "x"}, {"WORLD_SIZE": ""}, {"LOCAL_RANK": "1.5"}, {"LOCAL_SIZE": "two"}])
def test_what_is_no_number_is_told(wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=rf"launcher: .*{name}={value}.*: these must be numbers"):
        look_around({"RANK": "0", "WORLD_SIZE": "1"} | wrong)


def test_a_place_among_several_is_one_that_can_be():
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert Place.among_several(torchrun) == Place(3, 4, 1, 2)
    assert Place.among_several({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_SIZE": "2"}) == Place(3, 4, 1, 2)
    for alone in ({}, {"RANK": "0"}, {"WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": "1"}):
        assert Place.among_several(alone) is None
    wrong = ({"WORLD_SIZE": "many"}, {"RANK": "4"}, {"RANK": "-1"}, {"WORLD_SIZE": "5"}, {"LOCAL_WORLD_SIZE": "0"})
    for told in wrong:
        with pytest.raises(ValueError, match="launcher: "):
            Place.among_several(torchrun | told)
