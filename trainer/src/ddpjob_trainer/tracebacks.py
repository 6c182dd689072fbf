"""Find the exception that ended a program in its output, line by line.

The launcher's output pump feeds each stream of a worker, the worker's own record the text of an
exception. Never imports torch: any program may run.
"""

from __future__ import annotations

import re
from collections import deque

#: Characters kept of an exception; a report takes fewer.
MOST = 400
#: A program survived an exception so many lines ago: one that ends by it prints little after it.
_SURVIVED_LINES = 200
#: torch's prefix of traceback lines once a process group exists; torchrun has its own.
_PREFIX = re.compile(r"^(?:\[\w+\]: ?)+")
_COLOUR = re.compile("\x1b\\[[0-?]*[ -/]*[@-~]")
_HEAD = "Traceback (most recent call last)"
#: Python's, behind what a log puts before it, or in the frame that rich draws.
_HEADER = re.compile(
    rf"(?P<before>.*?)(?P<frame>[\u2500-\u257f+-]+ )?{re.escape(_HEAD)}(?(frame) .*|:)$"
)
#: In one line of a log of JSON objects.
_ESCAPED = re.compile(rf'{re.escape(_HEAD)}:\\n((?:[^"\\]|\\.)*)"')
#: What a script's own excepthook may print, without a traceback: among its last lines.
_PRINTED = re.compile(r"(?:^|\s)((?:[^\W\d]\w*\.)*[A-Z]\w*(?:Error|Exception)(?:: .+|\(.*\)))$")
_LAST_LINES = 3
_EXCEPTION = re.compile(r"^[^\W\d][\w.<>]*(?::(?: .*)?)?$")
_SYNTAX = re.compile(r'^  File ".*", line \d+$')  # of code that never ran, without a header
_SYNTAX_ERROR = re.compile(r"^(Syntax|Indentation|Tab)Error: ")
_GROUP = re.compile(r"^ *[|+] ?")  # before the lines of an exception group
_FATAL = "Fatal Python error: "
_FRAME = re.compile(r'^  File "(.+)", line \d+')
_WHERE = re.compile(r'^  File (".*", line \d+ in .*)$')
#: After these lines an exception did not end the program.
_ASIDE = ("Exception ignored ", "Exception in thread ", "Error in ", "--- Logging error ---")
_CHAINED = ("During handling of the above exception,", "The above exception was the direct cause")
_LOGGED = re.compile(r"\[[IWEF]\d{4} ")  # by torch's C++
_CPP_FRAMES = ("Exception raised from ", "frame #", "C++ CapturedTraceback:")


def shorten(text: str, most: int = MOST) -> str:
    """Cut a text in its middle: its head has names, its tail figures and causes."""
    if len(text) <= most:
        return text
    head = (most - 5) * 2 // 3
    return f"{text[:head]} ... {text[len(text) - (most - 5 - head) :]}"


def uncoloured(line: str) -> str:
    """Take a terminal's colours out of a line."""
    return _COLOUR.sub("", line) if "\x1b" in line else line


def words(text: str) -> str:
    """Return an exception with its message, of however many lines, as one line."""
    found = Tracebacks()
    for line in ("Traceback (most recent call last):", *text.splitlines()):
        found.feed(line)
    return found.exception or shorten(" ".join(text.split()))


class Tracebacks:
    """The last exception of one stream that may have ended its program."""

    def __init__(self) -> None:
        self.fatal = ""  # faulthandler's error as the process crashes
        self.raised_in = ""  # the file of its innermost frame; "" where another one was its cause
        self._chained = False
        self._found = ""
        self._beside = ""  # of a thread, or of a clean-up
        self._since = 0  # lines after it
        self._aside = False
        self._inside = False  # a traceback; its exception follows
        self._syntax = False
        self._message: list[str] | None = None  # lines that may continue
        self._prefixed = False
        self._previous = ""  # the last line that is not empty
        self._before = ""  # what a log puts before the lines of this traceback
        self._last: deque[str] = deque(maxlen=_LAST_LINES)  # that are not empty

    @property
    def exception(self) -> str:
        """Return one line that begins with the exception's name, "" without one."""
        return self._found or self._beside or self._printed() or self.fatal

    def _printed(self) -> str:
        found = (_PRINTED.search(line) for line in reversed(self._last))
        return next((shorten(one[1]) for one in found if one), "")

    def feed(self, line: str) -> None:
        """Take in the next line, without its end."""
        line = uncoloured(line).rstrip()
        of_rank = _PREFIX.match(line) is not None
        line = _PREFIX.sub("", line)
        plain = _GROUP.sub("", line)
        begins = _HEAD in line
        if begins and (found := _HEADER.match(line)):
            self._begin(found["before"])
        elif begins and (found := _ESCAPED.search(line)):
            self._begin()
            for part in found[1].split("\\n"):
                self._of_traceback(part.replace('\\"', '"'), of_rank=False)
            self._inside, self._message = False, None
        elif plain.startswith(_FATAL):
            self.fatal = shorten(plain)
        elif self.fatal and self._previous.startswith("Current thread "):
            place = _WHERE.match(plain)
            self.fatal = shorten(self.fatal + (f": {place[1]}" if place else ""))
        elif self._inside:
            self._of_traceback(plain, of_rank=of_rank)
        elif _SYNTAX.match(plain):
            self._inside = self._syntax = True
            self._of_traceback(plain, of_rank=of_rank)
        elif self._message is None or not self._goes_on(plain, of_rank=of_rank):
            self._message = None
            self._since += 1
            if self._since > _SURVIVED_LINES:
                self._found = self._beside = ""
        if plain.strip():
            self._previous = plain
            self._last.append(plain)

    def _begin(self, before: str = "") -> None:
        self._before, self.raised_in = before, ""
        self._chained = chained = self._previous.startswith(_CHAINED)
        self._aside = self._previous.startswith(_ASIDE) or (chained and self._aside)
        self._inside, self._syntax, self._message = True, False, None

    def _of_traceback(self, plain: str, *, of_rank: bool) -> None:
        """Skip a frame, or take the exception at last."""
        plain = plain.removeprefix(self._before)
        if (frame := _FRAME.match(plain)) and not self._chained:
            self.raised_in = frame[1]
        if not plain or plain.startswith(" "):
            return
        if not (_SYNTAX_ERROR if self._syntax else _EXCEPTION).match(plain):
            self._inside = not self._syntax  # else another process prints in between
            return
        self._inside = False
        self._prefixed = of_rank
        self._message = [plain]
        self._keep(plain)

    def _goes_on(self, plain: str, *, of_rank: bool) -> bool:
        """Return whether a line continues the message; without the prefix it may be another's."""
        assert self._message is not None
        open_ended = self._message[-1].endswith(":") or plain.startswith((" ", "\t"))
        if (
            not plain.strip()
            or _LOGGED.match(plain)
            or not (of_rank if self._prefixed else open_ended)
        ):
            return False
        if plain.startswith(_CPP_FRAMES):
            return self._prefixed
        if sum(map(len, self._message)) < 2 * MOST:
            self._message.append(plain.strip())
            self._keep(" ".join(self._message))
        return True

    def _keep(self, text: str) -> None:
        self._since = 0
        if self._aside:
            self._beside = shorten(text)
        else:
            self._found = shorten(text)
