"""A learner of several processes: rank 0 is the learner, the others do to their parameters what it does."""
