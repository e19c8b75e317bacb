"""The notebooks: what is committed was run as a whole and tells nothing of the machine; run again, it still ends well.

Their code cells are plain Python, so running one needs no Jupyter: one script, top to bottom, in a fresh interpreter.
Every assertion in a notebook is then checked, its fleets included.
"""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RUN_S = 280.0  # about a minute on two free cores; below the deadline of a hanging test
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:tmp|work|home|root|Users|opt|mnt|srv|private|var)/")

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell):
    return "".join(cell["source"])


def texts(cell):
    """All that a reader sees of a cell, pictures aside."""
    yield source(cell)
    for output in cell.get("outputs", ()):
        yield "".join(output.get("text", ()))
        yield "\n".join(output.get("traceback", ()))
        for kind, data in output.get("data", {}).items():
            if not kind.startswith("image/"):
                yield "".join(data)


def test_each_stands_in_the_readme_by_its_number():
    line = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("notebooks/"))
    assert re.findall(r"\b\d\d\b", line) == [path.name[:2] for path in NOTEBOOKS]


@every_notebook
def test_was_run_from_top_to_bottom(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell["outputs"] for cell in cells)


@every_notebook
def test_shows_neither_errors_nor_warnings(path):
    for cell in code_cells(path):
        for output in cell["outputs"]:
            assert output["output_type"] != "error", output
            assert output.get("name") != "stderr", output


@every_notebook
def test_tells_nothing_of_the_machine(path):
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        found = MACHINE_PATH.search("\n".join(texts(cell)))
        assert not found, found


@every_notebook
def test_is_plain_python(path):
    for cell in code_cells(path):
        ast.parse(source(cell))


@pytest.mark.slow
@every_notebook
def test_runs_from_top_to_bottom(path, processes, tmp_path):
    script = tmp_path / f"{path.stem}.py"
    script.write_text("\n\n".join(source(cell) for cell in code_cells(path)), encoding="utf-8")
    running = processes.start(path.stem, [str(script)], {"MPLBACKEND": "Agg"}, cold=True)
    assert running.wait(RUN_S) == 0
