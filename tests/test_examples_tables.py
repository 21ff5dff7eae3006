"""examples/tables.py: the numbers of the CSV files, in Markdown."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import tables


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace(" ", ""))


def test_timm(tmp_path, capsys):
    write(
        tmp_path / "half" / "log.csv",
        """stage,step,epoch,loss,accuracy,seconds,cpu_seconds
        convert,,,,21.5,0,0
        calibrate,10,0.1,0.3,,1,2
        calibrated,,,,74.25,30,25.4
        finetune,100,0.3,1.2,nan,50,49
        finetune,175,0.5,1.1,76.125,90,80.6
        """,
    )
    tables.main(["timm", str(tmp_path / "half")])
    head, _, row = capsys.readouterr().out.strip().splitlines()
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "half",
        "",
        "",
        "21.50",
        "74.25",
        "76.12",
        "25",
        "81",
    ]
    assert head.count("|") == row.count("|")


def test_presets_are_ordered_by_error_and_a_stopped_one_is_last(tmp_path, capsys):
    write(
        tmp_path / "presets.csv",
        """config,seed,steps,batch,error,worst,accuracy
        B,0,60,64,0.4,0.5,60
        stopped,0,60,64,,,
        A,0,60,64,0.2,0.3,70
        A,1,60,64,0.3,0.6,71
        """,
    )
    tables.main(["presets", str(tmp_path)])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows[0] == ["A", "2", "0.250", "0.200 to 0.300", "0.600", "70.5"]
    assert [row[0] for row in rows] == ["A", "B", "stopped"]
    assert rows[2][3] == "stopped: not finite"


def test_a_missing_run_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"distances\.csv is missing"):
        tables.main(["dit", str(tmp_path)])
