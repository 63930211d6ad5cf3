"""The benchmark of communication: bytes that arrive on a rank in a step, counted, beside data-parallel SGD.

ranks    the processes, and what each counts
result   the stored numbers and their tables
drawing, page   the figure and the docs' tables, from the stored numbers
"""
