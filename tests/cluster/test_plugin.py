"""The kubectl plugin on a gang that trains: what only kubelets and trainers can tell."""

import re
from collections.abc import Iterator

import pytest

from support.cluster import wait_for
from support.plugin import Plugin
from support.site import Site, digits, unhurried

NAME = "watched"


@pytest.fixture(scope="module")
def plugin(site: Site) -> Iterator[Plugin]:
    """With a gang that trains for as long as the tests of this file need it."""
    obj = unhurried(digits(NAME, steps=100_000, hang={"stepSeconds": 20}))
    (trainer,) = obj["spec"]["template"]["spec"]["containers"]
    talks = 'echo "here is replica $DDPJOB_REPLICA"; exec "$@"'
    trainer["command"] = ["sh", "-c", talks, "sh", *trainer["command"]]
    site.apply(obj)
    site.wait_running(NAME, 1, step=5, snapshot_after=0)
    yield Plugin(site.cluster.kubeconfig, site.namespace)
    site.delete(NAME)


def gang(plugin: Plugin) -> list[dict[str, str]]:
    """The table of `status`, a row for each replica."""
    lines = plugin.says("status", NAME).splitlines()
    head, *rows = (re.split(r" {2,}", line) for line in lines[lines.index("") + 1 :])
    return [dict(zip(head, row, strict=True)) for row in rows]


def stacks(plugin: Plugin, wanted: str) -> str:
    """What `stacks` tells once that is there: it waits for 3 s, too short for a slow machine."""

    def told() -> str | None:
        done = plugin.run("stacks", NAME, "--hung")
        whole = (done.returncode, done.stderr) == (0, "")
        return done.stdout if whole and re.search(wanted, done.stdout) else None

    return wait_for(told, f"the stacks to tell of {wanted}")


def test_status_shows_how_far_each_replica_is(site, plugin):
    def all_told() -> list[dict[str, str]] | None:
        rows = gang(plugin)
        told = all(
            row["STEP"].isdigit() and "-" not in (row["SNAPSHOT"], row["STEPS/S"]) for row in rows
        )
        return rows if told else None

    rows = wait_for(all_told, "every replica to tell its step")
    assert {row["NODE"] for row in rows} == site.nodes(NAME)
    assert {(row["POD"], row["READY"], row["ROUND"]) for row in rows} == {("Running", "yes", "0")}
    assert all(float(row["STEPS/S"]) > 0 for row in rows)
    before = [int(row["STEP"]) for row in rows]
    wait_for(
        lambda: all(
            row["STEP"].isdigit() and int(row["STEP"]) > old  # else its page was late
            for row, old in zip(gang(plugin), before, strict=True)
        ),
        "the steps to go on",
    )


def test_logs_are_of_all_replicas_or_of_one(site, plugin):
    lines = plugin.says("logs", NAME).splitlines()
    for replica in range(3):
        assert f"[pod/{NAME}-{replica}/trainer] here is replica {replica}" in lines
    (last,) = plugin.says("logs", NAME, "--replica", "1", "--tail", "1").splitlines()
    assert last.startswith(f"[pod/{NAME}-1/trainer] ")
    assert "has 0 to 2" in plugin.refuses("logs", NAME, "--replica", "3")
    assert "has had no failure" in plugin.says("logs", NAME, "--failed")


def test_snapshots_are_listed_in_a_pod(site, plugin):
    head, *rows = plugin.says("snapshots", "ls", NAME).splitlines()
    assert head.split()[:4] == ["DIRECTORY", "ATTEMPT", "ROUND", "STEP"]
    assert rows
    assert all(int(row.split()[3]) % 10 == 0 for row in rows)


@pytest.mark.tier("all")
def test_stacks_show_where_each_rank_is_and_it_trains_on(site, plugin):
    before = site.status(NAME)["restarts"]
    told = plugin.says("stacks", NAME)
    ranks = re.findall(r"^--- ranks? ([\d,-]+)$", told, re.MULTILINE)
    assert sorted(gang_ranks(ranks)) == [0, 1, 2], told
    assert "no answer" not in told
    assert "digits.py" in told
    assert len(plugin.says("stacks", NAME, "--replica", "1").split("--- rank 1\n")) == 2
    assert site.status(NAME)["restarts"] == before


def gang_ranks(shown: list[str]) -> list[int]:
    """0-2,5 in numbers."""
    runs = [one.split("-") for text in shown for one in text.split(",")]
    return [rank for run in runs for rank in range(int(run[0]), int(run[-1]) + 1)]


@pytest.mark.tier("all")
def test_after_a_hang_stacks_and_log_say_where(site, plugin):
    stacks(plugin, "no process has hung")
    site.kill_training(f"{NAME}-1", signal="STOP")
    wait_for(lambda: site.status(NAME)["restarts"].get("inPlace"), "the restart in place")
    # The first to be late is found: the one that is stopped, or one that waits for it.
    head = rf"^--- ({NAME}-\d), attempt 1"
    said = re.split(head, stacks(plugin, f"(?m){head}"), flags=re.MULTILINE)
    for pod, told in zip(said[1::2], said[2::2], strict=True):  # one pod, or more that were late
        stopped = "no answer: it is stopped" in told
        assert (pod == f"{NAME}-1") == stopped, (pod, told)
        assert stopped or "(most recent call first)" in told, (pod, told)
    failed = plugin.says("logs", NAME, "--failed")
    assert "Hang" in failed.splitlines()[0]
    assert f"--- {NAME}-{site.status(NAME)['lastFailure']['replica']}, attempt 1" in failed
    assert len(failed.splitlines()) > 5
    wait_for(
        lambda: "RestartedInPlace" in plugin.says("events", NAME),
        "the event of the restart in place",
    )
    assert "  Hang " in plugin.says("account", NAME)


def test_a_suspended_job_says_how_to_look_at_its_snapshots(site, plugin):
    plugin.says("suspend", NAME)
    site.wait_phase(NAME, "Suspended")
    wait_for(lambda: not site.pods(NAME), "its pods to go")
    assert f"snapshot ls /snapshots/{NAME}` in a pod that mounts" in plugin.refuses(
        "snapshots", NAME
    )
    assert "has no pod with a log" in plugin.refuses("logs", NAME)
    assert "productive" in plugin.says("account", NAME), "there is no pod to ask"
    assert {row["POD"] for row in gang(plugin)} == {"-"}
