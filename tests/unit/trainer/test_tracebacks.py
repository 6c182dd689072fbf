"""The exception that ended a program, found in what Python and torch really print."""

import os
import subprocess
import sys

import pytest

from ddpjob_trainer.tracebacks import MOST, Tracebacks, shorten, words

THREAD = """import sys, threading
def f(): raise ValueError('aside')
t = threading.Thread(target=f); t.start(); t.join()
"""
#: Programs, and the exception that each is ended by.
PROGRAMS = {
    "plain": ('raise ValueError("bad shape")', "ValueError: bad shape"),
    "of a module": ("import shutil\nraise shutil.ReadError('x')", "shutil.ReadError: x"),
    "of a function": (
        "def f():\n  class E(Exception): pass\n  raise E('x')\nf()", "f.<locals>.E: x",
    ),
    "while handling": (
        "try:\n  {}['k']\nexcept KeyError:\n  raise ValueError('x')", "ValueError: x",
    ),
    "lines of detail": (
        "raise RuntimeError('Error(s) in loading state_dict:\\n\\tMissing key(s): \"w\"')",
        'RuntimeError: Error(s) in loading state_dict: Missing key(s): "w"',
    ),
    "a note": ("e = ValueError('x')\ne.add_note('note')\nraise e", "ValueError: x"),
    "long recursion": ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    "group": (
        "raise ExceptionGroup('many', [ValueError('one'), TypeError('two\\nlines')])",
        "ExceptionGroup: many (2 sub-exceptions)",
    ),
    "after a group": (
        ("try:\n  raise ExceptionGroup('many', [ValueError('one')])\n"
        "except ExceptionGroup as e:\n  raise OSError('last') from e"),
        "OSError: last",
    ),
    "syntax": ("import ast\nast.parse('x = (')", "SyntaxError: '(' was never closed"),
    "syntax of the program": ("x = (", "SyntaxError: '(' was never closed"),
    "behind a progress bar": (
        "import sys\nsys.stderr.write('\\r 10%|#  | 1/10')\nraise OSError('x')", "OSError: x",
    ),
    "a thread's before": (f"{THREAD}raise TypeError('main')", "TypeError: main"),
    "a thread's alone": (f"{THREAD}sys.exit(1)", "ValueError: aside"),
    "at exit": (
        ("import atexit\ndef f():\n  try: {}['k']\n  except KeyError: raise OSError('late')\n"
        "atexit.register(f)\nraise ValueError('main')"),
        "ValueError: main",
    ),
    "survived long ago": (
        ("import sys, traceback\ntry: {}['k']\nexcept KeyError: traceback.print_exc()\n"
        "for n in range(300): print('line', n, file=sys.stderr)\nsys.exit(3)"),
        "",
    ),
    "words": ("import sys\nsys.exit('no data')", ""),
    "printed long before its end": (
        ("import sys\nprint('ValueError: x', file=sys.stderr)\n"
         "for n in range(4): print('on', n, file=sys.stderr)\nsys.exit(1)"), "",
    ),
    "a hook of its own": (
        ("import sys\nsys.excepthook = lambda kind, error, trace: print('crash:',"
         " f'{kind.__name__}: {error}', 'bye', sep='\\n', file=sys.stderr)\n"
         "raise ValueError('boom at 3')"),
        "ValueError: boom at 3",
    ),
    "a hook that logs": (
        ("import logging, sys\nsys.excepthook = lambda kind, error, trace:"
         " logging.error('uncaught %r', error)\nraise ValueError('boom at 3')"),
        "ValueError('boom at 3')",
    ),
    "a hook that logs the traceback": (
        ("import logging, sys\nsys.excepthook = lambda *what: logging.critical('over', exc_info="
         "what)\nraise ValueError('boom at 3')"),
        "ValueError: boom at 3",
    ),
    "each line logged": (
        ("import sys, traceback\nsys.excepthook = lambda *what: [print('E | ' + line, file="
         "sys.stderr) for part in traceback.format_exception(*what) for line in part.splitlines()]"
         "\nraise ValueError('boom at 3')"),
        "ValueError: boom at 3",
    ),
    "a log of JSON": (
        ("import json, sys, traceback\nsys.excepthook = lambda *what: print(json.dumps({'level':"
         " 'error', 'exception': ''.join(traceback.format_exception(*what)), 'at': 'C:\\\\x'}),"
         " file=sys.stderr)\nraise ValueError('boom \"at\" 3')"),
        'ValueError: boom "at" 3',
    ),
}  # fmt: skip


