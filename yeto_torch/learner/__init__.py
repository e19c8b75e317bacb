"""One learner of a fleet: its mind, its parameters, its connection, its step boundary."""
