"""``mukron plan --ranks`` as a user runs it: known shapes, built-in networks, one's own; files and errors."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

from mukron.cli import app
from mukron.data.text import read_wikitext
from test_plan_command import plan, refuse

LLAMA = ("--ranks", 64, "--shapes", "llama-7b", "--batch", 512, "--positions", 2048)
GPT = ("--ranks", 4, "--model", "gpt", "--batch", 64, "--positions", 32)


def own_network(width: int, depth: int = 2) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def test_shapes_that_are_known(tmp_path):
    output = plan(*LLAMA, "--bandwidth", 1e10, "--sharding", "plain", "--json", tmp_path / "plan.json")
    assert "K-FAC on LLaMA 7B, 6,738,415,616 parameters: 64 ranks, batch 512 x 2048" in output
    assert "layers.*.mlp.down x 32" in output
    assert "A step with 64 ranks, plain" in output
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert stored["format"] == "mukron.ranks"
    assert len(stored["state_by_rank"]) == 64
    assert sum(stored["numbers"]["by_rank"]) == pytest.approx(stored["numbers"]["total"])


def test_methods_that_need_gradients_alone():
    """Muon leaves the head to the fallback rule; what arrives beside data-parallel SGD's is the moves."""
    output = plan(*LLAMA, "--method", "muon")
    assert "Muon on LLaMA 7B, 6,738,415,616 parameters: 64 ranks, batch 512 x 2048\n" in output
    assert "head" not in output
    assert "layers.*.mlp.down x 32" in output
    assert "curvature of" not in output
    (total,) = (line.split() for line in output.splitlines() if line.startswith("all "))
    assert total[1] == "-"
    assert float(total[-1]) < 1.5
    assert "head" in plan(*LLAMA, "--method", "shampoo", "--set", "method_options.inverse_every=10")


def test_a_slower_network_takes_longer():
    fast, slow = (plan(*LLAMA, "--bandwidth", bandwidth).split("time of that")[1] for bandwidth in (1e12, 1e9))
    assert fast.split()[1] == "ms"
    assert slow.split()[1] == "s"


def test_a_built_in_network_of_any_depth():
    output = plan(*GPT, "--width", 4096, "--set", "depth=32", "--set", "method_options.factor_every=10")
    assert "blocks.*.attention.query x 32" in output
    assert "factors every 10, inverses every 10" in output


def test_ones_own_network():
    factory = ("--factory", "test_plan_ranks_command:own_network", "--width", 512, "--set", "depth=3")
    output = plan("--ranks", 2, *factory, "--batch", 8, "--method", "foof", "--communication", "rows")
    assert "FOOF on Sequential, 787,968 parameters: 2 ranks, batch 8" in output
    assert "* x 3" in output


def own_tokens(width: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(16, width), nn.Linear(width, 16))


def test_built_in_networks_of_tokens_take_their_usual_samples():
    usual = plan(*GPT[:6], "--width", 256)
    assert "4 ranks, batch 64 x 64, factors" in usual
    note = "Samples of 64 tokens, the usual number for gpt; give positions for another.\n"
    assert usual.replace(note, "") == plan(*GPT[:6], "--width", 256, "--positions", 64)
    assert "batch 64 x 16, factors" in plan(*GPT[:6], "--width", 256, "--set", "context=16")
    assert "batch 64 x 1, factors" in plan(*GPT[:6], "--width", 256, "--positions", 1)
    words = ("--ranks", 4, "--model", "cbow", "--width", 64, "--batch", 64, "--set", "method_options.trust=none")
    assert "batch 64 x 1 to 8, factors" in plan(*words)  # the embedding sees each word, the head their mean


def test_the_usual_samples_are_those_of_the_usual_data():
    from mukron.data import tokens
    from mukron.models import NEIGHBOURS, get_model

    gpt = get_model("gpt")
    assert gpt.sample(gpt.factory(32, depth=1)) == (tokens.LENGTH,)
    window = inspect.signature(read_wikitext).parameters["window"].default
    assert 2 * window == NEIGHBOURS


def test_positions_stand_in_the_header_of_any_network():
    assert "4 ranks, batch 64 x 1, factors" in plan(*MLP, "--width", 64)
    images = ("--ranks", 4, "--model", "resnet18", "--width", 1, "--batch", 64, "--sample", "3,32,32")
    assert "4 ranks, batch 64 x 1 to 1024, factors" in plan(*images)


def test_other_networks_of_tokens_need_their_positions():
    own = ("--ranks", 4, "--factory", "test_plan_ranks_command:own_tokens", "--width", 8, "--batch", 64)
    assert "this network takes tokens" in (said := refuse(*own))
    assert "give --positions, as in --positions 1024, or 1" in said
    known = refuse("--ranks", 4, "--shapes", "llama-7b", "--batch", 64)
    assert "--shapes llama-7b is a network of tokens: give --positions, as in --positions 2048" in known
    assert "batch 64 x 1," in plan(*own, "--positions", 1)
    assert "batch 64 x 12," in plan(*own, "--sample", 12)


