"""`python -m tessera` is the command line."""

from tessera.cli import main

if __name__ == "__main__":
    main()
