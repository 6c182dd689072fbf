"""The commands of docs/internals/releasing.md that sign a release and verify it, run as they are.

To build cosign takes minutes, once. The registry is crane's, on loopback; the images are tiny.
"""

import base64
import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from devcluster import binaries
from devcluster.oci import images, ociarchive
from support import release as support
from support.cluster import ROOT
from support.loaded import load
from support.patience import wait_for

pytestmark = pytest.mark.tier("all")
PAGE = (ROOT / "docs/internals/releasing.md").read_text()
KEY, SIGN, VERIFY = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
#: Each command of VERIFY that may refuse, without the file that it writes.
CHECKS = re.findall(r"^ *((?:cosign verify|sha256sum|grep)[^>\n]*)", VERIFY, re.MULTILINE)
#: What another release would attach to its image.
PREDICATES = ("operator.cdx.json --type cyclonedx", "provenance.json --type slsaprovenance1")


@dataclass(frozen=True, slots=True)
class Signer:
    """A shell with what the page's commands need."""

    made: Path
    variables: dict[str, str]
    verified: str = ""  # what the page's last block prints

    def run(self, script: str, **changed: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-eu", "-o", "pipefail", "-c", script]
        env = {**os.environ, **self.variables, **changed}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    def refusing(self, **changed: str) -> set[str]:
        """Return the checks that fail, each tried alone."""
        [start] = re.findall(r"^(.*)^cosign verify-blob \$", VERIFY, re.MULTILINE | re.DOTALL)
        [name] = re.findall(r"^ *(name=.*)$", VERIFY, re.MULTILINE)
        before = f"{start}image=operator\n{name}\n"
        return {each for each in CHECKS if self.run(before + each, **changed).returncode != 0}


def tiny(target: str) -> bytes:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        ociarchive.add(tar, "hello", target.encode(), 0o644)
    return ociarchive.pack(images.reference(target), layer.getvalue(), {})


def export(target: str, archive: Path, _: object) -> str:
    archive.write_bytes(tiny(target))
    with tarfile.open(archive) as tar:
        index = tar.extractfile("index.json")
        assert index is not None
        return str(json.load(index)["manifests"][0]["digest"])


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signer]:
    """A draft with tiny images, signed."""
    folder = tmp_path_factory.mktemp("signed")
    release = load(ROOT / "dev/release/release.py")
    status = "Package: libc6\nStatus: install ok installed\nVersion: 2\nArchitecture: amd64\n"
    base = {"usr/lib/os-release": "ID=debian\nVERSION_ID=12\n", "var/lib/dpkg/status": status}
    image = support.image_of(folder / "image", base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "export", export)
        patch.setattr(images, "build", lambda *_: image)
        release.release(ROOT, folder / "dist", draft=True, with_images=True)
    [made] = (folder / "dist").iterdir()
    programs = binaries.ensure(["cosign", "crane"], print)
    log = folder / "registry.log"
    serve = [programs["crane"], "registry", "serve", "--address", "127.0.0.1:0"]
    with (
        log.open("w") as stderr,
        subprocess.Popen(serve, stderr=stderr) as registry,
        ExitStack() as last,
    ):
        last.callback(registry.kill)
        found = wait_for(lambda: re.search(r"serving on port (\d+)", log.read_text()), "registry")
        places = [*(str(path.parent) for path in programs.values()), os.environ["PATH"]]
        (folder / "keys").mkdir()
        variables = {
            "PATH": ":".join(places),
            "COSIGN_PASSWORD": "a",
            "TUF_ROOT": f"{folder}/tuf",
            "DOCKER_CONFIG": str(folder),
            "DIST": str(made.parent),
            "KEYS": f"{folder}/keys",
            "VERSION": made.name.removeprefix("ddpjob-"),
            "REGISTRY": f"127.0.0.1:{found[1]}/ddpjob",
        }
        signer = Signer(made, variables)
        for script in (KEY, SIGN, VERIFY):
            done = signer.run(script)
            assert done.returncode == 0, done.stderr
        yield replace(signer, verified=done.stdout)


def test_what_is_signed_is_verified_and_a_change_of_it_refused(signer, tmp_path):
    assert len(CHECKS) == 7
    assert signer.refusing() == set()
    sums, _, attested, of_release, *rest = CHECKS
    of_images = set(rest)

    for name, refused in (("kubectl-ddp", {CHECKS[1], attested}), ("SHA256SUMS", {*CHECKS[:2]})):
        path = signer.made / name
        whole = path.read_bytes()
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        assert signer.refusing() == refused, name
        path.write_bytes(whole)
    bundle = signer.made / "provenance.sigstore.json"
    signed = json.loads(bundle.read_text())
    payload = base64.b64decode(signed["dsseEnvelope"]["payload"])
    forged = payload.replace(b'"gitCommit"', b'"gitCommie"')
    assert forged != payload
    changed = {**signed["dsseEnvelope"], "payload": base64.b64encode(forged).decode()}
    bundle.write_text(json.dumps({**signed, "dsseEnvelope": changed}))
    assert signer.refusing() == {attested}
    bundle.write_text(json.dumps(signed))

    assert signer.run(KEY, KEYS=str(tmp_path)).returncode == 0
    assert signer.refusing(KEYS=str(tmp_path)) == {sums, attested, *of_images}, "another key"
    with tarfile.open(fileobj=io.BytesIO(tiny("another"))) as tar:
        tar.extractall(tmp_path / "layout", filter="data")
    push = f'name=$(crane push {tmp_path / "layout"} "$REGISTRY/operator:$VERSION")\n'
    assert signer.run(push).returncode == 0
    assert signer.refusing() == {of_release, *of_images}, "another image under the tag"
    [sign] = re.findall(r"^sign=.*$", SIGN, re.MULTILINE)
    for words in ("sign", *(f"attest --predicate {signer.made}/{each}" for each in PREDICATES)):
        done = signer.run(f'{push}{sign}\ncosign {words} $sign "$name"')
        assert done.returncode == 0, done.stderr
    assert signer.refusing() == {of_release}, "an image of ours, of another release"


def test_an_image_carries_its_bill_and_its_provenance(signer):
    for kind in ("cosign/sign/v1", "cyclonedx.org/bom", "slsa.dev/provenance/v1"):
        assert signer.verified.count(f"{kind} artifacts") == 2, "of both images"
    provenance = json.loads((signer.made / "provenance.json").read_text())
    made = {each["name"]: each["digest"] for each in provenance["subject"]}
    for image in images.TARGETS:
        text = (signer.made / f"{image}.attested").read_text()
        statement = json.loads(base64.b64decode(json.loads(text)["payload"]))
        bill = json.loads((signer.made / f"{image}.cdx.json").read_text())
        assert statement["predicate"] == bill
        assert [each["digest"] for each in statement["subject"]] == [made[images.reference(image)]]
        packages = {each.get("purl") for each in bill["components"]}
        assert "pkg:deb/debian/libc6@2?arch=amd64&distro=debian-12" in packages
