"""`make mutations` takes minutes; that each line of its table is still there, no time."""

from mutations.table import MUTATIONS
from support.cluster import ROOT


def test_each_line_is_there_once_and_its_tests_are():
    for one in MUTATIONS:
        assert (ROOT / one.file).read_text().count(one.old) == 1, one.what
        assert one.new != one.old, one.what
        assert (ROOT / one.tests).exists(), one.what
