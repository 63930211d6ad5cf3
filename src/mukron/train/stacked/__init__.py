"""Many runs of one narrow network as one program.

A grid of learning rates, dampings and seeds at one width is many short runs that leave a computer idle. Here their
weights are stacked, W [runs, d_out, d_in], and every product and factorization is done for all of them at once. To the
curvature a stack of runs is what a layer with groups is, so factors, damping and inverses are those of one run:

    H [runs, N, d_in] inputs    D [runs, N, d_out] the loss's derivatives    F [runs, N, d_out] the Fisher's

Runs do not touch one another, and each draws from its own generators. So nothing is masked and no step waits for the
device: losses are read once an epoch, and then it is told run by run what ``train`` would have said, and where. What is
out of the ordinary, a step that ``train`` would skip or a factorization that fails at first, is left to ``train``: that
run leaves the stack and is trained alone.
"""

from mukron.train.stacked.choice import stack_size, stackable
from mukron.train.stacked.loop import StackProgress, train_stack

__all__ = ["StackProgress", "stack_size", "stackable", "train_stack"]
