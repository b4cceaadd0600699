"""The command `tandem`: the program that comes with the package."""
import os
import pathlib
import sys


def main():
    program = pathlib.Path(__file__).with_name("tandem")
    os.execv(program, ["tandem"] + sys.argv[1:])


if __name__ == "__main__":
    main()
