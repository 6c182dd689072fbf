"""`ddpjob-trainer init`: YAML that reads back as the files were, a valid job, clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ddpjob_trainer import cli, init
from support.world import crd_schema

SCRIPT = "import torch\n\nprint('Grüße', torch.ones(2))\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "My_Train.v2.py"
    path.write_text(SCRIPT)
    return path


def manifest(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, dict[str, Any]]:
    """Objects by kind of what the command prints."""
    assert cli.main(["init", *map(str, words)]) == 0
    return {body["kind"]: body for body in yaml.safe_load_all(capsys.readouterr().out)}


def trainer(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (found,) = objects["DDPJob"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_a_script_of_this_machine_travels_in_a_config_map(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = script.parent / "model.py"
    other.write_text("x = 1")
    found = manifest(capsys, script, other, "--replicas", 3, "--", "--lr", "0.1", "--flag")
    assert found["ConfigMap"]["data"] == {script.name: SCRIPT, "model.py": "x = 1"}
    assert found["ConfigMap"]["metadata"]["name"] == "my-train-v2-files"
    job = found["DDPJob"]
    assert (job["metadata"]["name"], job["spec"]["replicas"]) == ("my-train-v2", 3)
    container = trainer(found)
    command = container["command"]
    assert command == [
        "ddpjob-trainer", "run", "/workspace/job/My_Train.v2.py", "--lr", "0.1", "--flag",
    ]  # fmt: skip
    (mount,) = container["volumeMounts"]
    (volume,) = job["spec"]["template"]["spec"]["volumes"]
    assert command[2].startswith(mount["mountPath"])
    assert volume == {"name": mount["name"], "configMap": {"name": "my-train-v2-files"}}
    assert "limits" not in container["resources"]
    claim = job["spec"]["snapshot"]["volume"]["persistentVolumeClaim"]
    assert claim == {"claimName": "my-train-v2-snapshots"}
    jsonschema.Draft202012Validator(crd_schema()).validate(job)


def test_a_script_of_an_image_needs_no_config_map(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--image",
        "r/mine:1",
        "--name",
        "n",
        "--gpus",
        8,
        "--claim",
        "10Gi",
        "--every-steps",
        7,
    )
    found = manifest(capsys, "/app/train.py", *words)
    assert found.keys() == {"PersistentVolumeClaim", "DDPJob"}
    container = trainer(found)
    assert (container["image"], container["command"][-1]) == ("r/mine:1", "/app/train.py")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    spec = found["DDPJob"]["spec"]
    assert (spec["nprocPerNode"], spec["snapshot"]["everySteps"]) == ("auto", 7)
    volume = found["PersistentVolumeClaim"]
    assert volume["metadata"]["name"] == "n-snapshots"
    assert volume["spec"]["resources"]["requests"]["storage"] == "10Gi"
    jsonschema.Draft202012Validator(crd_schema()).validate(found["DDPJob"])


@pytest.mark.parametrize("name", ["null", "yes", "on", "n", "true", "1.0", "007", "0x10"])
def test_names_stay_strings(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / name).write_text("x\n")
    (tmp_path / f"{name}.py").write_text(SCRIPT)
    words = ["--name", name] if name[0].isalpha() else ["--name", "a"]
    found = manifest(capsys, tmp_path / f"{name}.py", tmp_path / name, *words)
    assert found["ConfigMap"]["data"].keys() == {name, f"{name}.py"}
    assert found["DDPJob"]["metadata"]["name"] == words[1]


def test_kubernetes_puts_no_variables_into_arguments(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = manifest(capsys, script, "--snapshots", "2024", "--", "$(RANK)", "a$$b", "\x7f")
    assert trainer(found)["command"][3:] == ["$$(RANK)", "a$$$$b", "\x7f"]
    volume = found["DDPJob"]["spec"]["snapshot"]["volume"]
    assert volume == {"persistentVolumeClaim": {"claimName": "2024"}}


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=60))
def test_any_text_reads_back_as_it_was(text: str) -> None:
    assert yaml.safe_load(f"data:\n  x: {init._scalar(text)}\n") == {"data": {"x": text}}


@pytest.mark.parametrize(
    "text",
    ["", "\n", "a", "a\n", "a\n\n", " a\n", "\ta\n", "a\n  b\n", "a \n", "# c\n", "---\na\n",
     "a\r\nb", "é😀\n", "\x00😀", "a\n \n", "\x85a", "\ufeffa", "a\u2028b", "a\\b\"\n\n"],
)  # fmt: skip
def test_awkward_text_reads_back_as_it_was(text: str) -> None:
    assert yaml.safe_load(f"data:\n  x: {init._scalar(text)}\n") == {"data": {"x": text}}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.py"], "nowhere.py: no such file here"),
        (["nowhere.py", "--image", "i"], "nowhere.py: no such file here"),
        (["/app/train.py"], "with --image"),
        (["/app/train.py", "b.py", "--image", "i"], "b.py: files travel"),
        (["SCRIPT", "--name", "Bad"], "--name 'Bad'"),
        (["SCRIPT", "--name", "x" * 54], "53 at most"),
        (["SCRIPT", "--snapshots", "a: b"], "--snapshots 'a: b'"),
        (["SCRIPT", "DOTS"], "letters, digits"),
        (["SCRIPT", "--replicas", "0"], "--replicas 0: at least 1"),
        (["SCRIPT", "--every-steps", "0"], "--every-steps 0: at least 1"),
        (["SCRIPT", "--gpus", "-1"], "--gpus -1: at least 0"),
        (["SCRIPT", "--nproc", "0"], "--nproc 0: at least 1"),
        (["SCRIPT", "SCRIPT"], "each name once"),
        (["SCRIPT", "BINARY"], "only text files"),
        (["SCRIPT", "MISSING"], "only text files"),
        (["SCRIPT", "HUGE"], "a ConfigMap holds"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    script: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (script.parent / "binary").write_bytes(b"\xff\xfe")
    (script.parent / "huge.txt").write_text("x" * 1_000_001)
    names = {"SCRIPT": script, "BINARY": "binary", "MISSING": "missing", "HUGE": "huge.txt"}
    names["DOTS"] = "..x"
    (script.parent / "..x").write_text("")
    found = [str(script.parent / names[w]) if w in names else w for w in words]
    assert cli.main(["init", *found]) == 64
    assert says in capsys.readouterr().err
