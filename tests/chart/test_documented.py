"""What pages say of the chart is so: values exist and helm's commands render."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import yaml

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


def named(text: str, values: dict[str, Any]) -> Iterator[str]:
    """Yield what a page calls a value of the chart: dotted, in code, at a root of values.yaml."""
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        for one in code.split(","):
            path = one.strip().partition("=")[0]
            root = path.partition(".")[0]
            if re.fullmatch(r"\w+([.]\w+)+", path) and isinstance(values.get(root), dict):
                yield path


def exists(path: str, values: Any) -> bool:
    for name in path.split("."):
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True


def test_every_helm_command_of_a_page_renders(helm):
    seen = []
    for page, words in commands():
        rest = [word.replace("REGISTRY", "registry.example") for word in words[4:]]
        assert words[3] in ("charts/ddpjob", "FILE"), page
        done = helm("template", words[2], str(CHART), *(w for w in rest if w not in OTHERS))
        assert done.returncode == 0, f"{page}: {shlex.join(words)}: {done.stderr}"
        seen.append(page)
    assert {"README.md", "operations.md", "quickstart.md", "releasing.md"} <= set(seen)


def test_pages_name_no_value_that_the_chart_lacks():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    found = [
        (page.name, path)
        for page in (*pages(), CHART / "templates" / "policies.yaml")
        for path in named(page.read_text(), values)
    ]
    assert len(found) > 20
    # Of a DDPJob, whose sections have the same names.
    jobs = {"metrics.port", "networkPolicy.enabled"}
    lacking = [each for each in found if not exists(each[1], values) and each[1] not in jobs]
    assert lacking == []
