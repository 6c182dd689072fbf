"""kubectl as tests run it: what cannot have been carried out is tried again, nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cluster import Cluster


def cluster(folder: Path, complaint: str) -> Cluster:
    """One whose kubectl complains once, and prints how often it was run."""
    runs = folder / "runs"
    script = f"""#!/bin/sh
echo run >> {runs}
[ $(wc -l < {runs}) = 1 ] && echo '{complaint}' >&2 && exit 1
echo "$(cat) $(wc -l < {runs})"
shift 2; echo "$@" > {folder}/asked
"""
    (folder / "kubectl").write_text(script)
    (folder / "kubectl").chmod(0o755)
    return Cluster("t", folder / "kubeconfig", folder / "kubectl")


@pytest.mark.parametrize(
    "complaint",
    [
        "Unable to connect to the server: net/http: TLS handshake timeout",
        "The connection to the server 127.0.0.1:6443 was refused - did you specify the right host?",
        "error dialing backend: dial tcp 10.0.0.2:10250: connect: connection refused",
    ],
)
def test_it_is_run_again_while_it_reaches_nobody(tmp_path: Path, complaint: str) -> None:
    found = cluster(tmp_path, complaint)
    assert found.kubectl("apply", "-f", "-", input="body", check=True).stdout == "body 2\n"


def test_what_may_have_been_done_is_not_done_again(tmp_path: Path) -> None:
    found = cluster(tmp_path, "unexpected EOF")
    with pytest.raises(AssertionError, match="kubectl create: unexpected EOF"):
        found.kubectl("create", check=True)


def test_without_a_check_each_answer_is_an_answer(tmp_path: Path) -> None:
    found = cluster(tmp_path, "TLS handshake timeout")
    assert found.kubectl("exec").returncode == 1


def test_what_a_program_says_is_an_answer(tmp_path: Path) -> None:
    found = cluster(tmp_path, "connection refused")
    with pytest.raises(AssertionError, match="connection refused"):
        found.kubectl("exec", "pod", "--", "curl", check=True)


def test_what_was_deleted_the_first_time_need_not_be_there_the_second(tmp_path: Path) -> None:
    found = cluster(tmp_path, "connection refused")
    found.kubectl("delete", "pod", "p", input="", check=True)
    assert (tmp_path / "asked").read_text() == "delete pod p --ignore-not-found\n"
