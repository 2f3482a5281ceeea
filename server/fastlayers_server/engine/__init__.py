"""The engine: requests in, tokens out.

    protocol.py                       what a front and an engine say to each other: read this first
    client.py child.py                how a front holds an engine; the process, or the thread, that it is
    loop.py                           a tick: take, plan, launch, commit, tell
    scheduler.py                      what a tick launches and what its tokens mean
      request.py queue.py running.py  a request, and a tick's plan; who waits; who has a slot and pages
      cache.py budget.py checks.py    pages and the prefix cache; how large a chunk may be; what is refused
    executor.py step.py special.py    plans on a model: steps by slot, draws with wishes
    grammar.py speculation.py mtp.py  masks; how far to draft; drafts of layers and models
    startup.py config.py metrics.py   from settings to an engine that is ready; settings; counters

What a scheduler decides is Python over integers: without torch, without a clock, so that tests run millions of steps.
"""
