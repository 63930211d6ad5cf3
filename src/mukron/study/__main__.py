"""The entry point of a worker process of a study, which ``StudyForeman`` starts."""

import sys

from mukron.study.work import main

if __name__ == "__main__":
    sys.exit(main())
