"""What this machine can do, check by check, with advice. Imports neither torch nor the engine: it must be quick.

check      one check's outcome, and how a check that breaks becomes one
software   Python, nemolab and the packages it needs
gpu        the card, its driver, and whether torch was built for it
storage    the file system where a store lies or would lie; direct I/O by a real write and read
resources  memory, limits, processor, the kind of system
examine    all of them together
"""

from nemolab.doctor.check import Check
from nemolab.doctor.examine import Report, examine

__all__ = ["Check", "Report", "examine"]
