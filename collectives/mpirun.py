"""`python -m collectives.mpirun`: the same command as `adaptive run`."""

import sys

from launchers.run import main

if __name__ == "__main__":
    sys.exit(main())
