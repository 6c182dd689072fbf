"""Image keys, the pieces of a load, and how a build reaches the package index."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from devcluster import baseimage, images, pypi
from devcluster.failure import Failure
from devcluster.imageload import chain_id, metadata_archive, upper_directory
from devcluster.imagestore import BuiltImage, Layer

IMAGE = BuiltImage('{"schemaVersion":2}', '{"os":"linux"}', (Layer("sha256:aa", Path("/layer")),))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of all that images are made of."""
    for name in {*images._COMMON, *images._INPUTS["operator"], *images._INPUTS["trainer"]}:
        source = images.CHECKOUT / name
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return tmp_path


class TestKey:
    def test_equal_inputs_give_equal_keys_wherever_the_checkout_is(self, checkout: Path) -> None:
        for target in images.TARGETS:
            assert images.image_key(target, checkout) == images.image_key(target)

    @pytest.mark.parametrize(
        ("path", "changed"),
        [
            ("trainer/src/ddpjob_trainer/cli.py", {"trainer"}),
            ("contract/src/ddpjob_contract/__init__.py", {"operator", "trainer"}),
            ("examples/digits.py", {"trainer"}),
            ("requirements/torch.txt", {"trainer"}),
            ("operator/src/ddpjob_operator/__init__.py", {"operator"}),
            ("requirements/operator.txt", {"operator"}),
            ("requirements/install.sh", {"operator", "trainer"}),
            ("Dockerfile", {"operator", "trainer"}),
        ],
    )
    def test_a_change_changes_the_images_made_of_it(
        self, checkout: Path, path: str, changed: set[str]
    ) -> None:
        before = {target: images.image_key(target, checkout) for target in images.TARGETS}
        with (checkout / path).open("a") as file:
            file.write("\n")
        after = {target: images.image_key(target, checkout) for target in images.TARGETS}
        assert {target for target in images.TARGETS if before[target] != after[target]} == changed

    def test_a_renamed_or_new_file_counts_and_byte_code_does_not(self, checkout: Path) -> None:
        before = images.image_key("trainer", checkout)
        cached = checkout / "trainer/src/ddpjob_trainer/__pycache__"
        cached.mkdir(exist_ok=True)
        (cached / "cli.cpython-311.pyc").write_bytes(b"x")
        assert images.image_key("trainer", checkout) == before
        example = checkout / "examples/digits.py"
        example.rename(example.with_name("numbers.py"))
        assert images.image_key("trainer", checkout) != before

    def test_another_base_is_another_image(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("DDPJOB_BASE_IMAGE", raising=False)
        before = images.image_key("operator")
        monkeypatch.setenv("DDPJOB_BASE_IMAGE", "python:3.12-slim")
        assert baseimage.name() == "python:3.12-slim"
        assert images.image_key("operator") != before

    def test_a_missing_input_is_named(self, checkout: Path) -> None:
        (checkout / "requirements/torch.txt").unlink()
        with pytest.raises(Failure, match=r"requirements/torch\.txt is missing"):
            images.image_key("trainer", checkout)


class TestNames:
    @pytest.mark.parametrize(
        "name", ["trainer", "ddpjob/trainer:0.1.0", "docker.io/ddpjob/trainer:0.1.0"]
    )
    def test_the_forms_of_a_name(self, name: str) -> None:
        assert images._target_of(name) == "trainer"
        assert images.reference("trainer") == "docker.io/ddpjob/trainer:0.1.0"

    @pytest.mark.parametrize("name", ["ddpjob/trainer:9", "nginx", "/no/such/file.tar"])
    def test_what_is_not_ours_is_refused_with_the_cure(self, name: str) -> None:
        with pytest.raises(Failure, match=r"docker save.*load that file"):
            images.load_into([], name, lambda line: None)


class TestPieces:
    def test_chain_ids_are_those_of_the_image_specification(self) -> None:
        first, second = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"
        assert chain_id("", first) == first
        wanted = hashlib.sha256(f"{first} {second}".encode()).hexdigest()
        assert chain_id(first, second) == f"sha256:{wanted}"

    def test_the_archive_names_the_image_and_holds_no_layer(self) -> None:
        whole = io.BytesIO(metadata_archive("docker.io/a/b:1", IMAGE))
        with tarfile.open(fileobj=whole) as archive:
            opened = {each.name: archive.extractfile(each) for each in archive}
            files = {name: file.read() for name, file in opened.items() if file is not None}
        (entry,) = json.loads(files.pop("index.json"))["manifests"]
        assert entry["annotations"] == {"io.containerd.image.name": "docker.io/a/b:1"}
        assert entry["digest"] == IMAGE.digest
        assert json.loads(files.pop("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
        blobs = {name.removeprefix("blobs/sha256/"): data for name, data in files.items()}
        assert set(blobs.values()) == {IMAGE.manifest.encode(), IMAGE.config.encode()}
        assert all(hashlib.sha256(data).hexdigest() == name for name, data in blobs.items())

    def test_where_a_prepared_snapshot_is(self) -> None:
        above = "mount -t overlay overlay / -o index=off,workdir=/s/2/work,upperdir=/s/2/fs,low=/s"
        assert upper_directory(above) == Path("/s/2/fs")
        assert upper_directory("mount -t bind /s/1/fs / -o rw,rbind") == Path("/s/1/fs")
        with pytest.raises(Failure, match="overlayfs"):
            upper_directory("mount -t btrfs /dev/x / -o subvol=1")

    def test_a_record_survives_its_file_and_notices_a_lost_layer(self, tmp_path: Path) -> None:
        here = BuiltImage("m", "c", (Layer("sha256:aa", tmp_path / "diff"),))
        assert BuiltImage.from_json(here.to_json()) == here
        assert not here.is_whole
        (tmp_path / "diff").mkdir()
        assert here.is_whole


class TestIndex:
    LISTING = (
        ":env:.cert='/env/ca.pem'\n"
        ":env:.find-links='/opt/wheels'\n"
        "global.cert='/file/ca.pem'\n"
        "global.index-url='https://mirror.example/simple'\n"
        "global.trusted-host='one.example\\n two.example'\n"
        "download.index-url='https://elsewhere.example'\n"
    )

    def test_pip_settings(self) -> None:
        assert pypi.parse_pip_settings(self.LISTING) == {
            "cert": "/env/ca.pem",
            "find-links": "/opt/wheels",
            "index-url": "https://mirror.example/simple",
            "trusted-host": "one.example two.example",
        }

    def test_uv_is_told_what_pip_knows_unless_the_user_did(self) -> None:
        settings = pypi.parse_pip_settings(self.LISTING)
        told = pypi.uv_environment(settings, {"SSL_CERT_FILE": "/mine.pem"})
        assert "SSL_CERT_FILE" not in told
        assert told["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
        assert told["UV_FIND_LINKS"] == "/opt/wheels"

    def test_a_build_is_not_sent_to_directories_of_this_host(self) -> None:
        kept = pypi.reachable_from_elsewhere({"find-links": "/opt/wheels https://w.example/"})
        assert kept == {"find-links": "https://w.example/"}
        assert pypi.reachable_from_elsewhere({"find-links": "/opt/wheels"}) == {}

    def test_secrets_of_a_build(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ca = tmp_path / "ca.pem"
        ca.write_text("pem")
        settings = {"cert": str(ca), "index-url": "https://mirror.example/a b"}
        monkeypatch.setattr(pypi, "pip_settings", lambda: settings)
        words = images._index_secrets(tmp_path)
        assert words == [
            "--secret",
            f"id=ca,src={ca}",
            "--secret",
            f"id=index,src={tmp_path}/index",
        ]
        index = (tmp_path / "index").read_text().splitlines()
        assert "PIP_INDEX_URL='https://mirror.example/a b'" in index
        assert "UV_DEFAULT_INDEX='https://mirror.example/a b'" in index
        assert "SSL_CERT_FILE=/run/secrets/ca" in index
        assert "PIP_CERT=/run/secrets/ca" in index
