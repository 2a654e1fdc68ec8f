"""Training: cold start, rollout, update, and the loop that is readable on one page."""
