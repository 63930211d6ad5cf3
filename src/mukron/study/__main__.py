"""A worker of a study; the foreman starts it."""

import sys

from mukron.study.work import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
