"""The page of a study: what it says, and how it opens in a browser with no network."""

from __future__ import annotations

import csv
import dataclasses
import math
import re
import shutil
import sys
from collections import Counter

import pytest

from mukron.report import write_report
from mukron.report.svg import inline
from mukron.report.tables import optima_tables, snippet
from mukron.study.certificate import Certificate
from mukron.study.errors import StudyError
from mukron.study.numbers import settings
from mukron.train.records import DIVERGED

NASTY = """<script>alert("x")</script> & 'quotes' $x_1$ 字"""
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
)


@pytest.fixture(scope="module")
def written(study, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return folder, write_report(study, folder)


@pytest.fixture(scope="module")
def page_text(written):
    return (written[0] / "report.html").read_text(encoding="utf-8")


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_file_is_there_and_named(written):
    folder, paths = written
    figures = {f"{name}{ending}" for name in ("transfer-lr", "drift", "curves") for ending in (".svg", ".png", ".csv")}
    assert {path.name for path in paths} == {"report.html", "wider.csv", "runs.csv", *figures}
    assert set(paths) == set(folder.iterdir())


def test_the_numbers_are_in_the_csvs(study, written):
    folder, _ = written
    rows, expected = rows_of(folder / "transfer-lr.csv"), settings(study)
    assert len(rows) == len(expected) == 90
    for row, each in zip(rows, expected, strict=True):
        assert (row["scheme"], float(row["width"]), float(row["lr"])) == (each.scheme, each.width, each.lr)
        assert (float(row["test_loss"]) == pytest.approx(each.mean)) if each.whole else row["test_loss"] == ""
    runs = rows_of(folder / "runs.csv")
    assert len(runs) == 270
    assert Counter(row["status"] for row in runs) == Counter(each.status for each in study.results)
    drift = rows_of(folder / "drift.csv")
    optima = [each for judged in study.certificate.judgements for each in judged.optima]
    assert [float(row["log2_best"]) for row in drift] == pytest.approx([each.best.value for each in optima])
    assert {row["drift"] for row in drift} == {"-0.8", "0"}
    curves = rows_of(folder / "curves.csv")
    assert sum(row["scheme"].startswith("mup") for row in curves) == 5 * 20
    assert len(rows_of(folder / "wider.csv")) == 2 * 2 * 5


def test_verdict_first_then_settings_and_how_to_run_it_again(study, page_text):
    verdicts = re.findall(r'class="verdict">(.*?)</span>', page_text)
    assert verdicts == ["does not transfer", "transfers"]
    assert page_text.index("does not transfer</span>") < page_text.index("<svg")
    for judged in study.certificate.judgements:
        for reason in judged.reasons:
            assert reason.replace("'", "&#39;") in page_text
    for said in (study.made["command"], "2 cores, Linux x86_64", "2.6.0", "cross-entropy", "270 runs", "27 diverged"):
        assert said in page_text
    assert page_text.count("<details>") == 2


def test_ids_are_unique_and_every_reference_has_its_target(page_text):
    ids = re.findall(r'\bid="([^"]+)"', page_text)
    assert len(ids) == len(set(ids)) > 100
    references = {*re.findall(r'href="#([^"]+)"', page_text), *re.findall(r"url\(#([^)]+)\)", page_text)}
    assert references
    assert references <= set(ids)
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page_text)


def test_text_in_figures_stays_text_and_they_are_described(page_text):
    assert page_text.count('role="img"') == 3
    assert "SP, heuristic: -0.80 [-0.87, -0.72] per doubling</text>" in page_text
    assert '<title id="figure-drift-title">The best setting against the width</title>' in page_text
    assert "<style" not in page_text[page_text.index("<svg") :]  # one style sheet, the page's


