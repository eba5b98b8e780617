"""The tables of the README and of docs/ are those of the results."""

import re
from pathlib import Path

import pytest

from benchmarks import readme

README = Path(readme.ROOT) / "README.md"


@pytest.mark.parametrize("path", readme.FILLED, ids=lambda path: path.name)
def test_no_figure_of_the_tables_is_older_than_the_results(path):
    text = path.read_text()
    assert readme.filled(text) == text, "run: python -m benchmarks.readme"


def test_every_table_is_shown():
    text = "".join(path.read_text() for path in readme.FILLED)
    assert all(f"<!-- table: {name} -->" in text for name in readme.TABLES)


def test_the_picture_can_be_drawn(tmp_path):
    readme.draw(tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def test_the_first_example_runs(capsys):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    names = {}
    exec(code.replace("progress=True", "stages=3, samples=100"), names)
    assert names["result"].sparsity == pytest.approx(0.9, abs=1e-3)
    assert capsys.readouterr().out.count("top1=") == 2


def test_a_table_replaces_what_stood_there():
    before = "a\n<!-- table: chita -->\n| old |\n<!-- end -->\nb"
    after = readme.filled(before)
    assert "old" not in after
    assert after.startswith("a\n")
    assert after.endswith("<!-- end -->\nb")
    assert readme.chita() in after
