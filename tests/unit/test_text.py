"""Text of strangers and URLs with passwords, made safe to show."""

import re
import unicodedata
from urllib.parse import quote, unquote

from hypothesis import given
from hypothesis import strategies as st

from ddpjob_contract.text import clean, without_credentials


@given(st.text())
def test_nothing_shown_moves_a_cursor_or_ends_a_line(text):
    assert not [c for c in clean(text) if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029"]
    plain = text.translate(dict.fromkeys(map(ord, "\t\r\n")))
    assert len(clean(plain)) == len(plain)


URLS = {
    "s3://{}@host/bucket/job": "s3://***@host/bucket/job",
    "s3://user:{}@host/bucket/job": "s3://***@host/bucket/job",
    "https://user:{}@host:99/x?sig=1#2": None,
    "https://host/x?sig={}&sp=r": None,
    "https://host/x?{}": None,
    "https://host/x#{}": None,
    "simplecache::s3://user:{}@host/x": None,
    "zip://*.csv::https://user:{}@host/x": None,
    "user:{}@host/bucket": "***@host/bucket",
}
#: Ends that show where a piece of a secret was left.
SECRETS = st.text(st.characters(exclude_characters='"&'), max_size=12).map("ZqZ{}qZq".format)
ODD = st.text("@:/?#=%41 '\\;", max_size=9).map("ZqZ{}qZq".format)


@given(st.sampled_from(sorted(URLS)), SECRETS | ODD)
def test_no_part_of_a_password_or_a_signature_is_shown(form, secret):
    if "?" in form:
        secret = secret.replace("#", "")  # it would be the end of a query
    url = form.format(secret)
    for said in (
        url, repr(url), unquote(url), quote(url, errors="replace"),
        f"snapshots.upload={url!r} cannot be used: {url}",
        f"PermissionError: {url}/000000000000001/start.json: no", f"Url: '{url}'. {secret}",
        f"nonnumeric port: {secret + '@host'!r}", f"bad signature {secret}", unquote(secret),
        quote(secret, "", errors="replace"), repr(secret),
    ):  # fmt: skip
        shown = without_credentials(said, url)
        assert "ZqZ" not in shown, (said, shown)
        assert "qZq" not in shown, (said, shown)
    if (wanted := URLS[form]) and not set(secret) & set("?#"):
        assert without_credentials(url, url) == wanted


@given(SECRETS.filter(lambda text: not re.search(r"[\s'<>]", text)))
def test_of_a_url_that_nobody_knew_it_is_hidden_too(secret):
    for form in URLS:
        if "://" in form:
            shown = without_credentials(f"no answer from {form.format(secret)} within 2 s")
            assert "ZqZ" not in shown, shown
            assert "qZq" not in shown, shown
            assert shown.startswith("no answer from ")


def test_what_is_no_secret_stays():
    for text in (
        "s3://bucket/job", "file:///srv/store", "memory://x: no such file", "/srv/store", "a@b c?",
        "rank 1: x:y://", "", "https://host:99/a/b.json",
    ):  # fmt: skip
        assert without_credentials(text) == text
        assert without_credentials(f"{text}: no", "s3://bucket/job") == f"{text}: no"
    assert without_credentials("https://h/x?a=b", "") == "https://h/x?***"
