"""The README and the docs are run: every Python block, every mukron command that names no file of the reader's."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner

from mukron.bench.page import page_text
from mukron.bench.result import BenchResult
from mukron.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for found, text in fenced if found == language]


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)  # README's is run below
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """All blocks of a page in one go: later ones build on earlier ones."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(page, "python"))
    exec(compile(code, str(page), "exec"), {})


def test_readme_shows_what_explain_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(ROOT / "README.md", "python")
    exec(code, {})
    (shown,) = blocks(ROOT / "README.md", "")
    assert capsys.readouterr().out.strip() == shown.strip()


def test_readme_commands_run():
    commands = [
        shlex.split(line, comments=True)[1:]
        for block in blocks(ROOT / "README.md", "sh")
        for line in block.splitlines()
        if line.startswith("mukron explain") and "mypackage" not in line
    ]
    assert len(commands) == 4
    for command in commands:
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        assert result.exit_code == 0, (command, result.output)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_price_of_a_step_is_what_the_benchmark_wrote():
    result = BenchResult.load(ROOT / "docs/figures/bench/kfac-step-cpu.json")
    page = (ROOT / "docs/optimizers.md").read_text()
    assert f"`{result.command}`" in page
    said = re.search(
        r"at ([\d.]+) times the time and ([\d.]+) times the memory of SGD with momentum at width (\d+)", page
    )
    assert said is not None
    width = int(said[3])
    base, row = (next(r for r in result.at(width) if r.method == name) for name in ("SGD", "K-FAC (mc)"))
    assert said.groups()[:2] == (f"{row.median / base.median:.2f}", f"{row.memory / base.memory:.2f}")


def test_the_page_of_benchmarks_is_what_the_command_writes(tmp_path):
    """From the files that it names, in their order; nothing is typed by hand."""
    written = (ROOT / "docs/performance.md").read_text()
    files = [ROOT / "docs" / name for name in re.findall(r"Numbers: \[.*?\]\((.*?)\)", written)]
    benches = ("kfac-step", "shampoo-step", "roots", "sweep")
    named = {f"{bench}-{device}" for bench in benches for device in ("cpu", "cuda")} | {"conv-cuda"}
    assert {file.stem for file in files} >= named
    assert written == page_text(files, ROOT / "docs")


def stored_tables() -> dict[str, str]:
    """What the commands of docs/features.md printed, from the numbers that they stored."""
    from mukron.diagnose import Check
    from mukron.diagnose.landing import Landing

    figures = ROOT / "docs" / "figures"
    tables = {}
    for name in ("check-kfac", "check-heuristic", "check-sp"):
        check = Check.load(figures / name / "check.json")
        shown = [check.table(), check.damping_table()] if check.damping else [check.table()]
        tables[name] = "\n\n".join(table.text(width=None) for table in shown)
    tables["check-nngp"] = Landing.load(figures / "check-nngp" / "nngp.json").table().text(width=None)
    return tables


@pytest.mark.parametrize("name", ["check-kfac", "check-heuristic", "check-sp", "check-nngp"])
def test_the_tables_of_the_features_page_are_those_of_its_figures(name):
    page = (ROOT / "docs" / "features.md").read_text()
    (shown,) = re.findall(rf"<!-- docs/figures/{name} -->\n```text\n(.*?)\n```", page, re.DOTALL)
    assert shown == stored_tables()[name]


GPT_CHECKS = {  # by file: the steps, and the damping
    "adamw": ("", ""),
    "foof": ("plain", "1"),
    "kfac": ("plain", "1"),
    "kfac-bounded": ("default", "1"),
    "kfac-damping-4": ("plain", "4"),
    "kfac-damping-16": ("plain", "16"),
    "shampoo": ("plain", "1e-6"),
    "shampoo-bounded": ("default", "1e-6"),
    "shampoo-blocks": ("plain, blocks of 64", "1e-6"),
    "soap-bounded": ("default", ""),
    "muon": ("default", ""),
}
GPT_TITLES = {"adamw": "AdamW", "foof": "FOOF", "kfac": "K-FAC", "shampoo": "Shampoo", "soap": "SOAP", "muon": "Muon"}


