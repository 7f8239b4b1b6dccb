"""The style of all pictures. A page is 400 pixels wide on a telephone: letters can still be read.

An arm has one colour everywhere, the paper's three those of its Fig. 3.
"""

STYLE = {
    "figure.dpi": 110,
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
WIDTH = 5.0  # inches
COLORS = {
    "freshper": "#EA4335",
    "per": "#FBBC04",
    "no_decay": "#9C6500",
    "uniform": "#34A853",
    "epochs": "#1A3E8C",
    "on_policy": "#4285F4",
}
GREY = "#666666"
