"""`python -m grouper` is `grouper`: torchrun starts modules, not console scripts."""

from grouper.cli.main import main

if __name__ == "__main__":
    main()
