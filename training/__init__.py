"""Trains a draft for a target: prompts, answers with tapped states, fit; a leaf of its own."""
