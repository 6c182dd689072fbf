"""The documentation's site, as a browser opens it from files: on a phone, in the dark, searched."""

import itertools
import re
import subprocess
from pathlib import Path

import pytest

from devcluster import host, venv
from support.browser import browser
from support.cluster import ROOT
from support.patience import wait_for

pytestmark = pytest.mark.tier("all")
#: With tables, code and long names.
PAGES = ("index.html", "reference/api.html", "guides/goodput.html")
#: Of each text its colour and the backgrounds behind it, the nearest first.
COLOURS = """[...document.querySelectorAll('.md-content :is(h1,h2,p,li,td,a,code)')].map(one => {
    const found = [getComputedStyle(one).color];
    for (; one; one = one.parentElement) found.push(getComputedStyle(one).backgroundColor);
    return found})"""
SEARCH = """{const field = document.querySelector('.md-search__input');
    field.focus(); field.value = 'goodput';
    field.dispatchEvent(new Event('input')); field.dispatchEvent(new Event('keyup'))}"""
FOUND = "(document.querySelector('a.md-search-result__link') || {}).href"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        home = venv.ensure_environment(ROOT / "dev/requirements", print, ("site",))
    except (host.Failure, OSError) as error:
        pytest.skip(f"no mkdocs: {error}")
    where: Path = tmp_path_factory.mktemp("site")
    built = [str(home / "bin/mkdocs"), "build", "--strict", "--site-dir", str(where)]
    done = subprocess.run(built, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return where


def contrast(colours: list[str]) -> float:
    """Return the ratio of WCAG 2 between a text and what is behind it."""
    back = [255.0] * 3
    lights = []
    for colour in reversed(colours):
        *front, opaque = [*map(float, re.findall(r"[\d.]+", colour)), 1.0][:4]
        back = [opaque * new + (1 - opaque) * old for new, old in zip(front, back, strict=True)]
        linear = [(one / 255 + 0.055) ** 2.4 / 1.055**2.4 for one in back]
        lights.append(sum(map(float.__mul__, (0.2126, 0.7152, 0.0722), linear)) + 0.05)
    low, high = sorted(lights[-2:])
    return high / low


def test_it_fits_a_phone_and_is_read_in_light_and_dark(site, tmp_path):
    backs = set()
    with browser(tmp_path) as shown:
        for page, scheme in itertools.product(PAGES, ("light", "dark")):
            shown.open(site / page, 390, scheme)
            assert shown.value("document.documentElement.scrollWidth") <= 390, page
            found = shown.value(COLOURS)
            backs.add(found[0][-2])
            assert [one for one in found if contrast(one) < 4.5] == [], (page, scheme)
    assert len(backs) == 2


def test_its_search_needs_no_network(site, tmp_path):
    with browser(tmp_path) as shown:
        shown.open(site / "index.html", 1300, "light")
        shown.value(SEARCH)
        found = wait_for(lambda: shown.value(FOUND), "the search to find a page")
        assert Path(found.partition("?")[0].removeprefix("file://")).is_file()
        assert "goodput" in found
        assert [one for one in shown.requested if not one.startswith(("file:", "data:"))] == []
