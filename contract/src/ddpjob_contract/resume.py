"""Check the arguments with which a program resumes (spec.restart.resumeArgs, resumeWhen). Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ddpjob_contract import NEWEST


def shown_words(words: Sequence[str]) -> str:
    """Join words as a shell would split them; {newest} needs no quotes."""
    plain = (word.replace(NEWEST, "@NEWEST@") for word in words)
    return shlex.join(plain).replace("@NEWEST@", NEWEST)


def flaw(words: Sequence[str], when: str) -> str:
    """Say why arguments name a checkpoint which nothing finds; "" if they do not."""
    if when and not words:
        return f"--resume-when {when}: needs --resume-args, what the script gets where one is there"
    if not when and any(NEWEST in word for word in words):
        return (
            f"--resume-args {shown_words(words)}: {NEWEST} needs --resume-when GLOB, the"
            " checkpoints of which it is the newest, such as 'checkpoints/*.pt'"
        )
    return ""
