"""What is kept, and what is made of it: tables, figures, the page."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from mukron.bench.drawing import draw_result
from mukron.bench.measure import Options
from mukron.bench.page import summary_table, write_performance_page
from mukron.bench.result import BenchResult, MethodResult, new_result
from mukron.bench.roots import ROOT_CASES, RootsRun


def result(widths=(64, 128, 256)) -> BenchResult:
    empty = new_result("kfac-step", "One step", "SGD", ("a note",), Options(widths), "mukron bench kfac-step")
    rows = []
    for width in widths:
        rows += [
            MethodResult("SGD", width, (1e-3 * width**2, 1.1e-3 * width**2, 0.9e-3 * width**2), 10.0, 1e-7),
            MethodResult("K-FAC", width, (2e-3 * width**2,) * 3, 15.0, 2e-6, parts={"forward": 1.0, "step": 3.0}),
            MethodResult("peer", width, note="another thing", failed="out of memory"),
        ]
    return empty.with_rows(rows)


def test_a_result_is_read_as_it_was_written(tmp_path):
    path = result().save(tmp_path)
    assert path.name == "kfac-step-cpu.json"
    assert BenchResult.load(path).table() == result().table()
    assert BenchResult.load(path).save(tmp_path / "again").read_text() == path.read_text()
    assert '"median": 4.096' in path.read_text()


def test_another_precision_has_files_of_its_own():
    tf32 = replace(result(), settings={"device": "cuda", "precision": "tf32"})
    assert tf32.name == "kfac-step-cuda-tf32"


def test_the_table_compares_with_the_base():
    table = result((64,)).table()
    rows = {row[1]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert rows["K-FAC"]["x SGD"] == "2.00"
    assert rows["K-FAC"]["MiB x SGD"] == "1.50"
    assert rows["K-FAC"]["off by"] == "2.0e-06"
    assert rows["peer"]["ms"] == "-"
    assert "peer at width 64: out of memory" in table.notes
    assert "peer: another thing" in table.notes


def test_parts_stand_beside_the_whole_step():
    """A row a method; on a GPU with what no label accounts for."""
    table = result((64,)).parts_table()
    assert table.columns == ("width", "method", "all", "forward", "backward", "step")
    assert table.rows == (("64", "K-FAC", "8.19", "1", "-", "3"),)
    on_gpu = replace(result((64,)), settings={"device": "cuda"}).parts_table()
    assert on_gpu.columns[-1] == "unseen"
    assert on_gpu.rows[0][-1] == "4.19"


def test_in_short_ours_stands_beside_the_fastest_of_the_others():
    found = result()
    rows = [replace(row, method={"K-FAC": "K-FAC (mc), fused"}.get(row.method, row.method)) for row in found.rows]
    rows += [
        MethodResult("SINGD (dense)", 256, (655.36,) * 3),
        MethodResult("curvlinops K-FAC (empirical)", 256, (327.68,) * 3),
    ]
    (line,) = summary_table([replace(found, rows=tuple(rows))]).rows
    assert line[0] == "kfac-step: K-FAC (mc), fused"
    assert line[2:] == ("x SGD: 2 at 64, 2 at 128, 2 at 256", "1.50", "5, curvlinops K-FAC (empirical)")
    assert not summary_table([replace(found, rows=found.rows[:1])]).rows


def test_lines_carry_the_fitted_slope(tmp_path):
    svg, png = draw_result(result(), tmp_path / "figure")
    assert png.exists()
    assert "K-FAC, width^2.0" in svg.read_text()
    assert "peer" not in svg.read_text()


def test_one_width_is_drawn_as_bars(tmp_path):
    (svg,) = draw_result(result((64,)), tmp_path / "figure", (".svg",))
    assert "x SGD" in svg.read_text()
    assert "width^" not in svg.read_text()


def test_bars_that_differ_by_much_have_a_logarithmic_axis(tmp_path):
    """1500 times SGD beside 3 times SGD: both are to be seen."""
    found = result((64,))
    far = found.with_rows([MethodResult("far", 64, (1500.0 * found.base_at(64).median,) * 3)])
    near, far = (
        draw_result(each, tmp_path / name, (".svg",))[0].read_text() for each, name in ((found, "a"), (far, "b"))
    )
    assert "10^{3}" in far or "mathdefault{10^{3}}" in far
    assert "10^{" not in near


def test_nothing_measured_gives_no_figure(tmp_path):
    assert draw_result(replace(result(), rows=()), tmp_path / "figure") == []


def test_the_page_is_written_from_the_files_alone(tmp_path):
    file = result().save(tmp_path / "figures")
    page = write_performance_page([file], tmp_path / "performance.md")
    text = page.read_text()
    assert "mukron bench kfac-step" in text
    assert re.search(r"^\| 64 \| K-FAC \|", text, re.MULTILINE)
    assert "(figures/kfac-step-cpu.json)" in text
    assert "(figures/kfac-step-cpu.svg)" in text
    assert file.with_suffix(".svg").exists()
    assert "Where the time goes" in text
    assert "In short" in text
    assert str(tmp_path) not in text
    before = text, file.with_suffix(".svg").read_text()
    write_performance_page([file], page)
    assert (page.read_text(), file.with_suffix(".svg").read_text()) == before


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "other.json").write_text('{"rows": []}')
    for name in ("other.json", "missing.json"):
        with pytest.raises(ValueError, match="no result of mukron bench could be read"):
            BenchResult.load(tmp_path / name)


def test_roots_are_timed_and_told_from_float64():
    run = RootsRun(Options((32,), rounds=2), "")
    (rows,) = run.rows(lambda work, _: work, lambda work, _: work)
    assert [row.method for row in rows] == [root.name for root in ROOT_CASES]
    assert {root.solver for root in ROOT_CASES} >= {"cholesky", "eigh", "newton"}
    for row in rows:
        assert len(row.milliseconds) == 2
        assert row.differs < 1e-3, row.method


def test_a_benchmark_that_is_killed_leaves_the_widths_that_were_done(tmp_path):
    """By kill -9, which nobody can catch, while it measures the next width."""
    command = [sys.executable, "-m", "mukron.cli", "bench", "kfac-step", "--widths", "8,1500", "--rounds", "1"]
    command += ["--against", "none", "--no-memory", "--out", str(tmp_path)]
    file = tmp_path / "kfac-step-cpu.json"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        end = time.monotonic() + 120
        while not file.exists() and run.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        run.kill()
    assert BenchResult.load(file).widths == [8]
