"""`dure plan layouts`: the table, its numbers, what is refused, JSON, every term."""

import json
import re
import sys
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from dure.cli.plan_layouts import show
from dure.plan import Gpu, Job, Machine, find_gpu, find_model, plan
from tests.cli.planned import LLAMA, answered, called

OWN = ["--model", "layers=12,width=768,heads=12,vocabulary=50000"]


def test_options_alone_are_those_of_layouts():
    alone = called(*LLAMA, "--nodes", "4")
    assert alone == called("layouts", *LLAMA, "--nodes", "4")
    code, out, _ = alone
    assert code == 0
    simplest = int(re.findall(r"The simplest of them is .*?, row (\d+)", " ".join(out.split()))[0])
    assert simplest > 15  # and so it has a row behind the others
    assert [int(n) for n in re.findall(r"^(\d+) ", out, re.M)] == [*range(1, 16), simplest]
    assert "a step is 4,194,304 tokens: 512 sequences of 8,192" in " ".join(out.split())
    for title in ("Why:", "Another layout is the fastest:", "The command, on each node:"):
        assert f"\n{title}\n" in out
    assert "dure run --nnodes 4 --nproc-per-node 8" in out
    for words in ([], ["-h"]):
        _, out, err = called(*words)
        assert all(name in out + err for name in ("layouts", "pipeline"))


def test_all_shows_every_layout_that_fits():
    _, out, _ = called(*ONE_A100, "1024", "--batch-tokens", "8192", "--all")
    # One rank, 8 sequences: microbatches of 1, 2, 4 or 8, three ways to recompute.
    shown = re.findall(r"^\d+(?: ~)? +(mb=\S+)", out, re.M)
    ways = ("", ",recompute=selective", ",recompute=full")
    assert sorted(shown) == sorted(f"mb={mb}{way}" for mb in (1, 2, 4, 8) for way in ways)


@pytest.fixture(scope="module")
def found():
    """A plan with layouts too long for a line."""
    machine = Machine(find_gpu("h100-p5"), 32)
    return plan(Job(find_model("llama3-70b"), 2**22), machine, changes=False)


def shown(found, width):
    screen = Console(width=width, file=StringIO())
    show(screen, found, "llama3-70b", everything=False)
    return screen.file.getvalue()


def test_columns_are_shares_of_a_step(found):
    """From parts by hand: half of 10 s computes, one in ten waits, in each of the other ways."""
    row = found.rows[0]
    time = dict.fromkeys(row.time, 0.0) | {"products": 3.0, "attention": 1.0, "elementwise": 0.5}
    time |= {"ends": 0.5, "launches": 1.0, "tp": 1.0, "dp": 2.0, "bubble": 0.96, "messages": 0.04}
    memory = dict.fromkeys(row.memory, 0.0) | {"parameters": 2e9, "scores": 0.5e9}
    first = replace(row, time=time, tokens=10_000, ideal=4.14, spread=1.1111, memory=memory)
    large = replace(first, tokens=10_200, memory=memory | {"parameters": 82e9})
    out = shown(replace(found, rows=(first, first), ties=2, too_large=(large,)), 200)
    assert "\nFaster, but too large (75.2 of 80 GB are usable):\n" in out  # 0.94 of them
    assert f"{large.layout}: 2% faster; 82.5 GB are 7.3 too many\n" in out
    heads, line, tie = (each.split() for each in out.splitlines()[1:4])
    assert heads[-6:] == ["GB", "compute", "tp", "dp", "bubble", "host"]
    assert line[2:] == ["1,000", "41%", "2.5", "50%", "10%", "20%", "10%", "10%"]
    assert tie[:2] == ["2", "~"]
    assert "2 of 2 layouts cannot be distinguished from the first" in " ".join(out.split())
    assert "GB of the first: parameters 2.0, scores 0.5.\n" in out


def test_lines_fit_the_terminal_and_layouts_are_whole(found):
    assert max(len(str(row.layout)) for row in found.rows[:15]) > 40  # more than 80 columns leave
    for width in (80, 100, 130):
        out = shown(found, width)
        table, _, rest = out.partition("Behind GB")
        text = rest.partition(" in a program:")[0]
        assert max(len(line.rstrip()) for line in (table + text).splitlines()) <= width
        words = "".join(word for word in table.split() if word[0].isalpha())
        for row in found.rows[:15]:
            assert str(row.layout) in words


def test_json_is_what_the_function_returns():
    model = replace(find_model("llama3-8b"), length=4096)
    machine = Machine(find_gpu("h100"), 2, 4).with_(memory_gb=141)
    words = [*LLAMA, "--batch-tokens", "2Mi", "--nodes", "2", "--gpus-per-node", "4"]
    words += ["--seq", "4096", "--compile", "--precision", "fp8", "--memory", "141"]
    found = plan(Job(model, 2**21, "fp8", compiled=True), machine)
    assert answered(*words) == json.loads(json.dumps(found.as_dict()))


