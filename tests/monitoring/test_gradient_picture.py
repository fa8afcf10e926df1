"""`ds-vit gradients`: the table and the picture show what the rows say."""

import json
import math

import pytest

from ds_vit import cli
from ds_vit.monitoring.figures import draw_gradients, read_gradients
from ds_vit.monitoring.gradient_health import HIGHEST, LOWEST


def counts(**by_power):
    """A histogram with counts at powers of two: m20=3 is three gradients at 2^-20."""
    bins = [0] * (HIGHEST - LOWEST + 1)
    for name, count in by_power.items():
        bins[-int(name[1:]) - LOWEST] = count
    return bins


def figures(norm, below_24, below_14):
    return {
        **{"norm": norm, "max": 0.5, "zeros": 0.125, "nonfinite": 0.0, "update_to_weight": 1e-3},
        **{"below_2^-24": below_24, "below_2^-14": below_14},
    }


@pytest.fixture
def run(tmp_path):
    """A run's folder with statistics of two steps."""
    rows = [{"kind": "train", "step": 1, "loss": 2.0}]
    for step, norm in ((1, 5.0), (11, 13.0)):
        layers = {"embed": figures(3.0, 0.25, 0.75), "head": figures(norm, 0.0, 0.0)}
        histogram = {"embed": counts(m30=1, m20=2, m5=1), "head": counts(m3=12)}
        row = {"kind": "gradients", "step": step, **figures(norm, 1 / 16, 3 / 16), "layers": layers}
        rows.append({**row, "histogram": {"lowest": LOWEST, "counts": histogram}})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "summary.json").write_text(json.dumps({"model": "vit_x", "precision": "fp16"}))
    return tmp_path


def test_the_table(run, capsys, monkeypatch):
    """Figures of another step or layer."""
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["gradients", str(run)]) == 0
    out = capsys.readouterr().out
    assert "vit_x, fp16, step 11" in out
    embed, head, whole = (
        next(line for line in out.splitlines() if f" {name} " in line) for name in ("embed", "head", "all")
    )
    assert "25.00%" in embed
    assert "75.00%" in embed
    assert " 13 " in head
    assert "6.25%" in whole
    assert cli.main(["gradients", str(run), "--step", "1"]) == 0
    assert "step 1" in capsys.readouterr().out


def test_the_picture(run):
    """Bars at the wrong power, or in the colour of what fp16 keeps."""
    figure = draw_gradients(*read_gradients(run))
    above, below = figure.axes[:2]
    bars = {math.floor(bar.get_x()): bar for bar in above.patches if bar.get_height() > 0}
    assert {power: bar.get_height() for power, bar in bars.items()} == {-30: 6.25, -20: 12.5, -5: 6.25, -3: 75.0}
    colours = [bars[power].get_facecolor() for power in (-30, -20, -5, -3)]
    assert len(set(colours)) == 3
    assert colours[2] == colours[3]
    image = below.images[0].get_array()
    assert image[0, -30 - LOWEST] == 25.0
    assert image[1, -3 - LOWEST] == 100.0
    assert [label.get_text() for label in below.get_yticklabels()] == ["embed", "head"]


def test_files(run, tmp_path, capsys):
    """A file that is no picture; an ending that nobody can write."""
    assert cli.main(["gradients", str(run), "--output", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["gradients", str(run), "--output", str(tmp_path / "no" / "a.png")]) == 2
    assert cli.main(["gradients", str(run), "--output", str(tmp_path / "a.docx")]) == 2
    assert "docx" in capsys.readouterr().err


def test_errors(run, tmp_path, capsys):
    """A traceback for a run without statistics."""
    for argv, words in (
        ([str(run / "nowhere")], "there is no metrics.jsonl"),
        ([str(run), "--step", "7"], "step 7 has no statistics; the nearest of 2 is 11"),
    ):
        assert cli.main(["gradients", *argv]) == 2
        assert words in capsys.readouterr().err
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    assert cli.main(["gradients", str(run)]) == 2
    assert "--grad-stats-interval" in capsys.readouterr().err
