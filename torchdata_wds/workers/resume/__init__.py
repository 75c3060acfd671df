r"""Stopping a graph in the middle of an epoch, and resuming it at the same item.

A loader that stops after item 1,000 must resume with item 1,001 and yield every later item exactly once, as if it had
never stopped. It should not read the earlier items again. Workers make this hard because they run ahead: when the
loader delivers item 1,000, a worker may already have read shards whose samples are still undelivered. So no pipe can
know where it *will* have to resume. Instead, pipes report facts that stay true no matter what is delivered later, and
the position is computed from those facts:

    worker process (resume.stream)                         main process
    ------------------------------                         ---------------------------------
    load_wds_shards  "shard 7 began after 3,100 samples"
    group_by_key     "pass 0 had 51,200 samples"     --->  Facts of each worker (pipes.resume_facts)
    wds_epoch        "pass 1 began at item 120"      with       |
    wds_map          "a handler dropped items"       the        |   items delivered: 1,000
                         |                           items      v
                         |                                 Turns: worker 0 yielded 334, workers 1 and 2 333 each
                       Watch                                    |   (resume.checkpoints)
                                                                v
                                                           state: counts, order, facts, signature
                                                                |   (resume.signatures)
    new worker process                                          v
    ------------------                                     Point per worker: item 334, facts, seeds
    planner: from the end of the graph up to the          <-----+
      grouping, which source items does each stage need?
      batch(4): for item 334 onward, 1,336 onward
      wds_shuffle(98): for 1,336 onward, 1,433 onward, and the 97 earlier ones in its buffer, known from the seed
      wds_map: the same items
    group_by_key: skips to the last known shard start before the first sample needed, and counts from there

A state of another graph, other shards or another number of workers is refused with a list of the differences.
"""