def test_other_requests_are_refused():
    assert "needs one of --model NAME" in refuse("--ranks", 2, "--batch", 8)
    assert "need --width" in refuse(*GPT)
    assert "--ranks needs --batch" in refuse(*LLAMA[:4])
    assert "unknown shapes 'llama-8b'; known: llama-7b" in refuse("--ranks", 2, "--shapes", "llama-8b", "--batch", 8)
    assert "--sample 3,32,32" in refuse("--ranks", 2, "--model", "resnet18", "--width", 1, "--batch", 8)
    assert "kfac has no such option" in refuse(*LLAMA, "--set", "method_options.beta=1")
    assert "--bandwidth -1: expected a positive number" in refuse(*LLAMA, "--bandwidth", -1)
    assert "--from: of a plan from a study; leave out --ranks" in refuse(*LLAMA, "--from", "tuned")
    assert "--batch: needs --ranks" in refuse("--width", 64, "--batch", 8)
    assert "Missing option '--width'" in refuse()
    assert "fixed sizes" in refuse(*LLAMA, "--width", 64)


MLP = ("--ranks", 4, "--model", "mlp", "--batch", 64)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (("--ranks", 0, *LLAMA[2:]), "ranks=0: expected at least 2"),
        (("--ranks", -3, *LLAMA[2:]), "ranks=-3: expected at least 2"),
        (("--ranks", 10**6, *LLAMA[2:4], "--batch", 10**9), "at most 100000"),
        ((*LLAMA[:4], "--batch", 10**40), "at most 2^63"),
        ((*LLAMA[:4], "--batch", 64, "--positions", 10**40), "at most 2^63"),
        ((*LLAMA, "--bandwidth", "inf"), "--bandwidth inf: expected a positive number"),
        ((*LLAMA, "--bandwidth", "1e-300"), "expected a positive number a second, 1 to 1e+30"),
        ((*LLAMA, "--speed", "nan"), "--speed nan: expected a positive number"),
        ((*LLAMA, "--communication", "auto:measured"), "a plan measures nothing"),
        ((*LLAMA, "--set", "method_options.communication=rows"), "give it as --communication rows"),
        ((*LLAMA, "--set", "method_options.fused=true"), 'choose sharding="plain", or leave out fused'),
        ((*LLAMA, "--set", "method_options.fisher=mc:x"), "expected a whole number of draws"),
        ((*LLAMA, "--width", 0), "fixed sizes"),
        ((*MLP, "--width", 0), "--width 0: expected a positive number"),
        ((*MLP, "--width", "nan"), "--width nan: expected a positive number"),
        ((*MLP, "--width", -4), "--width -4: expected a positive number"),
        ((*MLP, "--width", 2.5), "width=2.5: the widths of this network are whole numbers"),
        ((*MLP, "--width", 1e30), "width must be above 0 and at most 1e+15, got 1e+30"),
        ((*MLP, "--width", 64, "--set", "method_options.exclude=fc1,fc2,fc3"), "has no layer that kfac preconditions"),
        ((*GPT[:6], "--width", 64, "--sample", "0"), "expected the sizes of a sample"),
        ((*GPT[:6], "--width", 64, "--sample", "3.5"), "expected the sizes of a sample"),
        ((*GPT[:6], "--width", 64, "--sample", "17,17"), "the network does not take --sample 17,17"),
        ((*GPT, "--width", 64, "--sample", "17"), "leave out --positions"),
        (("--ranks", 4, "--factory", "torch.nn:ReLU", "--width", 8, "--batch", 64), "has no layer that kfac"),
        ((*LLAMA, "--json", "/"), "cannot write /: it is a folder"),
        ((*LLAMA, "--json", "/dev/null/plan.json"), "cannot write to /dev/null: it is a file"),
    ],
)
def test_bad_values_are_refused_in_one_line(request_, said):
    result = CliRunner().invoke(app, ["plan", *map(str, request_)], catch_exceptions=False)
    (error,) = result.stderr.splitlines()
    assert said in error
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.mark.parametrize("option", ["--ranks", "--batch", "--positions", "--bandwidth", "--speed", "--width"])
def test_what_is_not_a_number_is_refused(option):
    assert f"Invalid value for '{option}'" in refuse(*LLAMA, option, "many")


@pytest.mark.parametrize("option", ["--batch", "--positions"])
def test_nothing_at_all_is_refused(option):
    assert f"Invalid value for '{option}'" in refuse(*LLAMA, option, 0)


def test_layers_that_are_written_as_one_can_be_excluded():
    output = plan(*LLAMA, "--set", "method_options.exclude=layers.*.attention.{q,o},head")
    assert "layers.*.attention.{k,v}" in output
    assert "{q,o}" not in output


def test_the_page_shows_what_its_command_prints():
    page = (Path(__file__).parent.parent / "docs" / "distributed.md").read_text()
    commands = [shlex.split(line)[2:] for line in page.splitlines() if line.startswith("mukron plan --ranks")]
    (shown,) = re.findall(r"<!-- plan -->\n```text\n(.*?)\n```", page, re.DOTALL)
    assert shown == plan(*commands[0]).rstrip()
    assert "blocks.*.mlp.up x 32" in plan(*commands[1])
    assert len(commands) == 3  # the last one names a module of the reader's
