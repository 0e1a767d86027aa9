"""Colours and axes of all figures. Colours are Okabe and Ito's, distinct for colour-blind eyes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
GREY = "#8C8C8C"
INK = "#222222"

# Typed as Any because matplotlib's stubs want a literal of every name it knows.
_SETTINGS: Any = {
    "font.size": 10,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#BBBBBB",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "figure.dpi": 130,
    "savefig.dpi": 130,
    "figure.facecolor": "white",
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.1,
}


@contextmanager
def figure_style() -> Iterator[None]:
    """The settings under which figures are made and saved; the caller's own come back after."""
    with mpl.rc_context(_SETTINGS):
        yield


def whole_steps(axes: Axes) -> None:
    """Lets ``axes`` show steps on x, as whole numbers."""
    axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("step")
