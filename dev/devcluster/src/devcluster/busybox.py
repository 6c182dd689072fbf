"""A small image from Debian's static busybox: every pod's pause image, and a test shell."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

from devcluster import ociarchive
from devcluster.cachedir import Log, cache_root, digest, ensure_dir
from devcluster.render import PAUSE_IMAGE

_FORMAT = "1"


def archive(log: Log) -> Path:
    """Return the image as an OCI archive, made once per version of busybox."""
    program = Path(shutil.which("busybox") or "/bin/busybox")
    content = program.read_bytes()
    home = cache_root() / f"busybox-{digest(_FORMAT, content)}"

    def make(aside: Path) -> None:
        listed = subprocess.run(
            [str(program), "--list"], capture_output=True, text=True, check=True
        )
        (aside / "image.tar").write_bytes(image(content, listed.stdout.split()))

    ensure_dir(home, make, log)
    return home / "image.tar"


def image(program: bytes, applets: list[str]) -> bytes:
    """Return the OCI archive; the same bytes for the same input."""
    config = {"Cmd": ["/bin/sleep", "2147483647"], "Env": ["PATH=/bin"]}
    return ociarchive.pack(PAUSE_IMAGE, _layer(program, applets), config)


def _layer(program: bytes, applets: list[str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, mode in (("bin", 0o755), ("etc", 0o755), ("tmp", 0o1777)):
            directory = tarfile.TarInfo(name)
            directory.type, directory.mode = tarfile.DIRTYPE, mode
            tar.addfile(directory)
        ociarchive.add(tar, "bin/busybox", program, 0o755)
        ociarchive.add(tar, "etc/passwd", b"root:x:0:0:root:/:/bin/sh\n", 0o644)
        for applet in sorted(set(applets) - {"busybox"}):
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    return packed.getvalue()
