"""The demo, with fewer runs than it has."""

import json
from pathlib import Path

import pytest

from swap_prune import demo
from swap_prune.errors import InputError


def test_the_demo_writes_a_model_a_picture_and_means_over_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "SPARSITIES", (0.9,))
    monkeypatch.setattr(demo, "SEEDS", (3, 4))
    monkeypatch.setattr(demo, "STAGES", 1)
    out = tmp_path / "demo"

    demo.run_demo(out, overwrite=False)

    runs = json.loads((out / "result.json").read_text())["runs"]
    assert len(runs) == 2 * 3 * 2
    wrong = [r["top1"] for r in runs if (r["calibration"], r["method"]) == (demo.WRONG, "ewr")]
    printed = capsys.readouterr().out.splitlines()
    line = next(line for line in printed if line.split()[:3] == [*demo.WRONG.split(), "ewr"])
    assert line.split()[3] == f"{sum(wrong) / 2:.1f}"
    assert {"model.safetensors", demo.PICTURE} <= {path.name for path in out.iterdir()}
    with pytest.raises(InputError, match="overwrite"):
        demo.run_demo(out, overwrite=False)
