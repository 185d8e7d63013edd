"""The commands, as `python -m fedforget`."""

from fedforget.cli import main

if __name__ == "__main__":
    main()