def test_figures_agree_with_one_another():
    found = answered(*LLAMA)
    # 32 layers of 2 w (w + k) + 3 w h weights and the scores, 6 FLOPs each; attention 12 l s w;
    # norms, which are left out here, are 3e-5 of them.
    weights = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) + 128256 * 4096
    flops = 6 * weights + 12 * 32 * 8192 * 4096
    for row in found["rows"]:
        assert row["speed"] == pytest.approx(4194304 / row["seconds"])
        assert row["mfu"] == pytest.approx(row["speed"] * flops / (8 * 989e12), rel=1e-4)
        assert sum(row["time"].values()) == pytest.approx(row["seconds"])
        assert row["low"] < row["speed"] < row["high"]
        assert sum(row["memory"].values()) <= 0.94 * 80e9
    first = found["rows"][0]
    for row in found["too_large"]:
        assert row["speed"] > first["speed"]
        assert sum(row["memory"].values()) > 0.94 * 80e9


ONE_A100 = [*OWN, "--gpu", "a100", "--gpus-per-node", "1", "--seq"]


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ([*ONE_A100, "1024", "--batch-tokens", "4Mi"], 4194304),
        ([*ONE_A100, "500", "--batch-tokens", "512k"], 512000),
        ([*ONE_A100, "500", "--batch-tokens", "2.5M"], 2500000),
        ([*ONE_A100, "1024", "--batch-tokens", "8,192"], 8192),
        # Without a batch, a power of two for each rank.
        (LLAMA, 4194304),
        ([*LLAMA, "--nodes", "3"], 16 * 24 * 8192),
    ],
)
def test_a_batch_has_units_and_a_default(words, tokens):
    assert answered(*words)["job"]["batch_tokens"] == tokens


def test_a_model_by_its_configuration_is_that_of_its_sizes(tmp_path):
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    more = {"num_key_value_heads": 4, "intermediate_size": 3000, "vocab_size": 50000}
    config.write_text(json.dumps(sizes | more | {"hidden_act": "silu"}))
    on = ["--seq", "1024", "--gpu", "a100"]
    model = answered(*OWN, *on)["job"]["model"]
    assert (model["groups"], model["hidden"], model["gated"]) == (12, 2688, 1)
    by_file = answered("--config", str(config), *on)["job"]["model"]
    assert by_file == model | {"groups": 4, "hidden": 3000}


def test_here_is_measured_and_computes_in_float32(monkeypatch):
    asked = []

    def here(ranks, *, again):
        asked.append((ranks, again))
        return Machine(Gpu("this machine", "cpu", 0.1, 16, 0.02, 5, 1), 1, ranks)

    monkeypatch.setitem(sys.modules, "dure.cli.here", SimpleNamespace(here=here))
    job = answered("--model", "gpt2", "--here")["job"]
    assert (job["precision"], job["batch_tokens"]) == ("fp32", 65536)
    code, out, _ = called("--model", "gpt2", "--measure", "--gpus-per-node", "4")
    assert asked == [(2, False), (4, True)]
    assert code == 0
    assert "dure run --nproc 4 train.py" in out
    assert 'init_device_mesh("cpu"' in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "h100"], "a model is needed"),
        (["--model", "gpt2"], "a machine is needed"),
        (["--model", "gpt2", "--config", "x", "--gpu", "h100"], "the model is given twice"),
        (["--model", "layers=2", "--gpu", "h100"], "a model needs a width and layers"),
        (["--model", "layers=2,width=9000000", "--gpu", "h100"], "Write layers=32,width=4096"),
        (["--model", "layers=2,width=64,experts=8", "--gpu", "h100"], "mixtures of experts"),
        (["--model", "llama3-9b", "--gpu", "h100"], "near names: llama3-8b"),
        (["--model", "gpt2", "--gpu", "h10"], "near names: h100"),
        (["--model", "gpt2", "--gpu", "h100", "--here"], "Leave out --gpu"),
        (["--model", "gpt2", "--gpu", "h100", "--nodes", "0"], "must be at least 1"),
        ([*LLAMA, "--precision", "nf4"], "4-bit formats are not planned for"),
        ([*LLAMA, "--batch-tokens", "4M"], "Take --batch-tokens 4194304 (512 sequences)"),
        ([*LLAMA, "--batch-tokens", "4Gi"], "'4Gi'"),
        ([*LLAMA, "--explain", "99"], "the table has no such row"),
        ([*LLAMA, "--explain", "fsdp=4"], "fsdp=4,mb=1 has 4 ranks, the machine 8"),
        ([*LLAMA, "--explain", "tp=2,pp=4,interleaved=5"], "does not divide the job"),
    ],
)
def test_what_is_wrong_is_one_line(words, said):
    code, out, err = called(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("dure plan: error: ")
    assert said in err
