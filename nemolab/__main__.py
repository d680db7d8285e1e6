"""`python -m nemolab`: the same as the `nemolab` command."""

import sys

from nemolab.cli import main

sys.exit(main())
