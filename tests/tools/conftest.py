"""Fixtures of tests of tools."""

import contextlib

import pytest

# Before the workers are forked: it takes seconds.
with contextlib.suppress(ImportError):
    import matplotlib.pyplot  # noqa: F401


@pytest.fixture(scope="session")
def opened_fonts() -> None:
    """matplotlib keeps the files of its fonts open from the first text on: no test is to be blamed
    for that."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    pyplot.figure().suptitle("text")
    pyplot.gcf().canvas.draw()
    pyplot.close("all")
