"""A small GPT on the bytes of a text: what a method reaches in a few hundred steps, and whether its rate transfers.

options what is to be run
task    the text, one run, and its training
references  other libraries' optimizers
result  stored runs, tables and the verdict on transfer
transfer  where the best value lies at every size, and the verdict
choice  which optimizer: equal steps and equal time
drawing the figure
"""