def stored_exponents(name: str, widest: int, folder: str = "check-gpt") -> dict[str, list[float]] | None:
    """By reading, the exponents of a stored check up to a width; None: it does not reach that far."""
    from mukron.diagnose import Check

    check = Check.load(ROOT / "docs" / "figures" / folder / f"{name}.json")
    assert check.ok
    record = check.record
    if record.widths[-1] < widest:
        return None
    rows = tuple(row for row in record.rows if row.width <= widest)
    widths = tuple(width for width in record.widths if width <= widest)
    exponents: dict[str, list[float]] = {}
    for verdict in replace(check, record=replace(record, rows=rows, widths=widths)).features:
        if verdict.measured and (verdict.reading, verdict.role) != ("features", "output"):
            exponents.setdefault(verdict.reading, []).append(verdict.measured.slope)
    return exponents


def test_the_exponents_of_a_gpt_are_those_of_its_checks():
    page = (ROOT / "docs" / "transformers.md").read_text()
    for name, (steps, damping) in GPT_CHECKS.items():
        for widest in (512, 2048):
            if (exponents := stored_exponents(name, widest)) is None:
                continue
            ranges = [
                f"{min(slopes):+.2f} to {max(slopes):+.2f}" if slopes[1:] else f"{slopes[0]:+.2f}"
                for slopes in exponents.values()
            ]
            title = GPT_TITLES[name.partition("-")[0]]
            assert f"| {' | '.join([title, steps, damping, f'64 to {widest}', *ranges])} |" in page


def test_features_of_a_gpt_change_alike_up_to_2048():
    for name in GPT_CHECKS:
        if (exponents := stored_exponents(name, 2048)) is not None:
            assert max(abs(slope) for slope in exponents["features"] + exponents["attention"]) < 0.12


OTHER_CHECKS = [  # network and widest layer, method, steps
    (network, widest, method, steps)
    for network, widest in (("mlp", 2048), ("cnn", 512), ("cnn", 2048))
    for method, steps in (("muon", "default"), ("soap", "default, blocks of 64"), ("shampoo", "plain, blocks of 64"))
]


@pytest.mark.parametrize(("network", "widest", "method", "steps"), OTHER_CHECKS)
def test_the_exponents_of_an_mlp_and_a_cnn_are_those_of_their_checks(network, widest, method, steps):
    exponents = stored_exponents(f"{network}-{method}", widest, "check-mlp-cnn")
    assert exponents is not None
    assert max(map(abs, exponents["features"])) < 0.12
    ranges = [f"{min(slopes):+.2f} to {max(slopes):+.2f}" for slopes in list(exponents.values())[:2]]
    row = [network.upper(), GPT_TITLES[method], steps, f"64 to {widest}", *ranges, f"{exponents['descent'][0]:+.2f}"]
    assert f"| {' | '.join(row)} |" in (ROOT / "docs" / "transformers.md").read_text()


def test_what_kfac_gains_in_narrow_gpts_vanishes_with_more_damping():
    largest = []
    for name in ("kfac", "kfac-damping-4", "kfac-damping-16"):
        exponents = stored_exponents(name, 512)
        assert exponents is not None
        largest.append(max(exponents["features"] + exponents["attention"]))
    assert largest[0] > 1.5 * largest[1] > 1.5 * 1.5 * largest[2]
    assert largest[2] < 0.12


def gpt_losses() -> dict[tuple[str, int, int], dict[float, tuple[float, float]]]:
    """Of AdamW's study on a GPT: by scheme, width and epoch, mean losses in training and testing by learning rate."""
    seeds: dict[tuple[str, int, int, float], list[tuple[float, float]]] = {}
    with (ROOT / "docs" / "figures" / "transfer-gpt" / "epochs.csv").open() as file:
        for row in csv.DictReader(file):
            place = (row["scheme"], int(row["width"]), int(row["epoch"]), float(row["lr"]))
            seeds.setdefault(place, []).append((float(row["train_loss"]), float(row["test_loss"] or "nan")))
    losses: dict[tuple[str, int, int], dict[float, tuple[float, float]]] = {}
    for (scheme, width, epoch, lr), pairs in seeds.items():
        assert len(pairs) == 3
        means = fmean(pair[0] for pair in pairs), fmean(pair[1] for pair in pairs)
        losses.setdefault((scheme, width, epoch), {})[lr] = means
    return losses


def own_best_rows() -> list[str]:
    """SP at the best rate of each width beside muP at the best rate of the narrowest one."""
    losses, rows = gpt_losses(), []
    narrow = min(losses["mup", 64, 4].items(), key=lambda item: item[1])[0]
    for width in (64, 128, 256, 512, 1024):
        lr, (train, test) = min(losses["sp", width, 4].items(), key=lambda item: item[1])
        ours = losses["mup", width, 4][narrow]
        early = min(losses["sp", width, 1].values())[0], losses["mup", width, 1][narrow][0]
        cells = [f"{train:.3f}", power_of_two(lr), f"{test:.3f}", f"{ours[0]:.3f}", power_of_two(narrow)]
        cells += [f"{ours[1]:.3f}", *(f"{loss:.3f}" for loss in early)]
        rows.append(f"| {width} | {' | '.join(cells)} |")
    return rows