def read(text: str) -> Tracebacks:
    found = Tracebacks()
    for line in text.replace("\r", "\n").splitlines():
        found.feed(line.rstrip())
    return found


def run(*words_: object) -> str:
    command = [sys.executable, *map(str, words_)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def prefixed(text: str) -> str:
    """As torch has it with a process group."""
    return "\n".join(f"[rank12]: {line}" if line else "" for line in text.splitlines())


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_exception_is_found_in_what_python_prints(name):
    program, wanted = PROGRAMS[name]
    text = run("-c", program)
    assert read(text).exception == wanted, text
    assert read(prefixed(text)).exception.startswith(wanted)


@pytest.mark.parametrize("chain", ["from error", ""])
def test_of_an_exception_that_another_one_has_caused_no_file_is_named(tmp_path, chain):
    """The script's own line wraps what storage or a peer has done."""
    script = tmp_path / "train.py"
    script.write_text(
        "try:\n    open('/nowhere')\n"
        f"except OSError as error:\n    raise ValueError('no data') {chain}\n"
    )
    found = read(run(script))
    assert (found.exception, found.raised_in) == ("ValueError: no data", "")
    script.write_text("raise ValueError('no data')")
    assert read(run(script)).raised_in == str(script)


RICH = """\
\u256d\u2500\u2500\u2500\u2500 \x1b[31mTraceback (most recent call last)\x1b[0m \u2500\u2500\u256e
\u2502 /app/train.py:3 in <module>   \u2502
\u2502 \u2771 3 raise ValueError("boom") \u2502
\u2502 \u256d\u2500\u2500 locals \u2500\u2500\u2500\u2500\u2500\u2500\u256e          \u2502
\u2502 \u2502 ValueError: no \u2502          \u2502
\u2570\u2500\u2500\u2500\u2500\u2500\u2500\u2500\u2500\u2500\u2500\u2500\u2500\u2500\u2500\u2500\u2500\u2500\u256f
\x1b[1;31mValueError: \x1b[0mboom at step \x1b[1;36m3\x1b[0m
"""
ASCII = """\
+---------- Traceback (most recent call last) ----------+
| /app/train.py:3 in <module>                           |
| > 3 raise ValueError("boom at step 3")                |
+-------------------------------------------------------+
ValueError: boom at step 3
"""


@pytest.mark.parametrize("text", [RICH, ASCII, *(
    "\n".join(" " * 20 + line for line in one.splitlines()) for one in (RICH, ASCII)
)])  # fmt: skip
def test_an_exception_is_found_below_the_frame_that_rich_draws(text):
    """The last two as its handler of logging indents them."""
    for more in ("", "[rank1] over\n" * 9):
        assert read(f"before\n{text}\n{more}").exception == "ValueError: boom at step 3"


@pytest.mark.skipif(sys.version_info < (3, 13), reason="Python colours no traceback")
def test_an_exception_is_found_in_a_coloured_traceback():
    command = [sys.executable, "-c", "raise ValueError('boom at 3')"]
    env = {**os.environ, "FORCE_COLOR": "1"}
    text = subprocess.run(command, capture_output=True, text=True, check=False, env=env).stderr
    assert "\x1b[" in text
    assert read(text).exception == "ValueError: boom at 3"


#: The exception in the group was raised: its frames have lines that look like an exception.
GROUP = """\
def f():
    yield
of_f = f()
next(of_f)
try: of_f.throw(ValueError("cause"))
except ValueError as e: raise ExceptionGroup("many", [e])
"""


def test_a_frame_in_a_group_is_no_exception(tmp_path):
    (tmp_path / "group.py").write_text(GROUP)
    text = run(tmp_path / "group.py")
    assert "    |     yield\n" in text, "what would be taken for one"
    for printed in (text, prefixed(text)):
        assert read(printed).exception.startswith("ValueError: cause")


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("import ctypes\nctypes.string_at(0)", "Fatal Python error: Segmentation fault: "),
        (
            "import os, traceback\ntry: 1/0\nexcept Exception: traceback.print_exc()\nos.abort()",
            'Fatal Python error: Aborted: "<string>", line 4 in <module>',
        ),
    ],
)
def test_a_crash_is_told_with_its_place_whatever_was_met_before(program, wanted):
    text = run("-X", "faulthandler", "-c", program)
    assert read(text).fatal.startswith(wanted), text
    assert "line" in read(text).fatal


