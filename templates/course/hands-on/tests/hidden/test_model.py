"""The hidden tests of the exercises in model.py.

They run without the student's code: `outputs` has what the functions of
probe.py returned. A marker says what a test is worth, and whether students see
its result; without `visibility` they never do.
"""

from __future__ import annotations

import pytest


@pytest.mark.points(4)
def test_a_block_halves_any_size(outputs):
    """Exercise 1."""
    assert outputs["block_shapes"] == [[3, 16, 6, 6], [3, 16, 4, 4], [3, 16, 5, 5], [3, 16, 1, 1]]


@pytest.mark.points(2)
def test_a_block_has_no_negative_output(outputs):
    """Exercise 1."""
    assert outputs["block_minimum"] >= 0


@pytest.mark.points(4)
def test_pixels_are_scaled_evenly(outputs):
    """Exercise 2."""
    assert outputs["centered_pixels"] == pytest.approx([-1, -0.6, 0.6, 1], abs=1e-4)


@pytest.mark.points(4, visibility="after_published")
def test_there_is_a_logit_for_each_class(outputs):
    """Exercise 2."""
    assert outputs["logit_shapes"] == [[6, 4], [1, 4], [2, 2]]


@pytest.mark.points(4)
def test_an_image_gets_the_same_logits_in_any_batch(outputs):
    """Exercise 1: GroupNorm looks at one image at a time, BatchNorm does not."""
    alone, in_a_batch = outputs["alone_and_in_a_batch"]
    assert alone == pytest.approx(in_a_batch, abs=1e-4)


@pytest.mark.points(2)
def test_training_lowers_the_loss(outputs):
    """Both exercises."""
    losses = outputs["losses"]
    assert losses[-1] < losses[0] / 2
