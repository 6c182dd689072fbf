"""`ddpjob local`: what a manifest becomes here, held against CRD and operator."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ddpjob_contract as contract
from ddpjob_contract import exits, stock
from ddpjob_operator.core import render
from ddpjob_operator.core.objects import observe, spec
from ddpjob_tools import cli
from ddpjob_tools.local import job as local_job
from ddpjob_tools.local import restarts
from ddpjob_tools.local.command import alone
from ddpjob_tools.local.job import Job, expand
from ddpjob_tools.local.manifest import read
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.gpu import devices
from kubectl_ddp import cli as plugin
from support.manifest import EXAMPLES, changed, ddpjob, examples
from support.world import job_object

ROOT = Path(__file__).parents[3]
SHELL = {"PATH": "/usr/bin:/bin", "RANK": "9", "DDPJOB_UID": "another", "HF_TOKEN": "s$e"}
TRAINER = "spec.template.spec.containers.0"  # "T" in these tests
#: What differs from pod to pod, and from a cluster to this machine.
OWN = {"MASTER_ADDR", "MASTER_PORT", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_RDZV_ID"}
ITEMS = [{"key": "x", "path": "../../x"}]
OWN |= {contract.UID, contract.METRICS_PORT, contract.HUB_PORT, contract.REPLACE_SECONDS}
OWN |= {contract.SNAPSHOT_EPHEMERAL}  # no volume ends with a pod here


def plan(text: str, tmp_path: Path, **more: Any) -> Job:
    folders = more.pop("folders", {"/workspace": ROOT})
    scratch, snapshots = tmp_path / "scratch", tmp_path / "snapshots"
    return local_job.make(read(text), SHELL, scratch, snapshots, folders, **more)


def body(tmp_path: Path, **changes: Any) -> str:
    found = changed(ddpjob(), f"{TRAINER}.command", ["true"])
    for path, value in changes.items():
        found = changed(found, re.sub("^T", TRAINER, path).replace("__", "."), value)
    return json.dumps(found)


@pytest.mark.parametrize("name", examples())
def test_each_example_becomes_a_plan(name, tmp_path):
    job = plan((EXAMPLES / name).read_text(), tmp_path)
    ports = range(2000, 2000 + job.ports())
    for replica in range(job.replicas):
        env = job.environment(1, replica, ports)
        first, *rest = job.command(env)
        assert Path(first).is_file()
        assert env["DDPJOB_REPLICA"] == str(replica)
        assert not [word for word in rest if word.startswith("/workspace")]
    assert job.nproc == {"ladder/2-processes.yaml": 3, "ladder/3-faults.yaml": 3}.get(name, 1)


def test_what_init_prints_becomes_a_plan_with_a_copy_to_work_in(tmp_path, capsys, monkeypatch):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/train.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)
    assert plugin.run(["init", "src/train.py", "--", "--cost", "$(NAME)", "/workspace/job/x"]) == 0
    text = capsys.readouterr().out
    job = plan(text, tmp_path, folders={})
    [(path, content)] = job.files.items()
    assert content.content == b"print(1)\n"
    files, own = path.parents[1], tmp_path / "scratch/work/1"
    words = job.command(job.environment(1, 1, range(job.ports())))
    expected = ["src/train.py", "--cost", "$(NAME)", f"{own}/x"]
    assert words[-8:] == ["run", "--files", str(files), "--anew", *expected]
    assert job.snapshots == tmp_path / "snapshots/train"
    job.write()
    assert job.work is not None
    for replica in range(2):
        folder = job.work.enter(replica)
        for name, written in {"src/train.py": "print(1)\n", "model.pt": "", "logs/a": ""}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(written)
    (folder / "src/__pycache__").mkdir()
    (folder / "src/__pycache__/x.pyc").touch()
    (folder / "results").symlink_to(tmp_path)
    assert job.work.lost() == ["logs/a", "model.pt"]
    (folder / "src/train.py").write_text("print(2)\n")
    assert job.work.lost() == ["logs/a", "model.pt", "src/train.py"]
    assert list(job.work.enter(1).iterdir()) == [], "a pod begins anew"
    with pytest.raises(ConfigError, match=r"other\.py: no such file here"):
        plan(text.replace("- src/train.py\n", "- src/other.py\n"), tmp_path, folders={})
    mine = plan(text, tmp_path, folders={"/workspace/job": tmp_path})
    assert (mine.work, mine.directory) == (None, str(tmp_path)), "--map says what is used instead"
    assert "--anew" not in mine.words, "somebody's folder"


def test_another_torch_than_the_images_is_told(tmp_path, monkeypatch):
    for image, here, says in (
        (stock.IMAGE, "2.12.1+cpu", f"torch is 2.12.1 here and {stock.TORCH} in"),
        (stock.IMAGE, f"{stock.TORCH}+cpu", ""),
        ("registry/mine:1", "2.12.1", ""),
    ):
        monkeypatch.setattr(local_job.metadata, "version", lambda name, here=here: here)
        notes = plan(body(tmp_path, **{"T.image": image}), tmp_path).notes
        told = [note for note in notes if note.startswith("torch")]
        assert [says in note for note in told] == [True] * bool(says)


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("more", ["full", "bare"])
def test_the_variables_are_the_operators(nproc, more, tmp_path):
    changes: dict[str, Any] = {}
    if more == "full":
        rules = [
            {"exitCodes": [7, 137], "action": "Fail"},
            {"reasons": ["SIGSEGV", "Hang"], "action": "Fail"},
            {"reasons": ["Error"], "action": "Restart"},
        ]
        path = str(tmp_path / "snapshots")  # the same here as in the pods
        changes = {
            "restart": {
                "rules": rules,
                "progressPath": "/data/x",
                "inPlace": {"enabled": False},
                "resumeArgs": ["--resume", "{newest}"],
                "resumeWhen": "/data/*.pt",
            },
            "snapshot": {"path": path, "volume": {"emptyDir": {}}, "keep": 5, "resume": "Never"},
            "hang": {"stepSeconds": 7, "outputSeconds": 60},
            "output": {"step": "it (.)", "metrics": {"b": "(.)", "a": "(.)"}},
        }
    found = job_object(nprocPerNode=nproc, **changes)
    container = found["spec"]["template"]["spec"]["containers"][0]
    container["command"] = ["true"]
    container["env"] = [{"name": "A", "value": "$(RANK) $(DDPJOB_REPLICA) $$(B)"}]
    found["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 9
    pod = render.pod(observe.job(found), spec.parse(found["spec"]), 4, 2)
    env = pod["spec"]["containers"][0]["env"]
    theirs = {one["name"]: one["value"] for one in env if "valueFrom" not in one}
    theirs["A"] = expand(theirs["A"], theirs)
    job = plan(json.dumps(found), tmp_path)
    ours = job.environment(4, 2, range(1, 1 + job.ports()))
    assert ours.keys() - theirs.keys() == {
        "PATH", "HF_TOKEN", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
    }  # fmt: skip
    assert {n: ours[n] for n in theirs.keys() - OWN} == {n: theirs[n] for n in theirs.keys() - OWN}


def test_the_operators_answer_to_each_exit_code(tmp_path):
    limits = restarts.limits_of(read(body(tmp_path)))
    answers = {code: limits.action(code) for code in range(1, 256)}
    assert {code for code in answers if answers[code] == "Fail"} == {2, 64, 70, 78, 126, 127}
    assert {code for code in answers if answers[code] == "RestartFree"} == {74, 143}
    causes = sorted([143, 1, 137, 76, 70, 74, 2], key=restarts.severity)
    assert causes == [2, 74, 70, 76, 137, 1, 143]
    for code in answers:
        for reason in exits.reasons_of(code):
            rule = restarts.Rule(frozenset(), frozenset({reason}), "Fail")
            ruled = replace(limits, rules=[rule])
            assert code in exits.final_codes(ruled.ruled), (code, reason)


def test_budgets_delays_and_what_heals_them():
    limits = restarts.Limits(2, 1, 1, 3, 0, 100, ())
    many = replace(limits, max_restarts=9)
    steps = [(1, 0, at) for at in ((1, -1), (2, -1), (3, -1), (3, -1), (3, 5))]  # progressPath
    for given, failures, delays in (
        (limits, [(1, 0, (4, -1))] * 3, [0, 1, -1]),
        # Longer than the longest delay: no crash loop.
        (limits, [*steps, (1, 99, (3, 5)), (1, 100, (3, 5))], [0, 0, 0, 1, 0, 0, 0]),
        (limits, [(74, 0, (0, 0))] * 2, [0, -1]),
        (limits, [(75, 0, (0, 0))] * 3, [0, 1, -1]),  # charged: nothing but the program ends so
        (limits, [(64, 0, (0, 0))], [-1]),
        (many, [(1, 0, (0, 0))] * 5, [0, 1, 2, 3, 3]),
    ):
        budget = restarts.Budget(given)
        assert [budget.after(*failure)[0] for failure in failures] == delays


def test_paths_and_variables_of_the_pods_become_those_of_here(tmp_path):
    code, at = tmp_path / "workspace", "valueFrom"
    code.mkdir()
    (code / "x.py").touch()
    env: list[dict[str, Any]] = [
        {"name": "CODE", "value": "/workspace"},
        {"name": "POD", at: {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "IP", at: {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "X", at: {"configMapKeyRef": {"name": "m", "key": "x"}}},
        {"name": "NONE", at: {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}},
        {"name": "HF_TOKEN", at: {"configMapKeyRef": {"name": "m", "key": "x"}}},
    ]
    changes = {
        "T.command": ["python3", "$(CODE)/x.py", "--out=/snapshots/o"],
        "T.args": ["/snapshots2", "http://h/snapshots", "$(NO)", "$$(CODE)"],
        "T.env": env,
        "T.workingDir": "/workspace",
        "spec.snapshot": {"path": "/snapshots", "volume": {"emptyDir": {}}},
    }
    job = plan(with_map(body(tmp_path, **changes)), tmp_path, folders={"/workspace": code})
    found = job.environment(1, 2, range(job.ports()))
    assert job.command(found)[1:] == [
        f"{code}/x.py", f"--out={tmp_path}/snapshots/o",
        "/snapshots2", "http://h/snapshots", "$(NO)", "$(CODE)",
    ]  # fmt: skip
    assert job.directory == str(code)
    assert {n: found.get(n) for n in ("POD", "IP", "X", "NONE", "HF_TOKEN")} == {
        "POD": f"{job.manifest.name}-2", "IP": "127.0.0.1", "X": "1", "NONE": None,
        "HF_TOKEN": "s$e",  # what is exported comes first
    }  # fmt: skip


def test_words_and_values_are_those_of_the_pods(tmp_path):
    """Of the shell's variables a pod knows none, YAML's times are strings, null is none."""
    line = "cd $(HF_TOKEN); exec python3 train.py"
    text = f"""
