"""`kubectl ddp plan`: what it prints, what it refuses, and sizes that nobody has."""

from __future__ import annotations

import json

import pytest

from kubectl_ddp import cli
from kubectl_ddp.planning.parts import KINDS, STATES
from kubectl_ddp.planning.text import SWEPT

Output = pytest.CaptureFixture[str]
QUICK = ("--period", "5d")


def said(capsys: Output, *words: str) -> str:
    assert cli.run(["plan", *QUICK, *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_it_shows_where_the_time_goes_and_what_each_option_gains(capsys: Output) -> None:
    out = said(capsys, "--gpus", "4096", "--every-steps", "500", "--capacity-wait", "5m")
    head, states, causes, options = out.strip().split("\n\n")
    assert "512 x 8 GPUs; a failure every 12h" in head
    assert "every 500 steps, 8m20s; best 94, Daly's formula 94" in head
    shown = [line.split()[0] for line in states.splitlines()[1:]]
    assert shown == [name for name in STATES if name in shown], "in the ledger's order and words"
    assert {"repeated", "recovering", "held", "waiting", "starting", "warmup"} <= set(shown)
    assert {line.split()[0] for line in causes.splitlines()[1:]} <= {*KINDS, "no"}
    rows = options.splitlines()
    assert rows[0].split()[:2] == ["OPTION", "GOODPUT"]
    assert rows[1].startswith("as given ")
    assert any(row.startswith("snapshots every 94 steps ") and "+++" in row for row in rows)
    assert rows[-1].startswith("all that gain, together ")


def test_the_same_seed_says_the_same(capsys: Output) -> None:
    one, again, other = (said(capsys, "--gpus", "512", "--seed", n) for n in ("1", "1", "2"))
    assert one == again != other


def test_several_sizes_are_a_row_each(capsys: Output) -> None:
    head, *rows = said(capsys, "--gpus", "4,64,4096,100000").splitlines()
    assert head.endswith("   ".join(key.upper() for key in SWEPT))
    assert [row.split()[0] for row in rows] == ["4", "64", "4,096", "100,000"]
    useful = [float(row.partition(" h ")[0].split()[-1]) for row in rows]
    assert useful == sorted(useful)
    assert " - " in rows[0], "a gang of one pod has nothing for a standby to take over"


def test_json_is_for_programs(capsys: Output) -> None:
    found = json.loads(said(capsys, "--gpus", "64", "--json"))
    assert found["gpus"] == 64
    assert found["low"] <= found["goodput"] <= found["high"]
    assert sum(sum(one.values()) for one in found["shares"].values()) == pytest.approx(1)
    gains = {one["option"]: one["points"] for one in found["options"]}
    assert gains["standby"] < 0 < gains["all"] >= max(gains.values())
    assert {"oftener", "rarer", "standby", "faster"} <= {one["option"] for one in found["options"]}
    assert len(json.loads(said(capsys, "--gpus", "64,128", "--json"))) == 2


#: Words of a command line -> of the one line that refuses them.
REFUSED = {
    "": "say how many GPUs the gang has: --gpus 512",
    "--gpus 0": "--gpus 0: it is 1 at least",
    "--gpus -8": "--gpus '-8' is no whole number",
    "--gpus 8,,64": "--gpus '' is no whole number",
    "--gpus 1e3": "--gpus '1e3' is no whole number",
    "--gpus 999999999999999999999": "is no whole number: give one of 1 to 100,000,000",
    "--gpus 12": "say 8 or 16, or another --gpus-per-node",
    f"--gpus {','.join(['8'] * 21)}": "--gpus has 21 sizes: give 20 at most",
    "--gpus 8 --node-mtbf 0": "--node-mtbf 0: it is 0.001s at least",
    "--gpus 8 --node-mtbf forever": "--node-mtbf 'forever' is no time: write 250ms, 30s",
    "--gpus 8 --node-mtbf 3d4": "--node-mtbf '3d4' is no time",
    "--gpus 8 --node-mtbf 40000d": "36500d at most",
    "--gpus 8 --node-mtbf nan": "is no time",
    "--gpus 8 --step-seconds 1us": "--step-seconds '1us' is no time",
    "--gpus 8 --step-seconds 0": "--step-seconds 0: it is 1e-06s at least",
    "--gpus 8 --snapshot-stall=-1s": "--snapshot-stall '-1s' is no time",
    "--gpus 8 --data-wait 2s": "--data-wait 2s is longer than --step-seconds 1s",
    "--gpus 8 --every-steps 0": "--every-steps 0: it is 1 at least",
    "--gpus 8 --every-steps often": "--every-steps 'often' is no whole number",
    "--gpus 8 --standby=-1": "--standby '-1' is no whole number",
    "--gpus 8 --shares disk=1": "write KIND=..., a KIND of process, hang, gpu, pod, node",
    "--gpus 8 --shares node=0": "--shares are all 0",
    "--gpus 8 --shares node=many": "--shares node 'many' is no number",
    "--gpus 8 --announced 140%": "--announced '140%' is no share: write 40% or 0.4",
    "--gpus 8 --detection 20s": "--detection '20s': write KIND=...",
    "--gpus 8 --detection hang=soon": "--detection hang 'soon' is no time",
    "--gpus 8 --warmup \u0663s": "is no time",
    "--gpus 64 --standby 1 --restart in-place": "--standby needs --restart least",
    "--gpus 8 --restart some": "--restart some: it is one of least, in-place, all",
    "--gpus 8 --period 0": "--period 0: it is 60s at least",
}


@pytest.mark.parametrize(("words", "line"), REFUSED.items())
def test_a_bad_number_is_refused_in_one_line(words: str, line: str, capsys: Output) -> None:
    assert cli.run(["plan", *words.split()]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert line in err


#: Gangs that nobody has -> of what is said of them.
ABSURD = {
    "--gpus 100000000": "Nothing worth the name is trained: a failure comes every 1.82s",
    "--gpus 64 --node-mtbf 1h --restart all --period 200d": "Runs were cut to 10d: 2,000 failures.",
    "--gpus 4096 --step-seconds 1d": "A step takes longer than the 12h between two failures.",
    "--gpus 4096 --every-steps 1000000": "Snapshots are rarer than failures: see --every-steps.",
    "--gpus 4096 --every-steps 10 --snapshot-write 35s": "one in 4 is made, every 40 steps",
    "--gpus 64 --standby 1000": "There are as many standbys as pods, or more",
    "--gpus 1": "1 x 1 GPUs",
    "--gpus 8 --node-mtbf 36500d --period 60s": "1 x 8 GPUs",
    "--gpus 8 --snapshot-write 36500d --snapshot-stall 36500d": "useful day",
    "--gpus 800 --start 0 --start-per-pod 0 --warmup 0 --warmup-spare 0 --teardown 0"
    " --snapshot-stall 0 --snapshot-write 0 --detection hang=0,gpu=0,pod=0,node=0,hub=0"
    " --step-seconds 0.001ms": "100.00 %",
}


@pytest.mark.parametrize(("words", "line"), ABSURD.items())
def test_gangs_that_nobody_has_come_to_an_end(words: str, line: str, capsys: Output) -> None:
    code = cli.run(["plan", *QUICK, *words.split()])
    out, err = capsys.readouterr()
    assert line in (err if code else out)
    assert "nan" not in out
    assert "inf" not in out
