import pytest


@pytest.mark.points(30)
def test_medians(outputs):
    assert outputs["medians"] == [2, 2.5, 5]


@pytest.mark.points(10, visibility="after_published")
def test_nothing_has_no_median(outputs):
    assert outputs["median_of_nothing"] == "a ValueError"
