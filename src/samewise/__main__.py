"""`python -m samewise` is `samewise`."""

from samewise.cli.main import main

if __name__ == "__main__":
    main()
