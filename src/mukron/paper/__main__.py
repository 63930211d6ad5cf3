"""The entry point of a worker process, which ``mukron.paper.run`` starts."""

import sys

from mukron.paper.run import main

if __name__ == "__main__":
    sys.exit(main())