def head_rows() -> list[str]:
    """Mean losses by epoch at width 1024 for each size of the head and each pair of learning rates."""
    runs: dict[tuple[int, ...], list[list[float]]] = {}
    with (ROOT / "docs" / "figures" / "transfer-gpt" / "head.csv").open() as file:
        for width, head, embeddings, matrices, _, *losses in list(csv.reader(file))[1:]:
            if width == "1024":
                setting = (int(head), int(embeddings), int(matrices))
                runs.setdefault(setting, []).append([float(loss) for loss in losses])
    order = sorted(runs, key=lambda setting: (setting[0], -setting[1], setting[2]))
    return [
        f"| {head} | 2^{embeddings} | 2^{matrices} | "
        + " | ".join(f"{fmean(losses):.3f}" for losses in zip(*runs[head, embeddings, matrices], strict=True))
        + " |"
        for head, embeddings, matrices in order
    ]


def spectra_rows() -> list[str]:
    """Effective ranks of the factors of a GPT by width, at the start and after training."""
    with (ROOT / "docs" / "figures" / "gpt-damping" / "spectra.csv").open() as file:
        rows = list(csv.reader(file))[1:]
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return [
        f"| {start[0]} | " + " | ".join(f"{start[k]} | {trained[k]}" for k in (3, 4, 5, 6)) + " |"
        for start, trained in pairs
    ]


def power_of_two(number: float) -> str:
    return f"2^{round(math.log2(number))}"


def test_the_certificate_of_a_gpt_says_what_the_page_says():
    page = (ROOT / "docs" / "transformers.md").read_text()
    assert "\n".join(own_best_rows()) in page
    assert "\n".join(head_rows()) in page
    losses = gpt_losses()
    narrow = min(losses["mup", 64, 4].items(), key=lambda item: item[1])[0]
    for width in (64, 128, 256, 512, 1024):
        ours, best = losses["mup", width, 4][narrow][0], min(losses["sp", width, 4].values())[0]
        assert ours < best + 0.001
        assert ours < 1.9  # past the plateau of bigrams
    assert min(losses["sp", 1024, 1].values())[0] < min(losses["mup", 1024, 1].values())[0]


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("README.md", "transfer-kfac"),
        ("docs/transfer.md", "transfer-kfac"),
        ("docs/transfer.md", "transfer-own"),
        ("docs/transformers.md", "transfer-gpt"),
    ],
)
def test_certificates_are_those_of_their_studies(page, name):
    """README shows the table alone, the page its words too."""
    from mukron.study import Certificate

    (shown,) = re.findall(rf"<!-- docs/figures/{name} -->\n```text\n(.*?)\n```", (ROOT / page).read_text(), re.DOTALL)
    stored = json.loads((ROOT / "docs" / "figures" / name / "certificate.json").read_text())
    table = Certificate.from_dict(stored).table()
    assert shown == (table if page != "README.md" else replace(table, notes=())).text(width=None).rstrip()


def test_the_first_pictures_study_shows_what_is_claimed_of_it():
    from mukron.study import Certificate

    stored = json.loads((ROOT / "docs" / "figures" / "transfer-kfac" / "certificate.json").read_text())
    sp, mup = Certificate.from_dict(stored).judgements
    assert mup.drift.low < 0 < mup.drift.high
    assert sp.drift.high < mup.drift.low
    assert all(wider.better for wider in mup.wider)
    assert (sp.verdict, mup.verdict) == ("does not transfer", "transfers")
    lower = [ours.width for ours, theirs in zip(sp.optima, mup.optima, strict=True) if ours.value < theirs.value]
    assert lower == [256, 512, 1024]  # as docs/transfer.md admits


def test_the_first_study_is_the_one_of_make_demo():
    rule = re.search(r"^\t(\$\(BIN\)/mukron transfer .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    for variable, value in {"BIN)/": "", "METHOD)": "kfac", "PLAIN)": "--set method_options.trust=none"}.items():
        rule = rule.replace(f"$({variable}", value)
    assert f"```sh\n{rule}\n```" in (ROOT / "docs/transfer.md").read_text()


