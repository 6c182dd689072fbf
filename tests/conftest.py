"""Options of every level: which tier is run, who runs which file, and what is kept of a run."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.workermanage import WorkerController

from support import cluster, durations, sharing, tiers
from support.busy import busy_machine

_SHARED = pytest.StashKey[sharing.Shared]()
LINES_AT_ONCE = 40  # of a failure that is told before the summary, which has it whole

# Launchers here make no drill: their tests count rounds. Those of the drill ask for one.
os.environ["DDPJOB_DRILL"] = "Never"

# `make soak` tries new random examples each time; else every run of the tests is the same.
_SOAK = os.environ.get("DDPJOB_SOAK", "")
hypothesis.settings.register_profile(
    "test", derandomize=True, deadline=None, max_examples=120, stateful_step_count=30
)
hypothesis.settings.register_profile(
    "soak",
    deadline=None,
    max_examples=20_000 // int(_SOAK.partition("/")[2] or 1),
    stateful_step_count=60,
    print_blob=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("soak" if _SOAK else "test")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--test-durations",
        action="store_true",
        help="write docs/internals/test-durations.json from what is run",
    )
    parser.addoption("--busy", action="store_true", help="run two endless loops beside the tests")
    parser.addoption(
        "--tier",
        choices=tiers.TIERS,
        default=tiers.ALL,
        help="leave later tiers out (default: none)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts us in the background ignores Ctrl-C for us, and so would all we start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):  # of xdist: what is for the machine is its parent's
        config.stash[_SHARED] = sharing.Shared(Path(config.workerinput["shared"]))
        return
    config.stash[_SHARED] = sharing.Shared(Path(tempfile.mkdtemp(prefix="ddpjob-tests-")))
    config.add_cleanup(lambda: _end(config.stash[_SHARED]))
    config.pluginmanager.register(_AtOnce(config))
    if config.getoption("--busy"):  # no test has the machine to itself, as on any shared one
        loops = ExitStack()
        loops.enter_context(busy_machine())
        config.add_cleanup(loops.close)
    if config.getoption("--test-durations"):
        config.pluginmanager.register(durations.Recorder(config))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    node.workerinput["shared"] = str(node.config.stash[_SHARED].folder)


@pytest.fixture(scope="session")
def shared(pytestconfig: pytest.Config) -> sharing.Shared:
    """What the workers of this run have in common."""
    return pytestconfig.stash[_SHARED]


def _end(shared: sharing.Shared) -> None:
    with ExitStack() as ends:  # of which none is left out where another fails
        ends.callback(shutil.rmtree, shared.folder)
        for name in shared.clusters():
            ends.callback(cluster.down, name)


@pytest.hookimpl(trylast=True)  # after the levels' own choices
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.select(config, items, config.getoption("--tier"))
    sharing.longest_first(items, durations.known())


class _AtOnce:
    """Tells each failure when it happens: a run of an hour may be stopped before its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.line("")  # the row of dots ends here
        terminal.section(f"{report.nodeid} ({report.when})", sep="-", red=True)
        terminal.write_line("\n".join(report.longreprtext.splitlines()[-LINES_AT_ONCE:]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return sharing.workers()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> sharing.ByFile:
    return sharing.ByFile(config, log)
