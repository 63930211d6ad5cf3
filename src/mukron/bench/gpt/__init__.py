"""A small GPT on the bytes of a text: what a method reaches in a few hundred steps, and whether its rate transfers.

task    the text, one run, and its training
references  other libraries' optimizers
result  stored runs, tables and the verdict on transfer
drawing the figure
"""