def test_the_study_of_an_own_network_ends_in_a_verdict():
    from mukron.study import Certificate

    stored = json.loads((ROOT / "docs" / "figures" / "transfer-own" / "certificate.json").read_text())
    assert [judgement.verdict for judgement in Certificate.from_dict(stored).judgements][-1] == "transfers"


def test_the_ranks_of_a_gpts_factors_are_those_measured():
    """And they say what the page says: with training they fall, and they do not grow with the width."""
    page = (ROOT / "docs" / "gpt-damping.md").read_text()
    rows = spectra_rows()
    assert all(row in page for row in rows)
    trained = [[float(cell) for cell in row.split("|")[3:9:4]] for row in rows]
    assert max(rank for ranks in trained for rank in ranks) < 8
    assert all(last <= first for first, last in zip(trained[0], trained[-1], strict=True))


def damping_losses(method: str) -> dict[str, dict[int, dict[float, float]]]:
    """Of a study over damping on the CNN: by rule and width, training losses by damping."""
    losses: dict[str, dict[int, dict[float, float]]] = {}
    with (ROOT / "docs" / "figures" / "damping-cnn" / f"{method}.csv").open() as file:
        for row in csv.DictReader(file):
            rule = row["scheme"].partition("/")[2].partition(":")[0]
            of_width = losses.setdefault(rule, {}).setdefault(int(row["width"]), {})
            of_width[float(row["damping"])] = float(row["train_loss"])
    return losses


@pytest.mark.parametrize("method", ["kfac", "foof"])
def test_which_damping_of_convolutions_follows_which_rule(method):
    losses = damping_losses(method)
    large = {rule: [losses[rule][width][16.0] for width in (16, 64)] for rule in losses}
    assert large["rescaled"][0] < 1.2 * large["rescaled"][1]  # the base width comes first
    assert large["mean-eigenvalue"][0] > 5 * large["mean-eigenvalue"][1]
    best = {rule: [min(of, key=of.__getitem__) for of in losses[rule].values()] for rule in losses}
    assert len(set(best["mean-eigenvalue"])) == 1
    assert best["rescaled"][0] >= 4 * best["rescaled"][-1]
    assert f"{losses['rescaled'][64][best['rescaled'][-1]]:.4f}" in (ROOT / "docs" / "theory.md").read_text()


@pytest.fixture(scope="module")
def coordinates():
    """The script of the coordinate checks of damping rules, as a module."""
    path = ROOT / "docs" / "figures" / "gpt-damping" / "coordinates.py"
    spec = importlib.util.spec_from_file_location("coordinates", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_coordinate_checks_is_that_of_their_numbers(coordinates):
    shown = (ROOT / "docs" / "gpt-damping.md").read_text().split(coordinates.MARKER)[1]
    assert shown.strip() == coordinates.table(coordinates.read())
    assert "not run" not in shown


def test_which_damping_rule_is_stable_with_how_many_rows(coordinates):
    """What the page says of the table."""
    runs = coordinates.read()
    updates = {key: coordinates.slopes(rows)[1] for key, rows in runs.items()}
    stable = {key for key, rows in runs.items() if coordinates.is_stable(rows)}
    ours = [key for key in runs if key[0] in ("K-FAC", "FOOF")]
    for method, rule, damping, batch in ours:
        if rule == "mean-eigenvalue":
            twin = (method, "rescaled", damping, batch)
            assert (method, rule, damping, batch) not in stable or twin in stable
            assert max(updates[method, rule, damping, batch]) > max(updates[twin])
            assert method == "FOOF" or min(updates[method, rule, damping, batch]) >= 0.885
    fixed = {key for key in runs if key[3] != "8 x width"}
    assert {key[2:] for key in stable & fixed if key[:2] == ("K-FAC", "rescaled")} == {("16", "16"), ("16", "512")}
    of_foof = {key for key in fixed if key[:2] == ("FOOF", "rescaled")}
    assert of_foof - stable == {("FOOF", "rescaled", "0.0625", "512")}
    assert {key[2:] for key in stable if key[:2] == ("FOOF", "mean-eigenvalue")} == {("0.0625", "16")}
    large = {(rule, dampings[-1]) for rule, dampings in coordinates.DAMPINGS["Shampoo"].items()}
    unstable = {key for key in runs.keys() - stable if key[0] == "Shampoo"}
    assert {key[1:] for key in unstable} == {(*one, "8 x width") for one in large if one[0] != "mean-eigenvalue"}
    assert f"{min(updates['SGD', '', '', '8 x width']):.2f}" == "-0.34"
