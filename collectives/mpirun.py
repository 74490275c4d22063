"""`python -m collectives.mpirun`: what `adaptive run` is."""

import sys

from launchers.run import main

if __name__ == "__main__":
    sys.exit(main())
