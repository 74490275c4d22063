"""`python -m collectives.mpirun`."""

import sys

from ._launcher import main

sys.exit(main())