#: torch 2.13 with a process group; the message goes on at every line that has the prefix.
OF_RANK = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/g.py", line 5, in <module>
[rank0]:     {}["k"]
[rank0]:     ~~^^^^^
[rank0]: KeyError: 'k'

[rank0]: The above exception was the direct cause of the following exception:

[rank0]: Traceback (most recent call last):
[rank0]:   File "/g.py", line 7, in <module>
[rank0]:     raise ValueError("bad shape\\nsecond line") from e
[rank0]: ValueError: bad shape
[rank0]: second line
[rank0]:[W1127 00:40:00.123456789 ProcessGroup.cpp:1] Warning: not destroyed
"""
#: A DataLoader's worker failed, and the process raises its exception again.
OF_LOADER = """\
Traceback (most recent call last):
  File "/dl.py", line 9, in <module>
    for x in DataLoader(D(), num_workers=1): pass
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/dl.py", line 7, in __getitem__
    if i==3: raise ValueError("bad sample")
ValueError: bad sample

"""
#: torch.multiprocessing.spawn.
OF_SPAWN = """\
Traceback (most recent call last):
  File "/torch/multiprocessing/spawn.py", line 211, in join
    raise ProcessRaisedException(msg, error_index, failed_process.pid)
torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 0 terminated with the following error:
Traceback (most recent call last):
  File "/sp.py", line 2, in f
    def f(i): raise ValueError("in rank")
ValueError: in rank

"""


def test_an_exception_is_found_in_what_torch_prints():
    assert read(OF_RANK).exception == "ValueError: bad shape second line"
    assert read(OF_LOADER).exception == "ValueError: bad sample"
    assert read(OF_SPAWN).exception == "ValueError: in rank"


def test_a_stack_of_cpp_frames_hides_no_exception():
    text = (
        "Traceback (most recent call last):\n  File 'x'\n"
        "torch.distributed.DistBackendError: no peer\n"
        "Exception raised from f at /x.cpp:1 (most recent call first):\n"
    ) + "".join(f"frame #{n}: c10::f() (0x{n:x} in libc10.so)\n" for n in range(150))
    for printed in (text, prefixed(text)):
        assert read(printed).exception == "torch.distributed.DistBackendError: no peer"


def test_a_record_has_an_exception_in_one_line_that_is_cut_in_its_middle():
    assert shorten("short") == "short"
    cut = shorten("KeyError: " + "x" * 5000 + " is no such key")
    assert len(cut) == MOST
    assert cut.startswith("KeyError: x")
    assert cut.endswith("x is no such key")
    assert words("RuntimeError: Error(s):\n\tMissing") == "RuntimeError: Error(s): Missing"
    loader = f"ValueError: {OF_LOADER.partition('ValueError: ')[2]}"
    assert words(loader) == "ValueError: bad sample"
    assert words("Ä: x\ny") == "Ä: x"
