"""Names that Kustomize gives to objects come into the DDPJobs that name them."""

import json
import re
import subprocess
from string import Template

import yaml

from devcluster import binaries
from support.cluster import ROOT

CONFIG = ROOT / "manifests" / "kustomizeconfig.yaml"
OF_CONTAINERS = """
        - name: {name}
          env:
            - {{name: A, valueFrom: {{configMapKeyRef: {{name: $files, key: a}}}}}}
            - {{name: B, valueFrom: {{secretKeyRef: {{name: $key, key: a}}}}}}
          envFrom: [{{configMapRef: {{name: $files}}}}, {{secretRef: {{name: $key}}}}]
"""
JOB = f"""
apiVersion: ddpjob.dev/v1alpha1
kind: DDPJob
metadata: {{name: job}}
spec:
  replicas: 2
  standbyPriorityClassName: $high
  scheduling: {{priorityClassName: $high}}
  snapshot: {{path: /s, volume: {{persistentVolumeClaim: {{claimName: $claim}}}}}}
  template:
    spec:
      serviceAccountName: $account
      priorityClassName: $high
      imagePullSecrets: [{{name: $key}}]
      volumes:
        - {{name: a, configMap: {{name: $files}}}}
        - {{name: b, secret: {{secretName: $key}}}}
        - {{name: c, persistentVolumeClaim: {{claimName: $claim}}}}
        - name: d
          projected: {{sources: [{{configMap: {{name: $files}}}}, {{secret: {{name: $key}}}}]}}
      initContainers: {OF_CONTAINERS.format(name="fetch")}
      containers: {OF_CONTAINERS.format(name="trainer")}
"""
OTHERS = """
---
{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: claim}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: account}}
---
{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: high}}
"""
KUSTOMIZATION = {
    "resources": ["all.yaml"],
    "configurations": [CONFIG.name],
    "namePrefix": "a-",
    "configMapGenerator": [{"name": "files", "literals": ["a=b"]}],
    "secretGenerator": [{"name": "key", "literals": ["a=b"]}],
}


def test_names_of_generators_and_prefixes_come_into_each_field(tmp_path):
    names = set(re.findall(r"\$(\w+)", JOB))
    plain = Template(JOB).substitute({name: name for name in names})
    (tmp_path / CONFIG.name).write_text(CONFIG.read_text())
    (tmp_path / "all.yaml").write_text(plain + OTHERS)
    (tmp_path / "kustomization.yaml").write_text(json.dumps(KUSTOMIZATION))
    command = [binaries.ensure(["kubectl"], print)["kubectl"], "kustomize", tmp_path]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    objects = {one["kind"]: one for one in yaml.safe_load_all(made)}
    given = [one["metadata"]["name"] for one in objects.values()]
    found = {name: next(one for one in given if one.startswith(f"a-{name}")) for name in names}
    assert len(found["files"]) > len("a-files"), "with its hash"
    wanted = yaml.safe_load(Template(JOB).substitute(found))
    assert objects["DDPJob"]["spec"] == wanted["spec"]
    fields = [spec for kind in yaml.safe_load(CONFIG.read_text())["nameReference"]
              for spec in kind["fieldSpecs"]]  # fmt: skip
    assert len(fields) == JOB.count("$"), "each field of the file is tried"
