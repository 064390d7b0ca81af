# SPDX-License-Identifier: Apache-2.0
"""Pictures by matplotlib with colours that follow the light or dark scheme of the page around them.

    figure = new_figure(5.2, 2.9)
    ...                                   # with colours of THEME
    text = svg_of(figure)

Draw with the colours of the light scheme; in the SVG each becomes a CSS variable with two values. No torch.
"""

import io

from megatron.errors import MissingPackage

THEME = {  # colour in the light scheme -> in the dark one
    "#1f2937": "#e5e7eb",  # INK
    "#6b7280": "#9ca3af",  # SOFT
    "#d1d5db": "#4b5563",  # LINE
    "#2563eb": "#60a5fa",  # BLUE
    "#ea580c": "#fb923c",  # ORANGE
    "#059669": "#34d399",  # GREEN
    "#7c3aed": "#a78bfa",  # VIOLET
    "#dc2626": "#f87171",  # RED
}
INK, SOFT, LINE, BLUE, ORANGE, GREEN, VIOLET, RED = THEME


def new_figure(width: float, height: float, needed_by: str):
    """An empty figure, sizes in inches. Raises SettingsError without matplotlib; `needed_by` is named in the message."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage(
            f"{needed_by} needs the package matplotlib", str(error), "pip install matplotlib"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def plain(axes) -> None:
    """Remove the frame of axes, and colour their text by the theme."""
    axes.tick_params(colors=INK, length=0)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(LINE)


def svg_of(figure) -> str:
    """The figure as SVG without a background. Text stays text, and the same figure gives the same bytes."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "megatron"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return themed(out.getvalue())


def themed(svg: str) -> str:
    """The SVG with the theme's colours as variables of the scheme."""
    light, dark = ("".join(f"--c{n}: {pair[at]}; " for n, pair in enumerate(THEME.items())) for at in (0, 1))
    for number, colour in enumerate(THEME):
        svg = svg.replace(f": {colour}", f": var(--c{number})")
    style = (
        f"<style>svg {{ {light}}} @media (prefers-color-scheme: dark) {{ svg {{ {dark}}} }} "
        "text { font-family: system-ui, sans-serif !important } image { image-rendering: pixelated }</style>"
    )
    at = svg.index(">", svg.index("<svg")) + 1
    return f"{svg[:at]}\n {style}{svg[at:]}"
