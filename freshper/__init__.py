"""FreshPER: freshness-aware prioritized experience replay, one idea of the paper per module."""
