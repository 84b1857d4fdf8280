"""Supervised and preference training: what is learned from, and the loop over it. The trainers are in `agentrl.trainers`."""
