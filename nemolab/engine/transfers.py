"""The ways for routed experts to reach a card's arithmetic: their names, for everybody who asks for one.

whole     a block is copied
grouped   up is copied; down is read in place, groups of 16 neurons with an active one
rows      up is copied; down is read in place, only its active neurons
pull      nothing is copied: both are read in place

No bit of an answer depends on which. What each moves is counted in `nemolab.measure.transfer`, how it works is said in
`nemolab.engine.gpu.moe_step`.
"""

from __future__ import annotations

TRANSFERS = ("whole", "grouped", "rows", "pull")
DEFAULT = "pull"
COPYING = ("whole", "grouped", "rows")  # something is copied, and so could be kept on the card or copied early
