"""Pages and pictures are what their scripts make of the recorded data; the model behind them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from support import benches, panels
from support.loaded import load

from harness import claims_page, claims_verdicts, paying, ring_model, scaling_page  # isort: skip
from harness.ring_model import Measured, Ring  # isort: skip

DOCS = benches.ROOT / "docs"
PAGES = DOCS / "internals"


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    return load(DOCS / "pictures.py")


@pytest.mark.parametrize("name", ["buckets", "ring", "scaling", "dashboard"])
def test_each_picture_is_drawn_from_its_record(pictures: ModuleType, name: str) -> None:
    drawn = pictures.DRAWN[name](pictures.recorded(name))
    assert (DOCS / f"pictures/{name}.svg").read_text() == drawn, "run `make manifests`"
    root = ElementTree.fromstring(drawn)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for shape in root.iter():
        for place, limit in (
            ("x", width),
            ("x1", width),
            ("x2", width),
            ("cx", width),
            ("y", height),
            ("y1", height),
            ("y2", height),
            ("cy", height),
        ):
            assert 0 <= float(shape.attrib.get(place, 0)) <= limit, shape.attrib


def test_the_picture_of_the_dashboard_has_its_panels() -> None:
    recorded = json.loads(panels.RECORD.read_text())["panels"]
    told = [(one["title"], one["unit"], one["queries"]) for one in recorded]
    shown = [
        (one["title"], one["fieldConfig"]["defaults"]["unit"], panels.queries(one))
        for one in panels.shown()
    ]
    assert told == shown, "record anew: DDPJOB_WRITE_PAGES=1, test_prometheus.py"
    for one in recorded:
        assert any(v is not None for line in one["series"] for v in line["values"]), one["title"]


def test_the_pages_are_written_from_their_results() -> None:
    scaling = json.loads((PAGES / "scaling.json").read_text())
    claims = json.loads((PAGES / "claims.json").read_text())
    cure = "run the command at the page's end"
    assert (PAGES / "scaling.md").read_text() == scaling_page.page(scaling), cure
    assert (PAGES / "claims.md").read_text() == claims_page.page(claims, scaling), cure


def test_each_claim_of_the_list_has_its_verdict() -> None:
    scaling = json.loads((PAGES / "scaling.json").read_text())
    found = claims_verdicts.claims(json.loads((PAGES / "claims.json").read_text()), scaling)
    assert {claim.row for claim in found} == {4, 11, 30, 31, 32, 33}
    assert {claim.verdict for claim in found} <= {"true", "false", "when", "not shown"}
    assert len({claim.said for claim in found}) == len(found)


def test_links_of_the_pages_lead_somewhere() -> None:
    for name in ("claims.md", "scaling.md"):
        for target in re.findall(r"\]\(([^)#]+)", (PAGES / name).read_text()):
            assert (PAGES / target).exists(), f"{name}: {target}"


def test_the_fit_finds_the_ring_that_made_the_points() -> None:
    ring = Ring(alpha=2e-4, beta=5e8)
    points = [
        Measured(ranks, size, ring.seconds(size, ranks))
        for ranks in (2, 3, 4)
        for size in (1024, 65536, 2**22)
    ]
    found = ring_model.fitted(points)
    assert found["alpha"] == pytest.approx(ring.alpha)
    assert found["beta"] == pytest.approx(ring.beta)
    assert found["worst error"] < 1e-6


def test_a_step_out_of_phases_and_a_ring() -> None:
    ring = Ring(alpha=0.0, beta=1.0)  # of 2 ranks: as many seconds as bytes
    alone = {
        "data": 1.0,
        "forward": 2.0,
        "backward": 4.0,
        "exposed": 0.5,
        "optimizer": 1.0,
        "buckets": [{"bytes": 5, "ready": 1.0}, {"bytes": 3, "ready": 4.0}],
    }
    assert ring_model.overlapped(alone["buckets"], ring, 2) == [(1.0, 1.0, 6.0), (4.0, 6.0, 9.0)]
    assert ring_model.step(alone, ring, 2) == {"hidden": 13.5, "in turn": 16.5, "exposed": 5.0}
    # Two processes per core: compute takes twice as long, and so hides more.
    assert ring_model.step(alone, ring, 2, slower=2.0)["hidden"] == 2 * 8.5 + 3.0
    assert ring_model.step(alone, ring, 1)["hidden"] == 8.5


def test_what_is_computed_of_networks() -> None:
    for case in paying.cases():
        on_the_line = 2 * 7 / 8 * case.model.nbytes / (case.network.gigabits * 1e9 / 8)
        buckets = math.ceil(case.model.nbytes / (25 << 20))
        messages = buckets * 2 * 7 * case.network.alpha
        assert case.communication == pytest.approx(on_the_line + messages)
        for share in (0.99, 1.01):  # of the compute that hides all communication
            model = dataclasses.replace(case.model, seconds=share * case.compute_needed)
            assert (dataclasses.replace(case, model=model).efficiency == 1.0) is (share > 1)


def test_words_of_verdicts() -> None:
    assert [claims_verdicts.word(holds) for holds in ([True], [True, False], [False])] == [
        "true",
        "when",
        "false",
    ]


def test_one_machine_does_not_refute_what_is_said_of_speeds() -> None:
    tried = ([True], [True, False], [False])
    assert [claims_verdicts.shown(holds) for holds in tried] == ["true", "when", "not shown"]


@pytest.mark.tier("gate")
def test_gpus_are_asked_for_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(AssertionError, match="torch sees 2 or more"):
        benches.quick("claims", tmp_path, "--gpus")
