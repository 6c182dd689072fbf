"""`ddpjob audit` on scripts of other trainers, in releases that resume wrongly and rightly.

`make foreign` runs this, with the packages of today; .venv-foreign-broken holds older ones, which
take the first epoch's order after a restart (accelerate#4071, transformers#40691).
"""

import importlib.util

import pytest

from support.audits import audited
from support.launching import ROOT

pytestmark = pytest.mark.tier("all")
NAMES = ("accelerate", "transformers")


def needed(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed here: make foreign")


@pytest.fixture(scope="module")
def broken() -> str:
    """The folder of the older packages."""
    found = list((ROOT / ".venv-foreign-broken").glob("lib/python*/site-packages"))
    if not found:
        pytest.skip("the older packages are not installed here: make foreign")
    return str(found[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_release_that_resumes_rightly_is_called_right(name, tmp_path):
    needed(name)
    found = audited(tmp_path, f"with_{name}.py")
    assert (found.code, found.result["verdict"]) == (0, "right"), found.out
    assert (found.result["killed_after"], found.result["epoch_steps"]) == (17, 12)
    assert found.result["framework"] == name


@pytest.mark.parametrize("name", NAMES)
def test_a_release_that_takes_the_first_epochs_order_is_told_so(name, tmp_path, broken):
    needed(name)
    found = audited(tmp_path, f"with_{name}.py", first=broken)
    assert (found.code, found.kinds) == (1, [("inputs", 16)]), found.out
    expected = {"place": "earlier", "step": 4, "from": 1, "epoch": 2}
    assert found.facts.items() >= expected.items()
    assert "accelerate 1.15 or newer" in found.out


def test_lightning_with_a_shuffled_loader_is_told_that_samples_are_others(tmp_path):
    needed("lightning")
    found = audited(tmp_path, "with_lightning.py")
    assert (found.code, found.kinds) == (1, [("inputs", 16)]), found.out
    assert "StatefulDataLoader" in found.out
