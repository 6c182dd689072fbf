"""An elastic gang trains on short while a pod is away, and grows when it is back: same bits.

The test plays the operator, as in test_replacement.py.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from support.operated import Operated
from support.rounds import COLD, SCRIPT, Training

#: Of support.rounds, at level elastic: without running statistics, losses and buckets.
ELASTIC = (
    SCRIPT.replace("seed=5", 'seed=5, level="elastic"')
    .replace("nn.BatchNorm1d(96)", "nn.LayerNorm(96)")
    .replace(", bucket_cap_mb=0.02", "")
    .replace("    assert len(determinism.buckets(model)) > 1\n", "")
)


class Resized(Operated):
    """Four launchers, of which two are enough; no wait but for who comes."""

    replicas = 4
    more: ClassVar[dict[str, str]] = {
        "DDPJOB_MIN_REPLICAS": "2",
        "DDPJOB_SHRINK_AFTER_SECONDS": "0",
        "DDPJOB_GROW_AFTER_SECONDS": "0",
        "DDPJOB_TRAINER_RESCUE": "0",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.script.write_text(ELASTIC)

    def results(self) -> set[str]:
        return {path.read_text() for path in self.directory.glob("result-*")}


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Resized]:
    found = Resized(tmp_path)
    yield found
    found.end()


@pytest.fixture
def undisturbed(tmp_path: Path) -> set[str]:
    """What four ranks end with when nobody is lost."""
    training = Training(tmp_path / "undisturbed")
    training.script.write_text(ELASTIC)
    training.launch("--nproc", "4", *COLD)
    assert training.codes() == [0], training.errors
    return {path.read_text() for path in training.directory.glob("result-*")}


@pytest.mark.fault("T5", "T9")
def test_it_trains_short_and_grows_to_the_same_bits(gang, undisturbed):
    gang.hold("1-0-step-5", "1-1-step-5", "1-1-step-13")
    gang.begin()
    gang.at("1-0-step-5", range(4))
    assert gang.state()["size"] == 4
    gang.lose(1)
    gang.at("1-1-step-5", range(3))
    assert (gang.state()["size"], gang.state()["away"]) == (3, [1])
    gang.replace(1)
    gang.until(lambda: gang.state().get("parked") == [1], "the new pod waits")
    gang.release("1-1-step-5")
    gang.until(lambda: gang.marks("asked"), "the hub has found a snapshot of this round")
    gang.release("1-1-step-13")
    assert gang.codes() == [0] * 4, gang.errors
    assert len(undisturbed) == 1
    assert gang.results() == undisturbed
    assert [one["kind"] for one in gang.report()["rounds"]] == ["lost", "grown"]
    lines = (gang.directory / "losses-0").read_text().splitlines()
    again = Counter(line.split()[0] for line in lines) - Counter(map(str, range(16)))
    assert again == {"4": 1}, "by the loss; growth does none again"
    assert [gang.report(seat)["finished"] for seat in range(4)] == [
        {"number": 1, "round": 2, "size": 4}
    ] * 4
    assert [gang.report(seat)["replica"] for seat in range(4)] == [0, 3, 1, 2]


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        (SCRIPT, "use level='elastic', or leave out spec.minReplicas"),
        (ELASTIC.replace("level=", "shards=3, level="), "start over with more shards"),
        (
            ELASTIC.replace("model, ", "run.register('x', {}, per_rank=True); model, "),
            "leave per_rank out",
        ),
        ("import torch", "import it in the script itself"),
    ],
    ids=["level", "shards", "per rank", "library"],
)
@pytest.mark.tier("all")
def test_a_program_whose_size_cannot_change_is_refused_with_the_cure(gang, text, cure):
    gang.script.write_text(text)
    gang.begin()
    assert gang.codes() == [64] * 4, gang.errors
    assert cure in "".join(gang.errors)
