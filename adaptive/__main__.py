"""`python -m adaptive`: the command `adaptive`."""

from launchers.command import main

if __name__ == "__main__":
    main()
