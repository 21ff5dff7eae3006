"""examples/loop.py: what the training scripts share."""

import sys
from pathlib import Path

import pytest

import t5fx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import loop


def test_calibration_is_logged_as_means_of_ten_steps_and_a_shorter_rest(tmp_path):
    errors = tuple((1.0 / step, 3.0 / step) for step in range(1, 26))  # two sites, 25 steps
    log = loop.Log(tmp_path / "log.csv", ("stage", "step", "epoch", "loss", "seconds", "cpu_seconds"))
    loop.log_calibration(log, t5fx.Calibration(("a", "b"), errors), loop.Clock(wall=50.0, cpu=100.0), batches=5)
    assert [(row["stage"], row["step"]) for row in log.rows] == [("calibrate", n) for n in ("10", "20", "25")]
    means = [sum(2.0 / step for step in part) / len(part) for part in (range(1, 11), range(11, 21), range(21, 26))]
    assert [float(row["loss"]) for row in log.rows] == pytest.approx(means, rel=1e-5)
    # Time up to the last step of the row, epochs of five batches.
    assert [float(row["seconds"]) for row in log.rows] == [20, 40, 50]
    assert [float(row["cpu_seconds"]) for row in log.rows] == [40, 80, 100]
    assert [float(row["epoch"]) for row in log.rows] == [2, 4, 5]


def test_a_log_writes_what_it_holds_and_reads_it_again(tmp_path):
    log = loop.Log(tmp_path / "deep" / "log.csv", ("stage", "loss"))
    log.add(stage="softmax", loss=0.123456789)
    log.add(stage="convert")
    again = loop.Log(log.path, log.fields)
    again.read()
    assert again.rows == log.rows == [{"stage": "softmax", "loss": "0.123457"}, {"stage": "convert", "loss": ""}]


@pytest.mark.parametrize(("done", "factor"), [(0.0, 0.0), (0.05, 0.5), (0.1, 1.0), (0.55, 0.5), (1.0, 0.0)])
def test_the_rate_rises_in_a_line_and_falls_as_half_a_cosine(done, factor):
    assert loop.rate(done, warm_up=0.1) == pytest.approx(factor, abs=1e-12)
