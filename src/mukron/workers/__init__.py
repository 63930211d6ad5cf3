"""Work by several processes: a foreman and his workers, Ctrl-C, locks, and reports of progress.

This room does not know what the work is. Studies and the paper's recipes bring that.
"""