kind: DDPJob
metadata: {{name: job}}
spec:
  replicas: 1
  template:
    spec:
      volumes: [{{name: files, configMap: {{name: files}}}}]
      containers:
        - name: trainer
          command: [bash, -c, {line!r}, 2026-01-01T00:00:00Z]
          workingDir: /job
          env: [{{name: A, value: null}}]
          envFrom: [{{configMapRef: {{name: more}}, prefix: P_}}, {{secretRef: {{name: s}}}}]
          volumeMounts: [{{name: files, mountPath: /job}}]
---
kind: ConfigMap
metadata: {{name: files}}
data: {{train.py: "", day: 2026-01-01}}
---
kind: ConfigMap
metadata: {{name: more}}
data: {{B: $(A)}}
"""
    job = plan(text, tmp_path, folders={})
    assert job.command(job.variables(1, 0, range(3)))[2:] == [line, "2026-01-01T00:00:00Z"]
    found = job.environment(1, 0, range(3))
    assert (found["A"], found["P_B"]) == ("", "$(A)")
    assert any("envFrom: what is not in the file" in note for note in job.notes)
    assert job.directory == str(tmp_path / "scratch/0")
    assert job.files[tmp_path / "scratch/0/day"].content == b"2026-01-01"


def test_options_and_what_is_left_out(tmp_path):
    text = body(
        tmp_path,
        spce={},
        spec__suspend=True,
        spec__template__metdata={},
        spec__restart={"maxRestart": 0, "backoff": {"maxSecond": 1}},
        spec__template__spec__nodeSelector={"gpu": "yes"},
        **{
            "T.resources": {"limits": {"nvidia.com/gpu": "2"}},
            "T.volumeMounts": [{"name": "data", "mountPath": "/data"}],
            "T.env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {}}}],
            "spec.template.spec.containers.1": {"name": "sidecar"},
        },
    )
    job = plan(text, tmp_path)
    assert (job.replicas, job.nproc) == (3, 2)
    assert job.environment(1, 0, range(5))["HF_TOKEN"] == "s$e"
    first, second = job.notes
    for name in (
        "container sidecar", "nodeSelector", "spec.suspend", "resources", "image", ", spce, ",
        ", spec.template.metdata", "spec.restart.backoff.maxSecond, spec.restart.maxRestart, ",
    ):  # fmt: skip
        assert name in first
    assert "spec.restart.backoff," not in first
    assert "--map /data=DIR" in second
    fewer = plan(text, tmp_path, replicas=1, nproc=1)
    assert fewer.environment(1, 0, range(3))["WORLD_SIZE"] == "1"


def mounted(**source: Any) -> dict[str, Any]:
    mount = {"name": "files", "mountPath": "/app"}
    volume = {"name": "files", "configMap": {"name": "m", **source}}
    return {"T.volumeMounts": [mount], "spec.template.spec.volumes": [volume]}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"T.command": ["python3", "/app/no.py"]}, "command: /app/no.py.*--map /app=DIR"),
        ({"T.command": ["/opt/no"]}, "command: /opt/no: not found.*--map /opt=DIR"),
        ({"T.command": []}, "command: is missing"),
        ({"T.workingDir": "/app"}, "workingDir: /app.*--map /app=DIR"),
        ({"T.env": [{"name": "T", "valueFrom": {}}]}, "valueFrom of T.*export T="),
        ({"T.env": [{"name": "RANK", "value": "1"}]}, "RANK is set by the operator"),
        ({"T.env": [{"value": "x"}]}, r"env\[0\].name: None must be a string"),
        ({"T.env": [{"name": "A", "valeu": "x"}]}, "env: A: no field valeu"),
        ({"T.envFrom": [None]}, r"envFrom\[0\]: is empty"),
        ({"T.args": ["--lr", None]}, r"args\[1\]: is empty: leave it out"),
        ({"spec.replicas": 0}, "replicas: 0 must be"),
        ({"spec.nprocPerNode": "2"}, "nprocPerNode: '2' must be"),
        ({"spec.hang": {"stepSeconds": "x"}}, r"spec.hang.stepSeconds: 'x'"),
        ({"spec.snapshot": {}}, "spec.snapshot.path"),
        ({"spec.restart": {"rules": [{"action": "Frail"}]}}, r"rules\[0\].action: 'Frail' must be"),
        ({"spec.restart.rules": [{"action": "Fail", "exitCodes": ["3"]}]}, "'3' must be a whol"),
        ({"spec.restart": {"maxRestarts": -1}}, "maxRestarts: -1 must be a whole number"),
        ({"spec.restart": 3}, "spec.restart: 3 must be an object"),
        ({"T.command": "true x"}, "command: 'true x' must be a list"),
        ({"T.args": ["--lr", 0.1]}, r"args\[1\]: 0.1 must be a string: put it in quotes"),
        ({"spec.template": {"spec": {"containers": []}}}, "at least one container"),
        (mounted(items=ITEMS), r"items: path '../../x' must stay in the folder"),
        (mounted(items=[{"key": "y", "path": "y"}]), "key 'y': .* no such one.* name a key"),
        ({**mounted(), "T.volumeMounts": [{"name": "files"}]}, "mountPath: None must be below /"),
        ({"spec.replicas": 9999}, "9999 replicas of 1 processes: .* --replicas 9999 --nproc 1"),
        ({"metadata": {"name": "../x"}}, "metadata.name: '../x' must be"),
        ({"kind": "Job"}, "0 objects of kind DDPJob in the file, which has ConfigMap, Job"),
        ({"apiVersion": "ddpjob.dev/v1beta1"}, "apiVersion: 'ddpjob.dev/v1beta1' must be"),
    ],
)
def test_refusals_name_field_and_cure(changes, complaint, tmp_path):
    with pytest.raises(ConfigError, match=complaint):
        plan(with_map(body(tmp_path, **changes)), tmp_path, folders={})


def test_a_file_of_a_config_map_may_be_executed_where_its_mode_says_so(tmp_path):
    items = [{"key": "x", "path": "bin/x", "mode": 0o500}]
    for mode, first in (({"defaultMode": 0o755}, "/app/x"), ({"items": items}, "/app/bin/x")):
        text = body(tmp_path, **{"T.command": [first]}, **mounted(**mode))
        job = plan(with_map(text), tmp_path / first[1:])
        job.write()
        assert os.access(job.command(job.variables(1, 0, range(5)))[0], os.X_OK)


def with_map(job: str, key: str = "x") -> str:
    config_map = {"kind": "ConfigMap", "metadata": {"name": "m"}, "data": {key: "1"}}
    return json.dumps({"kind": "List", "items": [json.loads(job), config_map]})


def test_yaml_that_holds_no_such_objects_is_refused():
    for objects, complaint in (
        ("ConfigMap\ndata: {../x: a}", r"ConfigMap data: '../x' must be a file's name"),
        ("ConfigMap\ndata: {x: 1}", r"ConfigMap.data.x: 1 must be a string"),
        ("ConfigMap\nbinaryData: {k: x}", "ConfigMap.binaryData.k: 'x' must be base64"),
        ("DDPJob\nspec: {replicas: 1, replicas: 2}", "line 2: replicas is there already"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            read(f"kind: {objects}\n---\n{json.dumps(ddpjob())}")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["no-such.yaml"], "no-such.yaml"),
        (["x/look.ipynb"], "jupyter nbconvert --to script x/look.ipynb writes x/look.py"),
        (["look.py"], "look.py: a script, where a manifest is expected: ddpjob init"),
        (["{file}"], "neither YAML nor JSON"),
        (["{bytes}"], "bytes: neither YAML nor JSON, but other bytes: give a manifest"),
        (["{file}", "--map", "x=."], "--map x=.: must be"),
        (["{file}", "--map", "/=."], "--map /=.: must be"),
        (["{file}", "--map", "/x=/no/such"], "--map /x=/no/such: must be"),
        (["{file}", "--replicas", "0"], "--replicas: 0 must be"),
    ],
)
def test_refusals_of_the_command(words, complaint, tmp_path, capsys):
    (tmp_path / "file").write_text("{a: [")
    (tmp_path / "bytes").write_bytes(b"\xff")
    files = {name: tmp_path / name for name in ("file", "bytes")}
    if len(words) > 1:
        (tmp_path / "file").write_text(body(tmp_path))
    assert cli.main(["local", *(word.format(**files) for word in words)]) == 64
    assert complaint in capsys.readouterr().err


def test_a_gpu_for_each_process(tmp_path, monkeypatch):
    for has, chosen, expected in (
        (0, None, None),
        (6, None, "2,3"),
        (5, None, ""),  # too few: the CPU for all
        (8, "7,6,5,4,3,2", "5,4"),
        (8, "", ""),  # hidden already
    ):
        monkeypatch.setattr(devices, "count", lambda has=has: has)
        if chosen is not None:
            monkeypatch.setitem(SHELL, "CUDA_VISIBLE_DEVICES", chosen)
        job = plan(body(tmp_path, spec__nprocPerNode=2), tmp_path)
        assert job.environment(1, 1, range(5)).get("CUDA_VISIBLE_DEVICES") == expected


def test_two_runs_of_a_manifest_do_not_share_a_folder_of_snapshots(tmp_path):
    folder = tmp_path / "job-snapshots" / "job"
    with alone(folder):
        assert folder.is_dir(), "a volume is there before the program is"
        with pytest.raises(ConfigError, match=r"another run .* --snapshots DIR"), alone(folder):
            pytest.fail("both would write snapshots")
    with alone(folder):
        pass
