"""``python -m mukron`` is the command ``mukron``; so torchrun can start it: ``torchrun -m mukron train``."""

from mukron.cli import app

app(prog_name="mukron")
