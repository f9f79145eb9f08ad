"""Colours that people with any kind of colour vision can tell apart, on light and dark grounds.

They are those of Okabe and Ito (2008) without black. No picture says anything by colour alone: sequences have letters
or names beside it, states have hatching or marks.
"""

PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#0072B2")
SHARED, OTHER, KEPT = "#5A5A66", "#A9A9B2", "#C9C9D2"
"""Greys, for what belongs to no one sequence."""
WAITING, PROMPT, DECODING, PREEMPTED = "#B8B8C2", "#0072B2", "#56B4E9", "#E69F00"


def of_sequence(index: int) -> str:
    """The colours begin again after seven sequences."""
    return PALETTE[index % len(PALETTE)]


def ink_on(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#FFFFFF"
