"""What pages say of the chart is so: values exist and helm's commands render."""

import re
import shlex
from collections.abc import Iterator

from support.chart import CHART
from support.manifest import pages

BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: Options of `helm install` and `helm upgrade` that `helm template` has no use for.
OTHERS = {
    *("--create-namespace", "--wait", "--take-ownership", "--force-conflicts"),
    "--reset-then-reuse-values",
}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield (page, words) of every `helm install` and `helm upgrade` of a block or a table."""
    for page in pages():
        text = page.read_text()
        lines = "".join(BLOCK.findall(text)).replace("\\\n", " ").splitlines()
        for line in [*lines, *re.findall(r"`(helm [^`\n]*)`", text)]:
            words = shlex.split(line.partition(" #")[0]) if line.startswith("helm ") else []
            if words[1:2] in (["install"], ["upgrade"]) and len(words) > 3:
                yield page.name, words


def test_every_helm_command_of_a_page_renders(helm):
    seen = []
    for page, words in commands():
        rest = [word.replace("REGISTRY", "registry.example") for word in words[4:]]
        assert words[3] in ("charts/ddpjob", "FILE"), page
        done = helm("template", words[2], str(CHART), *(w for w in rest if w not in OTHERS))
        assert done.returncode == 0, f"{page}: {shlex.join(words)}: {done.stderr}"
        seen.append(page)
    assert {"README.md", "operations.md", "quickstart.md", "releasing.md"} <= set(seen)
