r"""Stopping a graph in the middle of an epoch, and going on from there.

A loader that stops after item 1,000 must later give item 1,001 and all that follow, each once, as if it had never
stopped. The items before it should not be read again. Workers make that hard: they run ahead, so that at item 1,000 of
the loader a worker may have read shards whose samples nobody has seen yet. No pipe can say where it *will* have to go
on. So pipes report facts that stay true whatever is delivered later, and the place is computed from these:

    worker process (resume.stream)                         main process
    ------------------------------                         ---------------------------------
    load_wds_shards  "shard 7 began after 3,100 samples"
    group_by_key     "pass 0 had 51,200 samples"     --->  Facts of each worker (pipes.resume_facts)
    wds_epoch        "pass 1 began at item 120"      with       |
    wds_map          "a handler left items out"      the        |   items delivered: 1,000
                         |                           items      v
                         |                                 Turns: worker 0 gave 334, 1 gave 333, 2 gave 333
                       Watch                                    |   (resume.checkpoints)
                                                                v
                                                           state: counts, order, facts, signature
                                                                |   (resume.signatures)
    new worker process                                          v
    ------------------                                     Point per worker: item 334, facts, seeds
    planner: from the end of the graph to the grouping,   <-----+
      which items of its source does each stage need?
      batch(4): item 334 needs 1,336 and on; wds_shuffle: 1,336 and on and 97 early ones, known from the seed;
      wds_map: one for one
    group_by_key: skips to the shard that began before the first sample needed, and counts from there

A state of another graph, other shards or another number of workers is refused, with what differs.
"""
