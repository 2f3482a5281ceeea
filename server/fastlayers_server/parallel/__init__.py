"""An engine over several ranks: the first one plans and tells the others, which compute the same steps.

frames    a plan as bytes, and back, with the requests that it names
channel   what the first rank says, over Gloo
leader    the first rank's executor: tells, then computes
follower  the other ranks: hear, then compute
groups    of several attention groups: a scheduler of each on the first rank, one plan of all
together  their ranks: each computes its group's plan in step with the others, and tells its tokens
child     the process of each rank, under torchrun
"""
