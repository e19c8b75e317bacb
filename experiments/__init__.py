"""Evidence that a fleet's loss stays where synchronous training would put it, at a scale anyone can repeat.

Start reading at ``margins`` (what is claimed), then ``world`` (the fleet) and ``specs`` (what is run).
"""
