"""``python -m kvcat``, which is also how torchrun starts it."""

from kvcat.cli import main

if __name__ == "__main__":
    main()
