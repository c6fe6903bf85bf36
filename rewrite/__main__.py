"""`python -m rewrite`: the command where its script is not on the path."""

from rewrite.cli import main

if __name__ == "__main__":
    main()
