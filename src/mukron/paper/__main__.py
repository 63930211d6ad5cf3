"""A worker process of ``mukron.paper.run``."""

import sys

from mukron.paper.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