def test_names_are_escaped(make_study, tmp_path):
    record = make_study(NASTY, **{"command": NASTY, NASTY: NASTY})
    judged = tuple(dataclasses.replace(each, reasons=(NASTY,)) for each in record.certificate.judgements)
    results = [dataclasses.replace(each, reason=NASTY) for each in record.results]
    config = record.config.replace(data=NASTY.removesuffix(" 字"))  # the figure's font need not have it
    record = dataclasses.replace(record, config=config, results=results, certificate=Certificate("test_loss", judged))
    write_report(record, tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "字" in text


def test_the_snippet_is_the_run(study, make_search):
    for record in (study, make_search(), make_search(damped=False)):
        config = record.best()
        code = snippet(config, record.metric).replace("run = train(config)", "").partition("print")[0]
        scope: dict[str, object] = {}
        exec(code, scope)
        assert scope["config"] == config


def test_open_intervals_are_said_in_words(study):
    sp, mup = optima_tables(study)
    assert sp.rows[-1][2].endswith(" or less")
    assert sp.rows[-1][-1] == "at the edge of the grid"
    assert sp.rows[-1][-2] == "diverges there"
    assert mup.columns[-1] == "regret"  # nothing to note
    assert mup.rows[0][2] == f"{2**-3.6:.3g} to {2**-3.05:.3g}"


def test_a_search_has_a_page_too(make_search, tmp_path):
    for record in (make_search(), make_search(damped=False)):
        names = {path.name for path in write_report(record, tmp_path / record.config.method)}
        assert {"report.html", "search.csv", "curves.svg", "runs.csv"} <= names
        assert not {"drift.svg", "wider.csv"} & names
        text = (tmp_path / record.config.method / "report.html").read_text(encoding="utf-8")
        assert f"learning rate {record.best().lr:.4g}" in text


def test_a_study_of_nothing_but_divergence_or_of_nothing(study, make_search, tmp_path):
    record = make_search()
    lost = [dataclasses.replace(each, status=DIVERGED, rows=[]) for each in record.results]
    write_report(dataclasses.replace(record, results=lost), tmp_path)
    assert "nothing finished" in (tmp_path / "report.html").read_text(encoding="utf-8")
    with pytest.raises(StudyError, match="nothing to report"):
        write_report(dataclasses.replace(record, results=[]), tmp_path / "none")
    assert not (tmp_path / "none").exists()
    judged = [dataclasses.replace(each, drift=None, regret=(), wider=()) for each in study.certificate.judgements]
    unsure = [dataclasses.replace(each, verdict="cannot tell") for each in judged]
    write_report(dataclasses.replace(study, certificate=Certificate("test_loss", tuple(unsure))), tmp_path / "unsure")
    text = (tmp_path / "unsure" / "report.html").read_text(encoding="utf-8")
    assert text.count('class="verdict">cannot tell<') == 2


def test_a_missing_package_says_how_to_get_it(study, tmp_path, monkeypatch):
    for package in ("matplotlib", "jinja2"):
        with monkeypatch.context() as patch:
            patch.setattr("mukron.report.page.find_spec", lambda name, gone=package: None if name == gone else sys)
            with pytest.raises(ValueError, match=rf"needs {package}.*pip install 'mukron\[studies\]'"):
                write_report(study, tmp_path)


def test_a_figure_of_two_does_not_take_the_others_ids():
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="72pt" height="9pt">'
    )
    svg += '<metadata/><defs><style>*{}</style><path id="p"/></defs><use xlink:href="#p"/><g clip-path="url(#p)"/>'
    svg += '<text>id="p" url(#p)</text></svg>'
    found = inline(svg, "one", "A < B", "C & D")
    assert '<path id="one-p" />' in found
    assert '<use href="#one-p" />' in found
    assert 'clip-path="url(#one-p)"' in found
    assert '<text>id="p" url(#p)</text>' in found
    assert ">A &lt; B</title>" in found
    assert "metadata" not in found
    assert "<style" not in found
    assert "--natural: 96px" in found


# In a browser.


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Open a page; whatever it complains about or asks for fails the test at its end."""
    contexts, complaints, asked = [], [], []

    def opened(path, width=1200, **options):
        context = chromium.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        asked.remove(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith("data:")] == []


@pytest.fixture(scope="module")
def pages(written, make_search, make_study, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    write_report(make_search(), folder / "search")
    write_report(make_study("a_name_with_no_space_to_break_at_" * 8, command="x" * 300), folder / "long")
    return {"study": written[0] / "report.html", **{name: folder / name / "report.html" for name in ("search", "long")}}


@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("name", ["study", "search", "long"])
def test_it_renders_at_every_width(visit, pages, name, width):
    page = visit(pages[name], width)
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0
    figures = page.locator("figure svg")
    assert figures.count() == (2 if name == "search" else 3)
    for number in range(figures.count()):
        box = figures.nth(number).bounding_box()
        assert box["width"] >= min(0.5 * width, 400)
        assert 0.2 < box["height"] / box["width"] < 1.2
        frame = page.locator("figure .scroll").nth(number).bounding_box()
        assert frame["x"] + frame["width"] <= width
    assert figures.first.get_by_text("learning rate", exact=True).first.is_visible()


def test_the_verdict_is_on_the_first_screen(visit, written):
    for width in (390, 1200):
        page = visit(written[0] / "report.html", width)
        verdict = page.get_by_text("does not transfer", exact=True)
        assert verdict.is_visible()
        assert verdict.bounding_box()["y"] < 400
        assert (
            page.evaluate("getComputedStyle(document.querySelector('.card.bad .verdict')).color") == "rgb(168, 64, 11)"
        )


def test_it_works_without_javascript(visit, written):
    page = visit(written[0] / "report.html", java_script_enabled=False)
    details = page.locator("details").last
    assert not details.locator("table").is_visible()
    details.locator("summary").click()
    assert details.locator("table").is_visible()
    assert details.locator("tbody tr").count() == 90


def test_it_prints(visit, written, tmp_path):
    page = visit(written[0] / "report.html")
    page.emulate_media(media="print")
    assert page.locator("details table").last.is_visible()  # opened
    colour = page.evaluate("getComputedStyle(document.querySelector('.card.bad .verdict')).color")
    assert colour == "rgb(0, 0, 0)"
    inside = "getComputedStyle(document.querySelector('figure')).breakInside"
    assert page.evaluate(inside) == "avoid"
    content = page.pdf(path=tmp_path / "report.pdf", format="A4", tagged=True, outline=True)
    assert content.startswith(b"%PDF")
    assert re.search(rb"/Title \(SP, heuristic: the best learning rate ?does not transfer\)", content)
    assert re.search(rb"/Title \(muP, rescaled: the best learning rate ?transfers\)", content)


def test_nasty_names_run_nothing(visit, make_study, tmp_path):
    write_report(make_study(NASTY, command=NASTY), tmp_path)
    page = visit(tmp_path / "report.html")
    assert page.locator("h1").inner_text() == NASTY
    assert page.locator("pre.wrap").inner_text() == NASTY
    assert page.locator("script").count() == 0
    assert math.isfinite(page.locator("figure svg").first.bounding_box()["width"])
