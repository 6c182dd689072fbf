"""`ddpjob init`: YAML that reads back as the files were, a valid job, clear refusals."""

import base64
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from ddpjob_contract import stock
from kubectl_ddp import cli
from kubectl_ddp.script import dump
from kubectl_ddp.script import manifest as made
from support.launching import PATHS
from support.world import crd_schema

SCRIPT = "import torch\n\nprint('Grüße', torch.ones(2))\n"
Objects = dict[str, dict[str, Any]]  # by kind


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "My_Train.v2.py"
    path.write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return path


@pytest.fixture
def manifest(capsys: pytest.CaptureFixture[str]) -> Callable[..., Objects]:
    def printed(*words: object) -> Objects:
        assert cli.run(["init", *map(str, words)]) == 0
        found = {body["kind"]: body for body in yaml.safe_load_all(capsys.readouterr().out)}
        jsonschema.Draft202012Validator(crd_schema()).validate(found["DDPJob"])
        return found

    return printed


def trainer(objects: Objects) -> dict[str, Any]:
    (found,) = objects["DDPJob"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def files_of(objects: Objects) -> dict[str, Any]:
    _, volume = objects["DDPJob"]["spec"]["template"]["spec"]["volumes"]
    return dict(volume["configMap"])


def test_a_script_of_this_machine_travels_in_a_config_map(script, manifest):
    other = script.parent / "model.py"
    other.write_text("x = 1")
    options = ("--replicas", 3, "--output", "results/")
    found = manifest(script, other, *options, "--", "--lr", "0.1", "--flag")
    assert found["ConfigMap"]["data"] == {script.name: SCRIPT, "model.py": "x = 1"}
    assert found["ConfigMap"]["metadata"]["name"] == "my-train-v2-files"
    job = found["DDPJob"]
    assert (job["metadata"]["name"], job["spec"]["replicas"]) == ("my-train-v2", 3)
    container = trainer(found)
    command = container["command"]
    work, files = container["volumeMounts"]
    assert command == [
        "ddpjob-trainer", "run", "--files", made.FILES, "--anew", "--output", "results/",
        "My_Train.v2.py", "--lr", "0.1", "--flag",
    ]  # fmt: skip
    assert (work["mountPath"], files["mountPath"]) == (container["workingDir"], made.FILES)
    assert job["spec"]["template"]["spec"]["volumes"] == [
        {"name": work["name"], "emptyDir": {}},
        {"name": files["name"], "configMap": {"name": "my-train-v2-files"}},
    ]
    assert "limits" not in container["resources"]
    claim = job["spec"]["snapshot"]["volume"]["persistentVolumeClaim"]
    assert claim == {"claimName": "my-train-v2-snapshots"}


def test_a_script_of_an_image_needs_no_config_map(manifest):
    words = "/app/train.py --image r/mine:1 --name n --gpus 8 --claim 10Gi --every-steps 7"
    found = manifest(*words.split(), "--output", "results")
    assert found.keys() == {"PersistentVolumeClaim", "DDPJob"}
    container = trainer(found)
    assert container["image"] == "r/mine:1"
    assert container["command"][2:] == ["--output", "results", "/app/train.py"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    spec = found["DDPJob"]["spec"]
    assert (spec["nprocPerNode"], spec["snapshot"]["everySteps"]) == ("auto", 7)
    volume = found["PersistentVolumeClaim"]
    assert volume["metadata"]["name"] == "n-snapshots"
    assert volume["spec"]["resources"]["requests"]["storage"] == "10Gi"


def placed(objects: Objects) -> dict[str, bytes]:
    held = {key: text.encode() for key, text in objects["ConfigMap"].get("data", {}).items()}
    binary = objects["ConfigMap"].get("binaryData", {})
    held |= {key: base64.b64decode(text) for key, text in binary.items()}
    assert all(re.fullmatch(r"[-._a-zA-Z0-9]+", key) for key in held)
    items = files_of(objects).get("items")
    return {one["path"]: held[one["key"]] for one in items} if items else held


def test_files_lie_in_the_pods_as_they_do_here(script, manifest):
    """Flattened, `from models.net import make` would find nothing there."""
    here = script.parent
    expected = {
        script.name: SCRIPT.encode(),
        "models/__init__.py": b"",
        "models/net.py": b"n = 1\n",
        "models/data/net.py": b"n = 2\n",
        "models.net.py": b"n = 3\n",
        "sub folder/Wörter.txt": "ä\r\n".encode(),
        "weights.npy": b"\x93NUMPY\xff\x00",
    }
    for name, content in {**expected, ".git/x": b"", "models/__pycache__/net.pyc": b"\xff"}.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(content)
    (here.parent / "shared.txt").write_text("s")
    (here / "linked.txt").symlink_to(here.parent / "shared.txt")
    found = manifest(script, here, here / "models", "models/../weights.npy")
    assert placed(found) == {**expected, "linked.txt": b"s"}
    assert trainer(found)["command"][-1] == script.name
    found = manifest("models/net.py", "models/data")
    assert placed(found) == {k: expected[k] for k in ("models/net.py", "models/data/net.py")}
    assert trainer(found)["command"][-1] == "models/net.py", "the folder stays"
    found = manifest("-m", "models.net", "--", "--lr", "1")
    assert placed(found) == {k: v for k, v in expected.items() if k.startswith("models/")}
    assert trainer(found)["command"][5:] == ["-m", "models.net", "--lr", "1"]
    assert trainer(found)["workingDir"] == "/workspace/job"
    assert found["DDPJob"]["metadata"]["name"] == "models-net"
    found = manifest("-m", "models.net", "--image", "r/mine:1")
    assert placed(found), "what is here travels"
    found = manifest("-m", "theirs.train", "--image", "r/mine:1")
    assert found.keys() == {"DDPJob"}
    assert "workingDir" not in trainer(found)


def test_what_does_not_travel_is_told(script, capsys, monkeypatch):
    here = script.parent
    for name in ("model.py", "data/load.py", "given.py", "notes/a.txt", "behind/held.txt"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text("import yet")
    (here / "yet.py").touch()
    (here / "data/link").symlink_to(here / "behind")

    def said(*words: object) -> str:
        assert cli.run(["init", *map(str, words)]) == 0
        out, err = capsys.readouterr()
        assert ("data/link/held.txt" in out) == ("data/link" in words)
        return str(err)

    told = said(script.name, "data")
    assert "data/link: a linked folder, does not travel: name it too" in told
    said(script.name, "data", "data/link")
    monkeypatch.chdir(here.parent)
    script.write_text("import torch, notes, given\nfrom model import x\nimport data.load\n")
    told = said(script, here / "given.py")
    assert [line.split(":")[1].strip() for line in told.splitlines()] == [
        f"{here.name}/{name}" for name in ("data", "model.py", "yet.py")
    ]
    script.write_text("broken(")
    assert said(script) == ""


def test_what_a_pod_gets_besides(script, manifest):
    words = "--cpu 4 --memory 16Gi --env A=b=$(c) --env HF_HOME=/x --output runs --output logs/a"
    given = ("--resume-args", "--init_from=resume", "--resume-when", "runs/*.pt")
    found = manifest(script, *words.split(), *given)
    container = trainer(found)
    assert container["resources"] == {"requests": {"cpu": "4", "memory": "16Gi"}}
    assert container["env"] == [
        {"name": "A", "value": "b=$$(c)"}, {"name": "HF_HOME", "value": "/x"},
    ]  # fmt: skip
    assert container["command"][5:9] == ["--output", "runs", "--output", "logs/a"]
    spec = found["DDPJob"]["spec"]
    assert spec["restart"] == {"resumeArgs": ["--init_from=resume"], "resumeWhen": "runs/*.pt"}
    pod = spec["template"]["spec"]
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_packages_and_files_that_the_pods_lack_are_named(script, capsys):
    here = script.parent
    for name in ("config/small.py", "imgs/1.png", "runs/last.pt", "model.py", "src/part.py"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).touch()
    script.write_text(
        "import os, timm.data, torch, yaml, model, part\nfrom torchvision import models\n"
    )

    def said(*words: str) -> list[str]:
        assert cli.run(["init", script.name, "model.py", "src", *words]) == 0
        lines = capsys.readouterr().err.splitlines()
        return [line.removeprefix("kubectl-ddp: ").partition(":")[0] for line in lines]

    assert said() == ["timm", "torchvision"]
    assert said("--image", "r/mine:1") == []
    named = ("--", "config/small.py", "--data=imgs", "--lr", "1", "src", "/tmp", ".", "runs")
    assert said("--image", "i", "--output", "runs", *named) == ["config/small.py", "imgs"]
    assert said("config", "--image", "i", *named[:2]) == []
    ends = ("--resume-args", "--resume {newest}", "--resume-when")
    assert said("--image", "i", *ends, "runs/*.pt") == ["--resume-when runs/*.pt"]
    assert said("--image", "i", "--output", "runs", *ends, "runs/*.pt") == []


@pytest.mark.parametrize(("text", "words", "warned"), [
    ("import torch, torchvision", (), True),
    ("import torch", ("--replicas", "1", "--nproc", "2"), True),
    ("import torch", ("--replicas", "1"), False),
    ("import torch.distributed as dist", (), False),
    ("import torch, lightning", ("--image", "i"), False),
    ("import torch, ddpjob_trainer", (), False),
    ("print(1)", (), False),
])  # fmt: skip
def test_a_script_whose_processes_would_train_apart_is_named(script, capsys, text, words, warned):
    script.write_text(text)
    assert cli.run(["init", script.name, *words]) == 0
    assert ("would train by itself" in capsys.readouterr().err) == warned


def test_what_the_stock_image_has_is_what_its_pins_bring():
    root, other = Path(__file__).parents[2], {
        "pyyaml": "yaml", "scikit-learn": "sklearn", "prometheus-client": "prometheus_client",
        "typing-extensions": "typing_extensions", "cuda-bindings": "cuda",
        "cuda-pathfinder": "cuda",
    }  # fmt: skip
    pins = "".join((root / f"dev/requirements/{x}.txt").read_text() for x in ("torch", "trainer"))
    names = set(re.findall(r"^([a-z0-9-]+)==", pins, re.MULTILINE))
    names = {one for one in names if not one.startswith("nvidia-")} - {"cuda-toolkit"}
    ours = {"ddpjob_contract", "ddpjob_tools", "ddpjob_trainer", "functorch", "torchgen"}
    assert {other.get(one, one) for one in names} | ours == stock.MODULES


def test_manifests_are_utf_8_in_every_locale(script):
    poor = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "PATH": ""}
    env = poor | {"PYTHONPATH": PATHS}

    def run(*words: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "ddpjob_tools", *map(str, words)]
        return subprocess.run(command, env=env, input=stdin, capture_output=True, check=False)

    written = run("init", script).stdout
    assert "Grüße".encode() in written
    told = run("local", "-", stdin=written + b"---\n" + written).stderr
    assert b"2 objects of kind DDPJob in the file" in told


def test_an_edited_file_is_another_template_and_programs_are_executable(script, manifest):
    templates = []
    for text in (SCRIPT, SCRIPT, "print(2)\n"):
        script.write_text(text)
        templates.append(manifest(script)["DDPJob"]["spec"]["template"])
    before, same, after = templates
    assert before == same
    assert (after["spec"], after["metadata"] != before["metadata"]) == (before["spec"], True)
    other = script.parent / "train"
    other.write_text("#!/bin/sh\n")
    found = manifest(other)
    assert files_of(found).get("defaultMode") == 0o755
    assert trainer(found)["command"][-1] == "./train", "no PATH leads to it"
    for words in ([script], [script, other]):
        assert "defaultMode" not in files_of(manifest(*words))
    other.chmod(0o755)
    assert files_of(manifest(script, other))["defaultMode"] == 0o755


def test_a_script_on_the_claim_needs_no_image_of_its_own(manifest):
    found = manifest("/snapshots/code-1/train.py", "--snapshots", "shared")
    assert found.keys() == {"DDPJob"}
    job = found["DDPJob"]
    assert trainer(found)["image"] == stock.IMAGE
    assert trainer(found)["workingDir"] == "/snapshots/code-1"
    assert trainer(found)["command"] == ["ddpjob-trainer", "run", "/snapshots/code-1/train.py"]
    snapshot = job["spec"]["snapshot"]
    assert snapshot["path"] == "/snapshots"
    assert snapshot["volume"] == {"persistentVolumeClaim": {"claimName": "shared"}}
    assert "volumes" not in job["spec"]["template"]["spec"]


def test_kubernetes_puts_no_variables_into_arguments(script, manifest, capsys):
    found = manifest(script, "--snapshots", "2024", "--", "$(RANK)", "a$$b", "\x7f")
    assert trainer(found)["command"][6:] == ["$$(RANK)", "a$$$$b", "\x7f"]
    assert cli.run(["init", str(script), "--", "--lr", "1e-3"]) == 0
    assert '- "1e-3"\n' in capsys.readouterr().out, "a number to kubectl, not to PyYAML"
    volume = found["DDPJob"]["spec"]["snapshot"]["volume"]
    assert volume == {"persistentVolumeClaim": {"claimName": "2024"}}


@example("0\n\x85")  # an end of a line to YAML 1.1
@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=60))
def test_any_text_reads_back_as_it_was(text):
    assert yaml.safe_load(dump.dumped({"data": {"x": text}})) == {"data": {"x": text}}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.py"], "nowhere.py: no such file here"),
        (["/app/train.py"], "name the --image"),
        (["/snapshots/train/train.py"], "the snapshots of train go there: give another --name"),
        (["FOLDER"], "a folder: give the script in it"),
        (["look.ipynb"], "a notebook, which Python does not start: jupyter nbconvert --to script"),
        (["/app/look.ipynb", "--image", "i"], "/app/look.py: give that"),
        (["SCRIPT", "../x.py"], "../x.py: is not below"),
        (["OUTSIDE"], "change to a folder that holds all files, and call init there"),
        (["SCRIPT", "--output", "/results"], "--output /results: must be a folder below"),
        (["SCRIPT", "--output", "."], "must be a folder below the working directory"),
        (["SCRIPT", "HELD", "--output", "folder/"], "folder/held.txt travels to there"),
        (["SCRIPT", "HELD", "--output", "folder/held.txt/x"], "folder/held.txt travels to there"),
        (["SCRIPT", "--output", "a", "--output", "a/b"], "--output a/b: is kept by --output a"),
        (["SCRIPT", "--memory", "16"], "--memory '16': must be a size, such as 16Gi"),
        (["SCRIPT", "--cpu", "0"], "--cpu '0': must be a number, such as 4 or 500m"),
        (["SCRIPT", "--env", "A"], "--env A: must be NAME=VALUE"),
        (["SCRIPT", "--env", "RANK=1"], "RANK is set by the operator"),
        (["SCRIPT", "--resume-args", "{newest}"], "{newest} needs --resume-when GLOB"),
        (["SCRIPT", "--resume-when", "x"], "--resume-when x: needs --resume-args"),
        (["SCRIPT", "--resume-args", "--from=$HOME"], "--from=$HOME: without $"),
        (["/snapshots/c/t.py", "--output", "x"], "leave it out: all that is written"),
        (["-m", "no.such"], "no.py: no such file here: change to its folder"),
        (["-m", "1x", "--name", "a"], "1x: not the name of a module"),
        (["/app/train.py", "b.py", "--image", "i"], "b.py: files travel"),
        (["SCRIPT", "--name", "Bad"], "--name: 'Bad' must be"),
        (["SCRIPT", "--name", "x" * 54], "53 at most"),
        (["SCRIPT", "--nproc", "8", "--gpus", "2"], "--nproc 8: each process needs a GPU"),
        (["SCRIPT", "--replicas", "10001"], "--replicas 10001: at least 1, at most 10000"),
        (["SCRIPT", "--replicas", "0"], "--replicas 0: at least 1"),
        (["SCRIPT", "--every-steps", "0"], "--every-steps 0: at least 1"),
        (["SCRIPT", "--gpus", "-1"], "--gpus -1: at least 0"),
        (["SCRIPT", "--snapshots", "a: b"], "--snapshots 'a: b'"),
        (["SCRIPT", "--image", ""], "--image: must name an image"),
        (["SCRIPT", "DOTS"], "may not begin with '..'"),
        (["SCRIPT", "--claim", "10"], "--claim '10': must be a size, such as 10Gi"),
        (["SCRIPT", "MISSING"], "missing: no such file here; the script's own arguments follow --"),
        (["SCRIPT", "/dev/null"], "/dev/null: is not below"),
        (["SCRIPT", "HUGE"], "huge.txt: a ConfigMap holds"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(script, words, says, capsys, tmp_path_factory):
    here, outside = script.parent, tmp_path_factory.mktemp("elsewhere") / script.name
    (here / "folder").mkdir()
    for path in (outside, here / "..x", here / "folder/held.txt"):
        path.touch()
    (here / "huge.txt").write_text("x" * 1_000_001)
    names = {"SCRIPT": script, "MISSING": "missing", "HUGE": "huge.txt", "FOLDER": "folder"}
    names |= {"DOTS": "..x", "OUTSIDE": outside, "HELD": "folder/held.txt"}
    found = [str(here / names[w]) if w in names else w for w in words]
    assert cli.run(["init", *found]) == 1
    assert says in capsys.readouterr().err


def test_an_unknown_option_is_the_scripts(capsys):
    for words, says in (
        ("init", "are required: SCRIPT\n"),
        ("init a.py --lr 0.1", "kubectl ddp init a.py -- --lr 0.1"),
        # No short form of --output, which would take it.
        ("init a.py --out=x -- y", "kubectl ddp init a.py -- --out=x y"),
        ("status x --lr 0.1", ""),
    ):
        with pytest.raises(SystemExit):
            cli.run(words.split())
        said = capsys.readouterr().err
        assert ("unrecognized arguments" in said) == (words != "init")
        assert ("follow --" in said) == (" -- " in says)
        assert says in said


def test_one_torch_in_the_image_the_page_and_what_local_compares():
    root = Path(__file__).parents[2]
    assert f"torch=={stock.TORCH}" in (root / "dev/requirements/torch.in").read_text().splitlines()
    page = (root / "docs/start/your-script.md").read_text()
    assert set(re.findall(r"torch==([0-9.]*[0-9])", page)) == {stock.TORCH}
