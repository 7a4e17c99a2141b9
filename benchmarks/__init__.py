"""One module a claim: ours, the peers and the physical limit on the same work, interleaved in one run."""
