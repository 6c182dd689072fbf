"""`make mutations` takes minutes; that each line of its table is still there, no time."""

from __future__ import annotations

import pytest

from mutations.table import MUTATIONS, Mutation
from support.cluster import ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_the_line_is_there_once_and_its_tests_are(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old
    assert (ROOT / mutation.tests).exists()
