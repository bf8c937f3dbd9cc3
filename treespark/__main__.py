"""`python -m treespark` is the command `treespark`."""

from treespark.cli import main

if __name__ == "__main__":
    main()
